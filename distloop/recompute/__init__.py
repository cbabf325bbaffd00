"""Recompute: activations of chosen layers, computed again in the backward pass to save memory."""
