"""Capture: traces from a model and prompts."""
