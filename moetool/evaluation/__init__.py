"""How well predictors foretell, what they take, and how that is shown."""
