"""From datasets to the rows of each replica, and the place in them."""
