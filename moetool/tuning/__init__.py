"""Choose how one machine serves a model: replay, measured costs, cache plans, and their frontier."""
