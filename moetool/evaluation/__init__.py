"""Scores of predictors (match, time and size), and verification of served models."""
