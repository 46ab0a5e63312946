"""Production engines' constraint on a placement: equal slots of each layer on every GPU."""

from dataclasses import replace

import numpy as np

from moetool.errors import CapacityError, MismatchError, unknown_name
from moetool.placement._planner import Problem
from moetool.types import Cluster, Gpu, ModelSpec

ENGINES = ("sglang", "vllm", "tensorrt_llm", "vllm_ascend")


def equal_slots(cluster: Cluster, spec: ModelSpec, engine: str) -> tuple[Cluster, int]:
    """Return the cluster with the engine's usable memory, and the slots of each layer on every GPU.

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
    slots = min(min(slots_G) // spec.num_layers, spec.num_experts)
    if slots * len(slots_G) < spec.num_experts:
        least = -(-spec.num_experts // len(slots_G)) * spec.num_layers
        raise CapacityError(
            f"{engine} has equal slots of each layer on every GPU, and the smallest GPU holds {min(slots_G):,} "
            f"experts, which is {slots} of each of {spec.num_layers} layers: {slots * len(slots_G)} slots for "
            f"{spec.num_experts} experts; give every GPU room for {least:,} ({least * spec.slot_bytes:,} bytes)"
        )
    used = slots * spec.num_layers * spec.slot_bytes

    def cut(gpu: Gpu) -> Gpu:
        return replace(gpu, reserved_bytes=gpu.memory_bytes - used)

    servers = tuple(replace(server, gpus=tuple(map(cut, server.gpus))) for server in cluster.servers)
    return replace(cluster, servers=servers), slots


def filled(problem: Problem, placed_GLE: np.ndarray, slots: int, planner: str) -> np.ndarray:
    """Fill every slot: free ones get the experts with the most load per copy that the GPU lacks.

    Raises:
        MismatchError: the planner gave a layer more slots on a GPU than there are.
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
