"""A fixed split of the layers, as llama.cpp makes it: some are in memory for good, the rest never is."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from moetool import policy
from moetool.caching.layerwise import layer_keys
from moetool.policy import MIN_SLOTS
from moetool.types import ForwardInfo, GateEvent, ModelSpec


@dataclass(frozen=True, kw_only=True)
class Options:
    """The split follows from the memory."""


class Policy(policy.Policy):
    """Keeps all experts of as many first layers as fit, for good; of the other layers it keeps nothing.

    The resident layers are loaded when the first forward begins. The others pass through one slot, one expert after
    the other: loaded, computed, given up. Slots that hold no whole layer are not used.

    Source: llama.cpp (`--n-gpu-layers`, `--n-cpu-moe`), the baseline of SMoE. What it stands for and what it does not:
        - llama.cpp computes the other layers on the CPU, out of host memory, and moves none of their weights. This
          runtime computes on one device only, the CPU, and its pool is all the memory there is: an expert outside
          it has to be read from disk. So a miss here is what llama.cpp computes on the CPU. Hits are its share of
          expert calls on the device; bytes and time are those of a machine whose host memory holds no more than
          the pool (llama.cpp's mmap reads from disk there too), and say nothing of one that has a GPU and host
          memory for the whole model.
        - It is the first layers that stay, as moetool's table of systems has it; llama.cpp keeps the last ones on
          the device. All layers of a model use the same number of experts a token, so the share is the same.
        - The least pool is two slots; without one whole layer in it, nothing is ever kept.
    """

    in_order = True

    def __init__(self, spec: ModelSpec, options: Any, num_slots: int, predictor: Any = None) -> None:
        super().__init__(spec, options, num_slots, predictor)
        layers = _resident_layers(spec, num_slots)
        self._pinned = frozenset(key for layer in range(layers) for key in layer_keys(spec, layer))
        self._passing: dict[int, None] = {}  # the other residents, in the order of their loading
        self._begun = False

    @classmethod
    def slots_used(cls, spec: ModelSpec, options: Any, num_slots: int) -> int:
        layers = _resident_layers(spec, num_slots)
        pinned = sum(spec.num_experts_L[:layers])
        return max(MIN_SLOTS, pinned + (layers < spec.num_layers))

    def begin_forward(self, info: ForwardInfo) -> Sequence[int]:
        if self._begun:
            return ()
        self._begun = True
        return sorted(self._pinned)

    def after_last_expert(self, event: GateEvent) -> Sequence[int]:
        return list(self._passing)

    def admit(self, key: int, prefetched: bool) -> None:
        if key not in self._pinned:
            self._passing[key] = None

    def removed(self, key: int) -> None:
        del self._passing[key]

    def evict(self, locked: Collection[int]) -> int:
        return next(iter(self._passing))  # in order: what came before is computed


def _resident_layers(spec: ModelSpec, num_slots: int) -> int:
    """How many first layers fit as a whole, beside the one slot that the others need."""
    if num_slots >= spec.total_experts:
        return spec.num_layers
    return sum(total < num_slots for total in accumulate(spec.num_experts_L[:-1]))
