"""Histograms of weights, gradients and layers' outputs, for TensorBoard."""
