"""Data: datasets, and the rows of each replica.

Read first: `source`, `make_dataset`, `order`.
"""
