"""Monitoring: console, TensorBoard, files of a run.

Read first: `records`, `writers`, `console`.
"""
