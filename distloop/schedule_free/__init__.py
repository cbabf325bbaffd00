"""Schedule-free: evaluates models of schedule-free optimizers at the averages of what the optimizers move."""
