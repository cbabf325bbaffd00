"""The computation: one train step, the loop around it, evaluation, prediction, and what they change."""
