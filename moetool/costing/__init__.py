"""Costs of experts, attention and loads on a machine, and of programs made of them."""
