"""Replicas of a model in few bits: activation-aware rounding of attention and stacked experts, layer by layer."""
