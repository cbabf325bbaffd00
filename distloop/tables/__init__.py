"""Tables: sparse gradients, lazy optimizers.

Read first: `sparse_packing`, `row_updates`.
"""
