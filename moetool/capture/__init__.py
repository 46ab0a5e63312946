"""Capture of traces from a model and prompts."""
