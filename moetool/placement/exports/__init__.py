"""Placement files of other engines, one format per file with the format's name."""
