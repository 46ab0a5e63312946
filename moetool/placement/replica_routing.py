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
    server = np.array(server_G)
    to_GLE = _by_turns(placed_GLE, np.zeros_like(server))
    near_GLE = _by_turns(placed_GLE, server)
    own_G = np.arange(len(server))[:, None, None]
    to_GLE = np.where(placed_GLE, own_G, np.where(near_GLE >= 0, near_GLE, to_GLE))
    return to_GLE


def _by_turns(placed_GLE: np.ndarray, group_G: np.ndarray) -> np.ndarray:
    """Return for each GPU a holder [G, L, E] of its group, by turns of GPU and expert; -1 if the group has none."""
    num_gpus, num_layers, num_experts = placed_GLE.shape
    holder_H, layer_H, expert_H = np.nonzero(placed_GLE)
    if not len(holder_H):
        return np.full(placed_GLE.shape, -1, np.int64)
    key_H = (group_G[holder_H] * num_layers + layer_H) * num_experts + expert_H
    holder_H = holder_H[np.argsort(key_H, kind="stable")]  # by group, layer, expert, GPU
    count_X = np.bincount(key_H, minlength=(int(group_G.max()) + 1) * num_layers * num_experts)
    shape = (-1, num_layers, num_experts)
    count_GLE = count_X.reshape(shape)[group_G]
    first_GLE = (count_X.cumsum() - count_X).reshape(shape)[group_G]
    turn_GLE = (np.arange(num_gpus)[:, None, None] + np.arange(num_experts)) % np.maximum(count_GLE, 1)
    chosen_GLE = holder_H[np.minimum(first_GLE + turn_GLE, len(holder_H) - 1)]
    return np.where(count_GLE > 0, chosen_GLE, -1)


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
