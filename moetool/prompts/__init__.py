"""Prompts from files, public datasets and embedded sets."""
