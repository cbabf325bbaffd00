"""Workdir: the directory of a run, its lock and its files, without TensorFlow.

Read first: `directory`, `records`, `run_files`.
"""
