"""How often each expert was needed, missed and loaded, and the map of it in `/stats`."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np

from moetool.base.types import ModelSpec
from moetool.caching.residency import Step, StepKind

_MOST_DEVICES = 16
"""Most devices with numbers of their own; beyond, they are added up."""
_COMPUTE, _LOAD, _HOST = StepKind.COMPUTE, StepKind.LOAD, StepKind.HOST


class EventCounts:
    """Counts by an expert's key, for the model's thread; other threads may read them.

    Attributes:
        hits: those at which it was resident: neither loaded on demand nor computed on the host.
        loaded: its loads, on demand and ahead.
    """

    def __init__(self, spec: ModelSpec) -> None:
        keys = spec.num_layers * spec.num_experts
        self.needed, self.hits, self.loaded = [0] * keys, [0] * keys, [0] * keys

    def add(self, steps: Sequence[Step]) -> None:
        """Count a program: one step computes each expert that its event needs, here (after its load) or on the host."""
        needed, hits, loaded = self.needed, self.hits, self.loaded
        on_demand = set()
        for kind, key, _, _ in steps:
            if kind is _COMPUTE:
                needed[key] += 1
                hits[key] += key not in on_demand
            elif kind is _HOST:
                needed[key] += 1
            else:
                loaded[key] += 1
                if kind is _LOAD:
                    on_demand.add(key)

    def to_map(self, spec: ModelSpec, resident: Collection[int]) -> dict[str, Any]:
        """Return `expert_map` of one machine whose pool has these keys, with its hits by layer."""
        shape = spec.num_layers, spec.num_experts
        resident_LE = np.zeros(shape, np.int64)
        resident_LE.ravel()[list(resident)] = 1
        hits_L = np.reshape(self.hits, shape).sum(axis=1)  # before `needed`, which grows first
        found = expert_map(spec, [("", resident_LE, np.reshape(self.needed, shape), np.reshape(self.loaded, shape))])
        return {**found, "by_layer": {**found["by_layer"], "hits": hits_L.tolist()}}


def expert_map(spec: ModelSpec, devices: Iterable[tuple[str, np.ndarray, np.ndarray, np.ndarray]]) -> dict[str, Any]:
    """Return where experts are and how often they are needed and loaded, for `/stats`: by layer, and by expert.

    Args:
        devices: name, resident_LE, needed_LE and loaded_LE of each machine or GPU.
    """
    shown = list(devices)
    total_3LE = np.array([[np.asarray(values, np.int64) for values in device[1:]] for device in shown]).sum(axis=0)
    if len(shown) > _MOST_DEVICES:
        shown = [(f"all {len(shown)}", *total_3LE)]
    names = ("resident", "needed", "loaded")
    return {
        "layers": list(spec.layer_ids_L),
        "experts": list(spec.num_experts_L),
        "by_layer": dict(zip(names, total_3LE.sum(axis=2).tolist(), strict=True)),
        "devices": [
            {
                "name": name,
                **{kind: np.asarray(a, np.int64).ravel().tolist() for kind, a in zip(names, values, strict=True)},
            }
            for name, *values in shown
        ],
    }
