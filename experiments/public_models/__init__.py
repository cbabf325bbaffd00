"""Public models under distloop's promises: every architecture of keras.applications, and backbones of KerasHub."""
