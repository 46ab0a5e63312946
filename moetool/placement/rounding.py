"""DIRECTOR's scale-aware iterative rounding of one layer, finished by a matching."""

import numpy as np

from moetool.placement.local_search import Layer

_INTEGRAL = 1e-7
_STEPS = 64


def round_layer(layer: Layer, x_EG: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Round shares to one GPU for each expert, within the room of each GPU.

    Shapes: x_EG shares -> gpu_E int.

    Source: DIRECTOR § VI-C b and § VII. Repairs and deviations:
        - At a vertex of the programme the tight rows leave no direction: their null space is {0}. So the printed walk
          cannot take its first step. Assignment and capacity stay hard. The scale-preserving rows (Eq. 7) and the
          latency rows are soft: if no direction is left, Eq. 7 is dropped first, then the latency rows.
        - A step in a random direction ends at the first variable that becomes 0 or 1, or at the first full capacity.
          Its probabilities keep every variable's mean. (Eq. 8 takes small steps and clamps.) Each step makes progress,
          so a macro-iteration is one step with new scales.
        - If the hard rows leave no direction, or after 64 steps, a maximum matching by shares assigns the remaining
          split experts to free slots.
    """
    x_EG = np.where(x_EG < _INTEGRAL, 0.0, np.where(x_EG > 1 - _INTEGRAL, 1.0, x_EG))
    for _ in range(_STEPS):
        split = np.argwhere((x_EG > 0) & (x_EG < 1))
        if not len(split) or not _walk(layer, x_EG, split, rng):
            break
    return _match(layer, x_EG)


def _walk(layer: Layer, x_EG: np.ndarray, split: np.ndarray, rng: np.random.Generator) -> bool:
    """Take one step of the walk in place; return false where the hard rows leave no direction."""
    experts, gpus = split[:, 0], split[:, 1]
    x_V = x_EG[experts, gpus]
    scale_V = 2.0 ** np.ceil(np.log2(np.minimum(x_V, 1 - x_V)))
    used_G = x_EG.sum(axis=0)
    slack_G = layer.room_G - used_G
    tight = np.flatnonzero(slack_G < _INTEGRAL)
    assignment = (experts[None, :] == np.unique(experts)[:, None]).astype(np.float64)
    capacity = (gpus[None, :] == tight[:, None]).astype(np.float64)
    scales = (scale_V[None, :] == np.unique(scale_V)[:, None]).astype(np.float64)
    hard = np.concatenate([assignment, capacity])
    direction = None
    for soft in ([scales, _latency_rows(layer, experts, gpus)], [_latency_rows(layer, experts, gpus)], []):
        null = _null_space(np.concatenate([hard, *soft]) * scale_V)
        if null.shape[1]:
            direction = scale_V * (null @ rng.standard_normal(null.shape[1]))
            break
    if direction is None or np.abs(direction).max() < 1e-12:
        return False
    ahead, back = (_room(layer, x_V, sign * direction, gpus, slack_G) for sign in (1.0, -1.0))
    forward = rng.random() * (ahead + back) < back
    x_V = x_V + (ahead if forward else -back) * direction
    x_EG[experts, gpus] = np.where(x_V < _INTEGRAL, 0.0, np.where(x_V > 1 - _INTEGRAL, 1.0, x_V))
    return True


def _room(layer: Layer, x_V: np.ndarray, direction: np.ndarray, gpus: np.ndarray, slack_G: np.ndarray) -> float:
    """Return the step length along a direction to the first bound."""
    with np.errstate(divide="ignore", invalid="ignore"):
        to_bound = np.where(direction > 0, (1 - x_V) / direction, np.where(direction < 0, -x_V / direction, np.inf))
        growth_G = np.bincount(gpus, weights=direction, minlength=len(slack_G))
        to_full = np.where(growth_G > 1e-12, np.maximum(slack_G, 0.0) / growth_G, np.inf)
    tight = slack_G < _INTEGRAL
    return float(min(to_bound.min(), np.where(tight, np.inf, to_full).min()))


def _latency_rows(layer: Layer, experts: np.ndarray, gpus: np.ndarray) -> np.ndarray:
    """Return the work that a unit of each variable adds to its GPU, and the traffic that it saves."""
    num_gpus = len(layer.room_G)
    total_E = layer.tokens_GE.sum(axis=0)
    mine = np.arange(num_gpus)[:, None] == gpus
    rows = np.concatenate([mine * total_E[experts], mine * layer.tokens_GE[gpus, experts]])
    return rows[rows.any(axis=1)] / max(1.0, float(total_E.max()))


def _null_space(rows: np.ndarray) -> np.ndarray:
    _, values, right = np.linalg.svd(rows, full_matrices=True)
    rank = int((values > 1e-9 * max(1.0, float(values[0]) if len(values) else 1.0)).sum())
    return right[rank:].T


def _match(layer: Layer, x_EG: np.ndarray) -> np.ndarray:
    gpu_E = x_EG.argmax(axis=1)
    left = np.flatnonzero(x_EG.max(axis=1) < 1)
    if len(left):
        from scipy.optimize import linear_sum_assignment  # half a second, which most plans do not need

        settled_G = np.bincount(np.delete(gpu_E, left), minlength=len(layer.room_G))
        slots = np.repeat(np.arange(len(settled_G)), np.minimum(layer.room_G - settled_G, len(left)))
        rows, columns = linear_sum_assignment(x_EG[np.ix_(left, slots)], maximize=True)
        gpu_E[left[rows]] = slots[columns]
    return gpu_E
