"""Evaluations and predictions of a run beside its training, or after it, from the command line."""
