"""Weights from another run, a Keras file or any TensorFlow checkpoint, for `init_from` and `restore`."""
