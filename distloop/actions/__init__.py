"""Actions: what happens at the boundaries between two compiled loops; one file an action.

Read first: `action`, `evaluate`, `save`.
"""
