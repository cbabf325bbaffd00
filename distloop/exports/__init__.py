"""Exports: the model as a SavedModel, Keras file or TFLite file, or its trained weights alone."""
