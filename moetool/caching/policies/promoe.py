"""ProMoE: prefetches a learned predictor's top-k at a fixed stride of layers; evicts by LFU."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moetool.base.errors import UsageError
from moetool.base.types import GateEvent, ModelSpec
from moetool.caching.policies import _lfu_ahead
from moetool.caching.policies.duoserve import likeliest


@dataclass(frozen=True, kw_only=True)
class Options(_lfu_ahead.AheadOptions):
    """Options of ProMoE.

    Attributes:
        distance: the stride, in layers; at most the predictor's lookahead.
    """

    distance: int = 3

    def __post_init__(self) -> None:
        if self.distance < 1:
            raise UsageError(f"policy promoe: distance is {self.distance}, expected at least 1")


class Policy(_lfu_ahead.LfuAhead):
    """Predicts each layer once, `distance` layers before it runs, and prefetches its top-k.

    Source: ProMoE (Song et al., 2024), as FineMoE describes it (§§ 6.1, 6.6: stride-based speculative prefetching by
    trained predictors, reproduced "on top of MoE-Infinity"). Readings and deviations:
        - The predictor is `promoe`, from hidden states; any predictor with this lookahead works.
        - Layers before the stride are predicted together, nearest first, after the first layer's router has chosen.
        - For several tokens, the union of their top-k is prefetched, by summed score, as slots permit. Prompts are
          treated alike.
        - The expert with the fewest uses is evicted, as in MoE-Infinity. Experts prefetched for later layers are
          evicted last.
        - On-demand loads precede prefetches, and an event's residents are computed first. The expert store decides
          whether a running prefetch is interrupted.
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
