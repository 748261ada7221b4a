"""Weights on their way from a trainer to rollout engines: snapshots, and the relay that holds them."""
