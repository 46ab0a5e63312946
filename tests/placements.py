"""Placements for tests."""

import numpy as np


def random_placement(rng: np.random.Generator, gpus: int, layers: int, experts: int, slots: int) -> np.ndarray:
    """Every expert somewhere, and copies as far as the slots go."""
    placed_GLE = np.zeros((gpus, layers, experts), bool)
    for layer in range(layers):
        for expert in range(experts):
            free = np.flatnonzero(placed_GLE.sum(axis=(1, 2)) < slots)
            placed_GLE[rng.choice(free), layer, expert] = True
    for g in range(gpus):
        for layer, expert in rng.permutation(np.argwhere(~placed_GLE[g]))[: slots - placed_GLE[g].sum()]:
            placed_GLE[g, layer, expert] = rng.random() < 0.5
    return placed_GLE
