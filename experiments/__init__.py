"""Experiments: one file, one idea; each imports distloop from the top, and any may be deleted."""
