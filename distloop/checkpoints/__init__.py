"""What outlives a process: checkpoints, going on and back, the start from other weights.

Read first: `store`, `checkpoint`, `resume`.
"""
