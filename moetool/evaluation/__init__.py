"""Scores of predictors: match, time and size, and their tables."""
