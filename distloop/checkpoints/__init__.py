"""Checkpoints: saving, resuming, rollback, warm start.

Read first: `store`, `checkpoint`, `resume`.
"""
