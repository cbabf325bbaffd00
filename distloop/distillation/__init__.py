"""Distillation: the loss of a `keras.distillation.Distiller`, a value per example."""
