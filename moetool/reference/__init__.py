"""Trains the small Mixture-of-Experts model that `reference` names, and models like it."""
