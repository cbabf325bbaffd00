"""Training: the train step and the loop.

Read first: `step`, `forward_backward`, `differentiation`, `loop`.
"""
