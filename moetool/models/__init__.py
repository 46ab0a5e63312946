"""Reading MoE models: their shapes, routers, batches, and expert weights on disk."""
