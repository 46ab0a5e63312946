"""The KV cache: pages, prefixes, and caches of single requests."""
