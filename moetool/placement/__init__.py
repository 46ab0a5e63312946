"""Placement algorithms, one a file: the file's name is the planner's. See `moetool.planner.Problem`."""
