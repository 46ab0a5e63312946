"""Experts of a running model: the pool, its tiers, copies, and compute on the host."""
