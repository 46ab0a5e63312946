"""Predictors: what they share, how they are trained and judged."""
