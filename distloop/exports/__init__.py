"""Exports: the model as a SavedModel, a Keras or TFLite file, or its trained weights, for use without distloop."""
