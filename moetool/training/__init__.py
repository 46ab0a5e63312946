"""Predictors as torch modules: their contract, training and evaluation, and replicas of few bits."""
