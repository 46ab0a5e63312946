"""Placement planners, one per file with the planner's name."""
