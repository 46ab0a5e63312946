"""The runtime: how a model runs larger than its memory, from batches and KV cache to expert pools and their tiers."""
