"""Training of the small Mixture-of-Experts model named `reference`, and of models like it."""
