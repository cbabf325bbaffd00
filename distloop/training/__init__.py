"""The computation: one train step, the loop around it, evaluation, prediction, and what they change.

Read first: `step`, `forward_backward`, `differentiation`; then `loop`, `compiled_loop`.
"""
