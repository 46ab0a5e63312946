"""MoE-Infinity: prefetches by the earlier request that used experts most alike; the least often used goes first."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappush
from typing import Any

import numpy as np

from moetool.caching import lfu
from moetool.errors import UsageError
from moetool.types import ForwardInfo, GateEvent, ModelSpec


@dataclass(frozen=True, kw_only=True)
class Options(lfu.Options):
    """What MoE-Infinity remembers and how far it looks.

    Attributes:
        history: earlier requests whose activation matrices are kept.
        distance: how many layers ahead it prefetches.
    """

    history: int = 128
    distance: int = 3

    def __post_init__(self) -> None:
        if self.history < 1 or self.distance < 1:
            raise UsageError(
                f"policy moe_infinity: history {self.history} and distance {self.distance} must both be at least 1"
            )


class Policy(lfu.Policy):
    """Matches the running request's activation matrix with those of earlier ones and prefetches what they used.

    An activation matrix counts, for each layer and expert, the tokens of one request that used it. After every
    event, the earlier request with the most similar matrix (cosine of each layer's counts, averaged over the
    layers) gives the probability p of each expert in the coming layers, and its likeliest experts are prefetched by
    p * (1 - (l - l_now) / (L + 1)). It learns while it runs and begins with no history.

    Source: MoE-Infinity (Xue et al., 2024), its published code, and FineMoE's words on it (sections 2.3, 4.2, 4.5:
    request-level matrices, popular experts for the first layers, LFU). Readings and deviations:
        - Its code enqueues every expert of all coming layers and lets the link's speed cut the queue. Decisions must
          not depend on time here: per coming layer as many experts as the event at hand needed are prefetched,
          `distance` layers ahead (three is what FineMoE's authors profiled for the systems of this kind).
        - The first MoE layer, before any gate of the forward, gets its most used experts of all time.
        - Its code masks the layers up to the current one in the stored matrices and compares the others. Here the
          running request's matrix so far, of all its tokens, is compared wherever it has counts.
        - Evicted is the expert with the fewest uses, of several the least recently used one; what was prefetched
          for a layer still to come in this forward goes last. The topological weights of the code's other
          (encoder-decoder) eviction score are left out.
        - A prefetch takes the place of no expert that was used more often (section 5 of moetool's design).
        - With several requests in a forward, their matches' probabilities are added, weighted by their tokens.
        - A full history forgets the request that matched least often, as the code does, of several the oldest slot.
          An ended request joins it when the next forward begins, in the order of their numbers.
    """

    prefetch_distance = 3

    def __init__(self, spec: ModelSpec, options: Options, num_slots: int, predictor: Any = None) -> None:
        super().__init__(spec, options, num_slots, predictor)
        self._past_HLE = np.zeros((options.history, spec.num_layers, spec.num_experts), np.float32)  # unit rows
        self._matches = [0] * options.history
        self._num_past = 0
        self._running: dict[int, _Request] = {}
        self._ended: list[int] = []
        self._ahead: set[int] = set()  # prefetched for layers that are still to come in this forward

    def begin_request(self, request: int) -> None:
        self._running[request] = _Request(self._past_HLE)

    def end_request(self, request: int) -> None:
        self._ended.append(request)

    def begin_forward(self, info: ForwardInfo) -> Sequence[int]:
        self._ahead.clear()
        for request in sorted(self._ended):
            self._remember(self._running.pop(request))
        self._ended.clear()
        first = [key for key in range(self.spec.num_experts_L[0]) if key in self._uses]
        first.sort(key=lambda key: -self._uses[key][0])
        return first[: self.spec.top_k_L[0] * len(info.request_T)]

    def gate(self, event: GateEvent, hits: list[int], misses: list[int]) -> Sequence[int]:
        end = self.spec.expert_key(event.layer + 1, 0)
        self._ahead = {key for key in self._ahead if key >= end}
        for request, experts in zip(event.forward.request_T, event.experts_TK, strict=True):
            counts_E = self._running[request].counts_LE[event.layer]
            for expert in experts:
                counts_E[expert] += 1
        for request in set(event.forward.request_T):
            running = self._running[request]
            unit_E = _unit(running.counts_LE[event.layer])
            running.likeness_HL[:, event.layer] = np.einsum("he,e->h", self._past_HLE[:, event.layer], unit_E)
        return super().gate(event, hits, misses)

    def after_first_expert(self, event: GateEvent) -> Sequence[int]:
        layer, num_layers = event.layer, self.spec.num_layers
        last = min(layer + self.options.distance, num_layers - 1)
        if layer == last or not self._num_past:
            return ()
        chance_LE = self._chances(event.forward.request_T, layer + 1, last + 1)
        wanted: list[tuple[float, int]] = []
        for ahead, chance_E in enumerate(chance_LE, start=1):
            weight = 1 - ahead / (num_layers + 1)
            likeliest = np.argsort(-chance_E, kind="stable")[: len(event.needed)]
            wanted += [
                (-chance * weight, self.spec.expert_key(layer + ahead, expert))
                for expert, chance in zip(likeliest.tolist(), chance_E[likeliest].tolist(), strict=True)
                if chance > 0
            ]
        return [key for _, key in sorted(wanted)]

    def admit(self, key: int, prefetched: bool) -> None:
        super().admit(key, prefetched)
        if prefetched:
            self._ahead.add(key)

    def removed(self, key: int) -> None:
        super().removed(key)
        self._ahead.discard(key)

    def evict(self, locked: Collection[int]) -> int:
        kept = self._ahead.union(locked)
        return super().evict(kept if len(kept) < len(self._resident) else locked)

    def evict_for_prefetch(self, key: int, locked: Collection[int]) -> int | None:
        kept = self._ahead.union(locked)
        if len(kept) == len(self._resident):
            return None
        coldest = super().evict(kept)
        uses, time = self._uses.get(coldest, (0, 0))
        if uses > self._uses.get(key, (0, 0))[0]:
            heappush(self._heap, (uses, time, coldest))  # it stays
            return None
        return coldest

    def state(self) -> dict[str, np.ndarray]:
        """The earlier requests' matrices, float32, and how often each matched, besides the uses."""
        count = self._num_past
        return {
            **super().state(),
            "past_HLE": self._past_HLE[:count].copy(),
            "matches_H": np.array(self._matches[:count], np.int64),
        }

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        past_HLE, matches_H = state["past_HLE"], state["matches_H"]
        if past_HLE.shape[1:] != self._past_HLE.shape[1:] or len(past_HLE) != len(matches_H):
            raise ValueError(f"past_HLE has shape {past_HLE.shape}")
        super().restore(state)
        kept = np.sort(
            np.argsort(-matches_H, kind="stable")[: self.options.history]
        )  # where the history is shorter now
        self._num_past = len(kept)
        self._past_HLE[: len(kept)] = past_HLE[kept]
        self._matches[: len(kept)] = matches_H[kept].tolist()

    def _chances(self, request_T: Sequence[int], start: int, end: int) -> np.ndarray:
        """How likely each expert of the layers from `start` to before `end` is used, by the matches, not normalised."""
        total_LE = np.zeros((end - start, self.spec.num_experts))
        for request in dict.fromkeys(request_T):
            match = int(self._running[request].likeness_HL[: self._num_past].sum(axis=1).argmax())
            self._matches[match] += 1
            used_LE = self._past_HLE[match, start:end]
            total_LE += request_T.count(request) * used_LE / np.maximum(used_LE.sum(axis=1, keepdims=True), 1e-9)
        return total_LE

    def _remember(self, request: "_Request") -> None:
        """Keep the matrix of a request that is over."""
        place = self._num_past
        if place < len(self._matches):
            self._num_past += 1
        else:
            place = self._matches.index(min(self._matches))
        self._past_HLE[place] = _unit(request.counts_LE)
        self._matches[place] = 1
        for running in self._running.values():
            running.likeness_HL[place] = np.einsum("le,le->l", self._past_HLE[place], _unit(running.counts_LE))


class _Request:
    """A running request.

    Shapes: counts_LE, tokens that used each expert; likeness_HL, cosine with each earlier request in each layer.
    """

    __slots__ = ("counts_LE", "likeness_HL")

    def __init__(self, past_HLE: np.ndarray) -> None:
        self.counts_LE = np.zeros(past_HLE.shape[1:], np.float32)
        self.likeness_HL = np.zeros(past_HLE.shape[:2], np.float32)


def _unit(counts: np.ndarray) -> np.ndarray:
    """Rows of length one; rows without counts stay zero."""
    norms = np.sqrt(np.square(counts).sum(axis=-1, keepdims=True))
    unit: np.ndarray = counts / np.maximum(norms, 1.0)
    return unit
