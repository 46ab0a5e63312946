"""Traces and counts of other programs, one format per file with its name."""
