"""Distribution: devices, strategies and workers.

Read first: `strategies`, `devices`, `workers`.
"""
