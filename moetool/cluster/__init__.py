"""Serving on several machines: edge servers that call each other's experts, and expert parallelism."""
