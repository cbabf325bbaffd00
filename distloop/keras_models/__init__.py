"""Keras models: specs from losses and metrics of `compile`, and copies of compiled models."""
