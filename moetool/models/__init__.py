"""Reading MoE models: what they are, their routers, their batches, their expert weights on disk."""
