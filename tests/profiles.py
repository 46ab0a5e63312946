"""Synthetic cost profiles in whole nanoseconds."""

from collections.abc import Mapping

from moetool.base.machine import Machine
from moetool.base.types import ModelSpec
from moetool.costing.costs import ComputeCosts, CostProfile, Curve, LoadCosts

MACHINE = Machine(
    cpu="made up",
    cores=2,
    memory_bytes=2**34,
    amx=False,
    avx512_bf16=False,
    gpu=None,
    gpu_memory_bytes=0,
    system="Linux",
    torch="2",
    transformers="5",
)


def flat(ns: float) -> Curve:
    """A constant cost."""
    return Curve(x=(1,), y=(ns * 1e-9,))


def line(ns: float) -> Curve:
    """A cost of `ns` per unit."""
    return Curve(x=(0, 1e6), y=(0, ns * 1e-3))


def compute(
    *,
    device: str = "cpu",
    dtype: str = "float32",
    expert: Curve | None = None,
    attention: Curve | None = None,
    prompt_attention: Curve | None = None,
    gate: float = 0,
    shared: float = 0,
    dense: float | None = None,
    head: float = 0,
) -> ComputeCosts:
    """Costs of a device: an expert takes 3 ns for any number of tokens, everything else nothing."""
    return ComputeCosts(
        device=device,
        dtype=dtype,
        threads=1,
        expert=expert or flat(3),
        attention=attention or flat(0),
        prompt_attention=prompt_attention or flat(0),
        gate=flat(gate),
        shared=flat(shared),
        dense=None if dense is None else flat(dense),
        head=flat(head),
    )


def make_profile(
    spec: ModelSpec,
    *computes: ComputeCosts,
    loads: Mapping[str, Curve] | None = None,
    predictor: float | None = None,
    num_hidden_layers: int | None = None,
) -> CostProfile:
    """A profile with these costs (default: `compute()`); a load from disk takes 10 ns."""
    return CostProfile(
        spec=spec,
        config_only=True,
        num_hidden_layers=num_hidden_layers or spec.num_layers,
        machine=MACHINE,
        load_average=0.0,
        measured_s=0.0,
        compute=computes or (compute(),),
        loads=tuple(
            LoadCosts(tier=tier, threads=1, direct=True, seconds=seconds)
            for tier, seconds in (loads or {"disk": flat(10)}).items()
        ),
        predictor=None if predictor is None else flat(predictor),
    )
