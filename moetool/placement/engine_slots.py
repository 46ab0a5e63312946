"""Production engines' constraint on a placement: the same number of slots of every layer on every GPU."""

from dataclasses import replace

import numpy as np

from moetool.base.errors import CapacityError, MismatchError, unknown_name
from moetool.base.types import Cluster, Gpu, ModelSpec
from moetool.placement.planner import Problem

ENGINES = ("sglang", "vllm", "tensorrt_llm", "vllm_ascend")


def equal_slots(cluster: Cluster, spec: ModelSpec, engine: str, limit: int = 0) -> tuple[Cluster, int]:
    """Return the cluster with the engine's usable memory, and the slots of each layer on every GPU.

    Args:
        limit: maximum slots of a layer on a GPU, by the planner's options (0: as memory allows).

    Raises:
        UsageError: an unknown engine.
        MismatchError: the model's layers differ in width, which no engine supports.
        CapacityError: equal slots do not hold every expert of a layer.
    """
    if engine not in ENGINES:
        raise unknown_name("--for", engine, ENGINES)
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


def filled(problem: Problem, placed_GLE: np.ndarray, slots: int, planner: str) -> np.ndarray:
    """Fill each free slot with the expert that the GPU lacks and that has the most load per copy.

    Raises:
        MismatchError: the planner put more experts of a layer on a GPU than it has slots for it.
    """
    held_GL = placed_GLE.sum(axis=2)
    if (held_GL > slots).any():
        g, layer = np.argwhere(held_GL > slots)[0].tolist()
        raise MismatchError(
            f"{planner} puts {held_GL[g, layer]} experts of MoE layer {layer} on GPU {g}, but the engine has {slots} "
            f"slots of each layer there; plan with eplb, director or uniform, which place layer by layer"
        )
    filled_GLE, tokens_LE = placed_GLE.copy(), problem.demand.tokens_LE
    for g, layer in np.argwhere(held_GL < slots).tolist():
        while filled_GLE[g, layer].sum() < slots:
            per_copy_E = tokens_LE[layer] / filled_GLE[:, layer].sum(axis=0)
            filled_GLE[g, layer, int(np.where(filled_GLE[g, layer], -1.0, per_copy_E).argmax())] = True
    return filled_GLE
