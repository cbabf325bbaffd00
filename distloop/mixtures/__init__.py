"""Several sources in one stream, batches of like lengths, and rows of several sequences."""
