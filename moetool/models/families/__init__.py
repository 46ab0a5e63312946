"""Differences between MoE families: routers, checks of a config, inference for unlisted ones."""
