"""Evaluation and prediction: passes over a dataset that change no weight.

Read first: `evaluation`, `prediction`.
"""
