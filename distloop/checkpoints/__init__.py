"""Checkpoints: saving, resuming, rollback.

Read first: `store`, `checkpoint`, `resume`.
"""
