"""Paired measurements behind `moetool bench`."""
