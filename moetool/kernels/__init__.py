"""Products, attention and norms over stored numbers. They know arrays and formats, and no models."""
