"""Actions: functions called between two compiled loops.

Read first: `action`, `evaluate`, `save`.
"""
