"""The values of each example over a run, examples that look mislabelled, the worst; read first: `example_history`."""
