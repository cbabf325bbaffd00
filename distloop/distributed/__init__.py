"""Distribution: devices, strategies, and collectives between workers.

Read first: `strategies`, `devices`, `collectives`.
"""
