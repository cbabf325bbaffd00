"""Monitoring: what people look at: console, TensorBoard, media, profiles and writers.

Read first: `writers`, `console`, `tensorboard`.
"""
