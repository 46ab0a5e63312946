"""Placement planners, one per file with the planner's name; their inputs, scores and decisions are in `_*.py`."""
