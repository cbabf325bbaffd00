"""Recompute: activations of chosen layers are computed again in the backward pass, to save memory."""
