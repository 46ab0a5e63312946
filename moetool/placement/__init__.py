"""Placement: planners, one a file named as the planner is; beside them (`_*.py`) what they are given and judged by."""
