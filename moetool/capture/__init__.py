"""From a model and prompts to a trace."""
