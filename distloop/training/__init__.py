"""Training: the train step, the loop, evaluation, prediction.

Read first: `step`, `forward_backward`, `differentiation`, `loop`.
"""
