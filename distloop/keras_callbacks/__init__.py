"""Keras callbacks that act at the end of an epoch, as actions."""
