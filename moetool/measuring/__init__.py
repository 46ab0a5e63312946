"""Measurements of a machine, and of a served model against transformers."""
