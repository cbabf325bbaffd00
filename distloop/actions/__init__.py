"""Actions: functions called between two compiled loops.

Read first: `evaluate`, `save`, `write`.
"""
