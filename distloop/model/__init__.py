"""What is trained: the user's ModelSpec, its variables, metrics and random streams.

Read first: `spec`, `state`, `metrics`.
"""
