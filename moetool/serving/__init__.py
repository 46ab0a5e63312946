"""The runtime: an expert pool smaller than the model, continuous batching over it, and an OpenAI-compatible server."""
