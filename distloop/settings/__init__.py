"""Settings: every setting of a run, its flag and its file; no TensorFlow.

Read first: `config`, `flags`.
"""
