"""What `python -m distloop.launch` does: starts workers, and starts them again with those that are left."""
