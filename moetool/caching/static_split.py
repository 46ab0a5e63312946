"""A fixed split of the layers, as llama.cpp makes it: some are on the device for good, the host computes the rest."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from moetool.caching import _policy as policy
from moetool.caching._policy import MIN_SLOTS
from moetool.caching.layerwise import layer_keys
from moetool.types import ForwardInfo, GateEvent, ModelSpec


@dataclass(frozen=True, kw_only=True)
class Options:
    """The split follows from the memory."""


class Policy(policy.Policy):
    """Keeps all experts of as many first layers as fit, for good; those of the other layers are computed on the host.

    The resident layers are loaded when the first forward begins. Nothing else is ever loaded, and slots that hold no
    whole layer are not used.

    Source: llama.cpp (`--n-gpu-layers`, `--n-cpu-moe`), the baseline of SMoE. What differs:
        - llama.cpp holds the other layers in host memory. Here they do where `--host-memory` has room for them;
          otherwise what the host computes is read from disk first, as llama.cpp's mmap does on a machine that is too
          small. Replay counts it as computed on the host, not as loaded.
        - It is the first layers that stay, as moetool's table of systems has it; llama.cpp keeps the last ones on
          the device. All layers of a model use the same number of experts per token, so the share is the same.
        - The least pool is two slots; without one whole layer in it, everything is computed on the host.
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
        raise AssertionError("nothing is loaded beside what fits")


def _resident_layers(spec: ModelSpec, num_slots: int) -> int:
    """Number of first layers that fit completely."""
    return sum(total <= num_slots for total in accumulate(spec.num_experts_L))
