"""Benchmarks: distloop next to loops written by hand, Keras and Orbit."""
