"""What happens between loops; one file an action."""
