"""Optimizers: reduction, clipping, update, moving average.

Read first: `gradients`, `loss_scale`.
"""
