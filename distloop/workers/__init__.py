"""Workers: what a process knows of the other processes of its run, without TensorFlow.

Read first: `environment`, `heartbeat`, `preemption`.
"""
