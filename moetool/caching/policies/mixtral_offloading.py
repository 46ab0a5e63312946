"""Mixtral-Offloading: an LRU cache per layer, and prefetches from the next gate on this layer's hidden states."""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from moetool.base.errors import UsageError
from moetool.base.types import GateEvent, ModelSpec
from moetool.caching import policy
from moetool.caching.policies.duoserve import likeliest


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of Mixtral-Offloading.

    Attributes:
        slots_per_layer: experts that a layer's cache keeps (None: an equal share of the pool less K slots).
    """

    slots_per_layer: int | None = None

    def __post_init__(self) -> None:
        if self.slots_per_layer is not None and self.slots_per_layer < 1:
            raise UsageError(
                f"policy mixtral_offloading: slots_per_layer is {self.slots_per_layer}, expected at least 1"
            )


class Policy(policy.Policy):
    """Gives each layer an LRU cache, and prefetches experts speculatively for the next layer.

    Source: Eliseev and Mazur, 2023, and FineMoE's description (§ 6.1: "layer-wise speculative expert prefetching and a
    LRU-based expert cache"; § 6.2: synchronous, one layer ahead). Readings and deviations:
        - The speculated experts are the top-k of the next layer's gate on the hidden states of this layer's router. For
          several tokens it is the union of their top-k, by summed score, as slots permit; prompts are treated alike.
        - A speculated expert joins its layer's cache when it is used, in place of that layer's least recently used one;
          until then it displaces none of them. Wrong speculations are evicted first.
        - All layers share one pool. Unused shares, and slots beyond all shares, serve any layer, and layers above their
          share evict first. Shares that exceed the pool are reduced to it.
        - "Synchronous" concerns waiting for loads, which is no cache decision: a server starts these loads after the
          event's misses and continues to compute.
    """

    needs = frozenset({"experts", "ahead"})
    prefetch_distance = 1

    def __init__(self, spec: ModelSpec, options: Options, num_slots: int, predictor: Any = None) -> None:
        super().__init__(spec, options, num_slots, predictor)
        equal = max(0, num_slots - max(spec.top_k_L)) // spec.num_layers
        self.share = equal if options.slots_per_layer is None else min(options.slots_per_layer, equal)
        # Used residents of each layer, least recently used first, with the time of their last use.
        self._kept: list[OrderedDict[int, int]] = [OrderedDict() for _ in range(spec.num_layers)]
        self.guessed: dict[int, None] = {}  # unused residents, speculated for the coming layer
        self._wrong: dict[int, None] = {}  # unused residents whose layer has passed, oldest first
        self._time = 0
        self._layer = 0  # layer of the current event

    def gate(self, event: GateEvent, hits: list[int], misses: list[int]) -> Sequence[int]:
        self._layer = event.layer
        for key in hits:
            self.guessed.pop(key, None)
            self._wrong.pop(key, None)
            self._use(key)
        self._wrong |= self.guessed
        self.guessed.clear()
        return misses

    def after_first_expert(self, event: GateEvent) -> Sequence[int]:
        layer = event.layer + 1
        if layer == self.spec.num_layers:
            return ()
        assert event.ahead_ATE is not None, "the policy needs the column ahead"
        self.searches += 1
        scores_TE = event.ahead_ATE[0, :, : self.spec.num_experts_L[layer]]
        wanted = [self.spec.expert_key(layer, expert) for expert in likeliest(scores_TE, self.spec.top_k_L[layer])]
        for key in wanted:
            if key in self._wrong:  # speculated again, for the next forward
                del self._wrong[key]
                self.guessed[key] = None
        return wanted

    def admit(self, key: int, prefetched: bool) -> None:
        if prefetched:
            self.guessed[key] = None
        else:
            self._use(key)

    def removed(self, key: int) -> None:
        for held in (self.guessed, self._wrong, self._kept[self._layer_of(key)]):
            held.pop(key, None)

    def evict(self, locked: Collection[int]) -> int:
        victim = self._wrong_guess(locked)
        if victim is None and len(self._kept[self._layer]) >= max(1, self.share):
            victim = next((key for key in self._kept[self._layer] if key not in locked), None)
        if victim is None:
            victim = self._coldest(locked, self.share)
        if victim is None:
            victim = self._coldest(locked, 0)
        return victim if victim is not None else next(key for key in self.guessed if key not in locked)

    def evict_for_prefetch(self, key: int, locked: Collection[int]) -> int | None:
        victim = self._wrong_guess(locked)
        return self._coldest(locked, self.share) if victim is None else victim

    def _use(self, key: int) -> None:
        self._time += 1
        kept = self._kept[self._layer_of(key)]
        kept[key] = self._time
        kept.move_to_end(key)

    def _wrong_guess(self, locked: Collection[int]) -> int | None:
        return next((key for key in self._wrong if key not in locked), None)

    def _coldest(self, locked: Collection[int], share: int) -> int | None:
        """Return the least recently used expert of all layers that keep more than `share`."""
        candidates: Iterable[tuple[int, int]] = (
            next(((time, key) for key, time in kept.items() if key not in locked), (self._time + 1, -1))
            for kept in self._kept
            if len(kept) > share
        )
        key = min(candidates, default=(0, -1))[1]
        return None if key < 0 else key

    def _layer_of(self, key: int) -> int:
        return key // self.spec.num_experts
