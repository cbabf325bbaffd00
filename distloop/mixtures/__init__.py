"""Mixtures: several sources in one stream, batches of similar lengths, and packed sequences."""
