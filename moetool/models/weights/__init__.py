"""Stored forms of weights, one per file, and experts in them."""
