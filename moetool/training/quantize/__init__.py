"""Low-bit replicas of a model: activation-aware rounding of attention and stacked experts, layer by layer."""
