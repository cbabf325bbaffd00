"""What a run shows and leaves behind: console, TensorBoard, rows, profiles, times, memory.

Read first: `records`, `writers`, `console`.
"""
