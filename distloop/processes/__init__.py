"""Processes: worker processes that read rows in Python."""
