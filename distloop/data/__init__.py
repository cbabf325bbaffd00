"""From datasets to the rows of each replica, and the place in them.

Read first: `source`, `make_dataset`, `position`.
"""
