"""From gradients to new weights: reduce, scale, clip, the optimizer, the moving average.

Read first: `gradients`, `loss_scale`.
"""
