"""Multi-optimizer: Keras's `MultiOptimizer`, several optimizers that update one model's variables."""
