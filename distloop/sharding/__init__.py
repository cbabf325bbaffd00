"""Sharding: optimizer slots and averages, cut over the replicas.

Read first: `sharding`, `sharded_application`.
"""
