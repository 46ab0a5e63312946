"""Predictions from routes alone, over arrays: memories of tokens, expert maps, activation matrices, scores."""
