"""Examples: the values of each over a run, which look mislabelled, the worst; read first: `example_history`."""
