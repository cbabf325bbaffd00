"""Tables: sparse gradients of embeddings stay lists of rows, and lazy optimizers update those rows alone.

Read first: `sparse_packing`, `row_updates`.
"""
