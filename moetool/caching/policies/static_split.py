"""Static split, as in llama.cpp: some layers stay on the device, and the host computes the others."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from moetool.base.types import ForwardInfo, GateEvent, ModelSpec
from moetool.caching import policy
from moetool.caching.policies.layerwise import layer_keys
from moetool.caching.policy import MIN_SLOTS


@dataclass(frozen=True, kw_only=True)
class Options:
    """No options: the split follows from the memory."""


class Policy(policy.Policy):
    """Keeps all experts of as many first layers as fit on the device; the host computes those of the others.

    The resident layers are loaded when the first forward begins, and nothing else is loaded. Slots that hold no whole
    layer stay empty.

    Source: llama.cpp (`--n-gpu-layers`, `--n-cpu-moe`), the baseline of SMoE. Deviations:
        - llama.cpp holds the other layers in host memory. Here they are there if `--host-memory` has room. Otherwise
          the host reads them from disk first, as llama.cpp's mmap does on a small machine. Replay counts these experts
          as computed on the host, not as loaded.
        - The first layers stay on the device; llama.cpp keeps the last ones. The share is the same, since all layers
          use the same number of experts per token.
        - The smallest pool is two slots. If it holds no whole layer, the host computes all experts.
    """

    computes_on_host = True

    def __init__(self, spec: ModelSpec, options: Any, num_slots: int, predictor: Any = None) -> None:
        super().__init__(spec, options, num_slots, predictor)
        self._begun = False

    @classmethod
    def slots_used(cls, spec: ModelSpec, options: Any, num_slots: int) -> int:
        return max(MIN_SLOTS, sum(spec.num_experts_L[: _resident_layers(spec, num_slots)]))

    def begin_forward(self, info: ForwardInfo) -> Sequence[int]:
        if self._begun:
            return ()
        self._begun = True
        layers = range(_resident_layers(self.own, self.num_slots))
        return [key for layer in layers for key in layer_keys(self.spec, layer)]

    def on_host(self, event: GateEvent, misses: list[int]) -> Collection[int]:
        return misses

    def evict(self, locked: Collection[int]) -> int:
        raise AssertionError("only layers that fit are loaded")


def _resident_layers(spec: ModelSpec, num_slots: int) -> int:
    """Return the number of first layers that fit completely."""
    return sum(total <= num_slots for total in accumulate(spec.num_experts_L))
