"""Devices, strategies, workers, and what keeps them together; one network over several devices.

Read first: `strategies`, `devices`, `workers`.
"""
