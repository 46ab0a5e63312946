"""The runtime that runs models larger than memory: batching, KV cache, expert pools and memory tiers."""
