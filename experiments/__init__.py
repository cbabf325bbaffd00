"""Experiments: one file is one idea. Each imports only the public names of distloop, and any may be deleted."""
