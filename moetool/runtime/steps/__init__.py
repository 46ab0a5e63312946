"""Decode steps on a CPU as lists of compiled operations, recorded once from a model's modules."""
