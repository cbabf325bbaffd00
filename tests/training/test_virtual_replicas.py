"""Virtual replicas: what they may not do, and what they have of their own."""
