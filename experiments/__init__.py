"""Experiments: one file is one idea. Each imports only the public names of distloop, and any may be deleted."""

import distloop as distloop  # before TensorFlow, which then logs errors alone
