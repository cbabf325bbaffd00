"""Actions: what happens at the boundaries between two compiled loops; one file an action."""
