"""Predictors: their contract, features and training."""
