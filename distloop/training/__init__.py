"""The computation: one train step, the loop around it, evaluation, prediction, and what they change.

Read first: `step`, `gradient_step`, `loop`.
"""
