"""Sharding: slots and averages cut over the replicas, each part on the one that updates it.

Read first: `sharding`, `sharded_application`.
"""
