"""What looks for mistakes and good settings before a run."""
