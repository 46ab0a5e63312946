"""Production engines' constraint on a placement: the same number of slots of every layer on every GPU."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from moetool.base.errors import CapacityError, MismatchError, UsageError, unknown_name
from moetool.base.types import Cluster, Gpu, ModelSpec
from moetool.placement.planners.eplb import rebalance_experts
from moetool.placement.scoring import balancedness

ROUTING = {"sglang": "nearest", "vllm": "even", "tensorrt_llm": "even", "vllm_ascend": "nearest"}
"""Choice of the copy for a token by each engine's default: SGLang's dispatch is `static` with an all-to-all backend."""
BALANCE = {"sglang": "sglang", "vllm": "vllm", "tensorrt_llm": "tensorrt_llm", "vllm_ascend": "vllm"}
"""Definition of balancedness of each engine (`moetool.placement.scoring.PlacementScore`)."""
ENGINES = tuple(ROUTING)
_KNEE = 0.95
"""Share of the best balance at which further slots count as not worth their memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotChoice:
    """A number of slots of each layer on every GPU.

    Attributes:
        slots: that number.
        redundant: slots of a layer beyond one for each expert, on all GPUs together.
        balance: mean over layers of (mean + 1e-5) / (max + 1e-5) of GPUs' loads, as placed by EPLB's global form, and
            with copies that share their expert's tokens evenly.
    """

    slots: int
    redundant: int
    gpu_bytes: int
    balance: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def slot_choices(spec: ModelSpec, num_gpus: int, fitting: int, tokens_LE: np.ndarray) -> list[SlotChoice]:
    """Return balance against memory, from one slot for each expert on, in growing steps; at most `fitting` slots."""
    least = -(-spec.num_experts // num_gpus)
    steps = [least + more for more in (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32) if least + more <= fitting]
    chosen: list[SlotChoice] = []
    for slots in steps:
        logical_LP = rebalance_experts(tokens_LE, slots * num_gpus, 1, 1, num_gpus)
        loads = []
        for tokens_E, logical_P in zip(tokens_LE, logical_LP, strict=True):
            copies_E = np.maximum(1, np.bincount(logical_P, minlength=len(tokens_E)))
            loads.append((tokens_E / copies_E)[logical_P].reshape(num_gpus, -1).sum(axis=1))
        chosen.append(
            SlotChoice(
                slots=slots,
                redundant=slots * num_gpus - spec.num_experts,
                gpu_bytes=slots * spec.num_layers * spec.slot_bytes,
                balance=balancedness(np.array(loads))["sglang"],
            )
        )
        if chosen[-1].balance > 0.99:
            break
    return chosen


def knee(choices: Sequence[SlotChoice]) -> int:
    """Return the fewest slots whose balance is within 5 % of the best."""
    enough = _KNEE * max(choice.balance for choice in choices)
    return next(choice.slots for choice in choices if choice.balance >= enough)


def wanted_slots(spec: ModelSpec, num_gpus: int, slots_per_gpu: int | None, redundant: int | None) -> int:
    """Return the slots of each layer on a GPU that a user asks for, by either number; 0 if by neither.

    Raises:
        UsageError: both are given, one is out of range, or the redundant experts do not fill equal slots.
    """
    if slots_per_gpu is not None and redundant is not None:
        raise UsageError("--slots-per-gpu and --redundant say the same, expected one of them")
    if slots_per_gpu is not None:
        if not 1 <= slots_per_gpu <= spec.num_experts:
            raise UsageError(f"--slots-per-gpu is {slots_per_gpu}, expected 1 to {spec.num_experts}")
        return slots_per_gpu
    if redundant is None:
        return 0
    slots, rest = divmod(spec.num_experts + redundant, num_gpus)
    if redundant < 0 or rest or slots > spec.num_experts:
        least = -spec.num_experts % num_gpus
        raise UsageError(
            f"--redundant is {redundant}, but {spec.num_experts} experts and these must fill {num_gpus} GPUs evenly; "
            f"expected {least}, {least + num_gpus}, {least + 2 * num_gpus} and so on"
        )
    return slots


def equal_slots(cluster: Cluster, spec: ModelSpec, engine: str | None, limit: int = 0) -> tuple[Cluster, int]:
    """Return the cluster with the engine's usable memory, and the slots of each layer on every GPU.

    Args:
        engine: one of `ENGINES`; None for any with equal slots.
        limit: maximum slots of a layer on a GPU, by the planner's options (0: as memory allows).

    Raises:
        UsageError: an unknown engine.
        MismatchError: the model's layers differ in width, which no engine supports.
        CapacityError: equal slots do not hold every expert of a layer.
    """
    if engine is not None and engine not in ENGINES:
        raise unknown_name("--for", engine, ENGINES)
    engine = engine or "the plan"
    if len(set(spec.num_experts_L)) > 1:
        raise MismatchError(
            f"{engine} needs one number of experts for all layers, but the layers of {spec.name} differ"
        )
    slots_G = cluster.slots_G(spec.slot_bytes)
    fitting = min(min(slots_G) // spec.num_layers, spec.num_experts)
    slots = min(fitting, limit) if limit else fitting
    if slots * len(slots_G) < spec.num_experts:
        per_layer = -(-spec.num_experts // len(slots_G))
        least = per_layer * spec.num_layers
        cause = f"the smallest GPU holds {min(slots_G):,} experts"
        advice = f"give every GPU room for {least:,} ({least * spec.slot_bytes:,} bytes)"
        if slots < fitting:
            cause, advice = f"the planner's limit is {limit} per layer", f"set it to {per_layer} or more"
        raise CapacityError(
            f"{engine} has equal slots of each layer on every GPU, and {cause}: {slots} in each of {spec.num_layers} "
            f"layers, so {slots * len(slots_G)} slots for {spec.num_experts} experts; {advice}"
        )
    used = slots * spec.num_layers * spec.slot_bytes

    def cut(gpu: Gpu) -> Gpu:
        return replace(gpu, reserved_bytes=gpu.memory_bytes - used)

    servers = tuple(replace(server, gpus=tuple(map(cut, server.gpus))) for server in cluster.servers)
    return replace(cluster, servers=servers), slots


def initial_map(spec: ModelSpec, num_gpus: int, slots: int) -> np.ndarray:
    """Return the placement that engines start with: slot p of a layer holds expert p modulo their number.

    Shapes: placed_GLE bool.
    """
    placed_GLE = np.zeros((num_gpus, spec.num_layers, spec.num_experts), bool)
    expert_P = np.arange(num_gpus * slots) % spec.num_experts
    placed_GLE[np.repeat(np.arange(num_gpus), slots), :, expert_P] = True
    return placed_GLE
