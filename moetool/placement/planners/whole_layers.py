"""Whole layers: servers hold complete layers where they can, so that forwards send few messages to other servers."""

from dataclasses import dataclass

import numpy as np

from moetool.base.config import POSITIVE, Span, require_within
from moetool.placement.demand import per_server
from moetool.placement.gpus import pack_servers
from moetool.placement.latency import VALUE_BYTES
from moetool.placement.planner import Problem
from moetool.placement.scoring import FORWARD_TOKENS, needed_by_forward

OBJECTIVE = "messages"
_ALIKE = 0.98
"""Gains from this share of the largest count as equal: they differ by the chance of a sample's routes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the placement by whole layers.

    Attributes:
        forward_tokens: tokens of a forward; all that need a server's experts of a layer share one message.
        call_s: seconds of a message and its answer besides latency and bytes of the link.

    Raises:
        UsageError: a value is invalid.
    """

    forward_tokens: int = FORWARD_TOKENS
    call_s: float = 2e-4

    def __post_init__(self) -> None:
        require_within(self, "planner whole_layers: ", forward_tokens=POSITIVE, call_s=Span(0, below=True))


def place(problem: Problem, options: Options) -> np.ndarray:
    """Place whole layers, or each server's most used experts where these save more time.

    In each layer, a forward sends one message to each server that it needs. It needs none only if its own server holds
    nearly all experts that its tokens use, so parts of many layers save few messages.

    1. The server with the most free slots takes each layer, the largest first. Without room for all of it, it takes the
       experts that it uses most, and the next server goes on.
    2. Each server, the one with the most free slots first, takes the missing experts of a layer, or the most used ones
       of them: the layer and the number that save the most seconds per slot, until it is full. Of nearly equal layers,
       it takes the one with the fewest complete copies, since these share the other servers' calls.

    Shapes: placed_GLE bool.

    Source: this project. Prism's Eq. 2 counts remote (token, expert) pairs, although many share one message.
    """
    exists_LE, frequency_NLE = problem.exists_LE, problem.demand.frequency_NLE
    free_N = per_server(problem.cluster, problem.slots_G).astype(np.int64)
    placed_NLE = np.zeros(frequency_NLE.shape, bool)
    for layer in np.argsort(-exists_LE.sum(axis=1), kind="stable").tolist():
        while (missing_E := exists_LE[layer] & ~placed_NLE[:, layer].any(axis=0)).any():
            n = int(free_N.argmax())
            taken = _most_used(missing_E, frequency_NLE[n, layer])[: free_N[n]]
            placed_NLE[n, layer, taken] = True
            free_N[n] -= len(taken)

    needs_NLE = needed_by_forward(problem.spec, frequency_NLE, options.forward_tokens)
    forwards_NL = frequency_NLE.sum(axis=2) / np.array(problem.spec.top_k_L) / options.forward_tokens
    copies_L = (placed_NLE | ~exists_LE).all(axis=2).sum(axis=0)
    num_free, filled = int(free_N.sum()), 0
    for n in np.argsort(-free_N, kind="stable").tolist():
        message_s, pair_s = _costs(problem, options, n)
        per_slot_LE = np.full(exists_LE.shape, -np.inf)
        missing, changed = {}, np.flatnonzero((exists_LE & ~placed_NLE[n]).any(axis=1)).tolist()
        while free_N[n] > 0:
            for layer in changed:
                missing[layer] = _most_used(exists_LE[layer] & ~placed_NLE[n, layer], frequency_NLE[n, layer])
                saved_s = forwards_NL[n, layer] * message_s * _saved(needs_NLE[n, layer, missing[layer]])
                saved_s += pair_s * np.cumsum(frequency_NLE[n, layer, missing[layer]])
                per_slot_LE[layer] = -np.inf
                per_slot_LE[layer, : len(saved_s)] = saved_s / np.arange(1, 1 + len(saved_s))
            best_L = per_slot_LE[:, : free_N[n]].max(axis=1)
            if np.isneginf(best_L).all():
                break
            layer = int(np.where(best_L >= _ALIKE * best_L.max(), copies_L, np.inf).argmin())
            count = int(np.flatnonzero(per_slot_LE[layer, : free_N[n]] >= best_L[layer] * (1 - 1e-9))[-1]) + 1
            taken, changed = missing[layer][:count], [layer]
            placed_NLE[n, layer, taken] = True
            free_N[n] -= len(taken)
            copies_L[layer] += len(taken) == len(missing[layer])
            filled += len(taken)
            problem.on_progress(filled, num_free)
    return pack_servers(problem, placed_NLE)


def _most_used(wanted_E: np.ndarray, frequency_E: np.ndarray) -> np.ndarray:
    """Return the numbers of the wanted experts, the most used first."""
    experts = np.flatnonzero(wanted_E)
    return experts[np.argsort(-frequency_E[experts], kind="stable")]


def _saved(need_X: np.ndarray) -> np.ndarray:
    """Return the messages per forward that the first 1, 2, ... X missing experts save, if one server has the others.

    Args:
        need_X: `needed_by_forward` of the missing experts.
    """
    left_X = np.maximum(0.0, need_X.sum() - np.cumsum(need_X))
    return np.asarray(np.exp(-left_X) - np.exp(-need_X.sum()))


def _costs(problem: Problem, options: Options, n: int) -> tuple[float, float]:
    """Return the seconds of a message with its tokens' rows and of a remote pair, the means over the other servers.

    A row goes out once per message; the output of each pair comes back. An unknown hidden size counts as one number.
    """
    cluster = problem.cluster
    others = [m for m in range(len(cluster.servers)) if m != n] or [n]
    row_bytes = VALUE_BYTES * max(1, problem.spec.hidden_size)
    empty_s, full_s = (float(np.mean([cluster.round_trip_s(n, m, size) for m in others])) for size in (0, row_bytes))
    row_s = (full_s - empty_s) / 2
    return options.call_s + empty_s + options.forward_tokens * row_s, row_s
