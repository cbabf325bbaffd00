"""Steps that ask for gradients as often as they like, or compute them by themselves: `ModelSpec(step_fn=...)`."""
