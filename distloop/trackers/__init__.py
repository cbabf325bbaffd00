"""Trackers: writers that send the rows of a run to Weights & Biases and MLflow."""
