"""Replica choice for tokens, and placements after the loss of ranks."""

from collections.abc import Sequence

import numpy as np


def destinations(placed_GLE: np.ndarray, server_G: Sequence[int]) -> np.ndarray:
    """Return the GPU [G, L, E] that computes expert e for tokens of GPU g; -1 if no GPU holds it.

    The order of choice: the token's own GPU, a GPU of the same server, any GPU. Source and expert fix the choice among
    several. So all rows of one source and one expert form one product, as exact results need, without communication.
    Over all sources and experts, replicas get nearly the even shares that planners assume
    (`moetool.placement.latency.flows`).

    Args:
        placed_GLE: which GPU holds which expert, bool.
        server_G: the server of each GPU.
    """
    server, expert_E = np.array(server_G), np.arange(placed_GLE.shape[2])
    to_GLE = np.full(placed_GLE.shape, -1, np.int64)
    for g in range(len(placed_GLE)):
        near_GLE = placed_GLE & (server == server[g])[:, None, None]
        from_GLE = np.where(near_GLE.any(axis=0), near_GLE, placed_GLE)
        count_LE = from_GLE.sum(axis=0)
        turn_LE = (g + expert_E) % np.maximum(count_LE, 1)
        chosen_LE = (from_GLE & (from_GLE.cumsum(axis=0) == turn_LE + 1)).argmax(axis=0)
        to_GLE[g] = np.where(placed_GLE[g], g, np.where(count_LE > 0, chosen_LE, -1))
    return to_GLE


def without(placed_GLE: np.ndarray, exists_LE: np.ndarray, members: Sequence[int]) -> np.ndarray:
    """Return the placement on the remaining GPUs, which take over the experts of the lost ones.

    An expert without a holder goes to the member with the fewest experts of its layer. A GPU may then hold more experts
    than planned.

    Args:
        placed_GLE: which GPU holds which expert, bool.
        exists_LE: which experts the model has.
        members: the remaining GPUs.
    """
    left_GLE = np.zeros_like(placed_GLE)
    if not len(members):
        return left_GLE
    left_GLE[list(members)] = placed_GLE[list(members)]
    for layer, expert in np.argwhere(exists_LE & ~left_GLE.any(axis=0)).tolist():
        fewest = min(members, key=lambda g: (int(left_GLE[g, layer].sum()), int(left_GLE[g].sum()), g))
        left_GLE[fewest, layer, expert] = True
    return left_GLE


def holders_of(placed_GLE: np.ndarray) -> list[list[list[int]]]:
    """Convert a placement to lists of holders, by layer and expert."""
    return [
        [np.flatnonzero(placed_GLE[:, layer, expert]).tolist() for expert in range(placed_GLE.shape[2])]
        for layer in range(placed_GLE.shape[1])
    ]


def placed_of(holders: Sequence[Sequence[Sequence[int]]], num_gpus: int) -> np.ndarray:
    """Convert lists of holders (`holders_of`) to a placement [G, L, E]."""
    placed_GLE = np.zeros((num_gpus, len(holders), len(holders[0])), bool)
    for layer, experts in enumerate(holders):
        for expert, gpus in enumerate(experts):
            placed_GLE[list(gpus), layer, expert] = True
    return placed_GLE
