"""ProMoE: prefetches a learned predictor's top-k a fixed stride of layers ahead; the least often used goes first."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moetool.caching import _lfu_ahead
from moetool.caching.duoserve import likeliest
from moetool.errors import UsageError
from moetool.types import GateEvent, ModelSpec


@dataclass(frozen=True, kw_only=True)
class Options(_lfu_ahead.AheadOptions):
    """Options of ProMoE.

    Attributes:
        distance: its stride: how many layers ahead it prefetches. Never farther than its predictor sees.
    """

    distance: int = 3

    def __post_init__(self) -> None:
        if self.distance < 1:
            raise UsageError(f"policy promoe: distance {self.distance} must be at least 1")


class Policy(_lfu_ahead.LfuAhead):
    """Predicts each layer once, `distance` layers before it runs, and prefetches its top-k.

    Source: ProMoE (Song et al., 2024), as FineMoE describes it (§§ 1, 6.1, Figure 14: stride-based speculative
    prefetching by a trained predictor, made again "on top of MoE-Infinity"). Readings and deviations:
        - Its predictor is `promoe`, from hidden states; any other that sees as far ahead may take its place.
        - The layers before the stride are predicted together, nearest first, once the first layer's router has chosen.
        - Of several tokens: the union of their top-k, by summed score, as far as slots go. A prompt's forward is
          treated alike.
        - Evicted is the expert with the fewest uses, as in MoE-Infinity; what was prefetched for a layer still to come
          goes last.
        - A demand load goes before every prefetch, and of an event the residents are computed first; how far a
          prefetch in flight is cut short is for whatever moves the bytes.
    """

    needs_predictor = True
    prefetch_distance = 3

    def __init__(self, spec: ModelSpec, options: Options, num_slots: int, predictor: Any = None) -> None:
        super().__init__(spec, options, num_slots, predictor)
        self._stride = min(options.distance, predictor.lookahead)

    @property
    def distance(self) -> int:
        return self._stride

    def gate(self, event: GateEvent, hits: list[int], misses: list[int]) -> Sequence[int]:
        self.predictor.observe(event)
        return super().gate(event, hits, misses)

    def after_first_expert(self, event: GateEvent) -> Sequence[int]:
        coming = event.layer + self._stride
        layers = range(coming if event.layer else 1, min(coming + 1, self.spec.num_layers))
        return [
            self.spec.expert_key(layer, expert)
            for layer in layers
            for expert in likeliest(self.predictor.scores(layer), self.spec.top_k_L[layer])
        ]
