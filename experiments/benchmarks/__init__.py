"""Benchmarks: how fast distloop is, next to loops written by hand, Keras and Orbit."""
