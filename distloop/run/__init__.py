"""Run: one call of `Trainer.fit`, from its settings to its last checkpoint.

Read first: `fit`, `assembly`, `fit_call`.
"""
