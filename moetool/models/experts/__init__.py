"""The routed experts of a checkpoint: MoE layers, forms, files, and their forms in slots."""
