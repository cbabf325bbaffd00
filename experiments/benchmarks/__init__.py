"""Benchmarks: how fast distloop is, next to loops written by hand."""
