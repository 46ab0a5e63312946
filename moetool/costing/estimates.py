"""Estimated speed of a model on a machine, from bytes and rates alone: seconds of a token and of a prompt.

A token reads the dense weights, its experts and its context in the memory of the computing device. Experts without a
slot come over the link from host memory, or from disk. Each decoder layer has a fixed time: launches, or a library's
code. Reads, fixed time and loads are added: on the H100 of `moetool guide speed` that is within 30 % of the measured
times with all and with some of the experts in memory (`tests/unit/costing/test_estimates.py`).
"""

from dataclasses import dataclass
from itertools import pairwise

from moetool.costing.machines import NamedMachine

MEMORY_SHARE = 0.75
"""Reached share of a memory's bandwidth by products of one token (assumed; 18 of 25 on the Xeon of the guide)."""
LINK_SHARE = 0.8
"""Reached share of PCIe by copies from pinned memory: 25 of 31.5 GB/s, 53.5 of 63 measured on an H100."""
LOAD_PASSES = 3
"""Passes over memory of a load from disk: written by the read, then read and written by the copy into its slot."""
COMPUTE_SHARE = 0.4
"""Reached share of the operations per second by products of a prompt (assumed)."""
GPU_LAYER_S = 0.43e-3
"""Fixed seconds of a decoder layer on a GPU, and below those of a layer with misses: from the H100 table."""
GPU_MISS_LAYER_S = 0.28e-3
CPU_LAYER_S = 1.6e-3
"""Fixed processor seconds of a decoder layer in transformers' modules on a CPU (`moetool guide speed`)."""
STEP_SHARE = 0.16
"""Fixed time of a layer in a recorded decode step, relative to modules (`moetool guide speed`)."""
LAYER_NORMS = 60
"""The same as a multiple of an RMS norm in six operations of torch, which this machine can time."""
CPU_MISS_LAYER_S = 0.1e-3
"""The policy's seconds a layer: 2 ms a token of DeepSeek-V2-Lite, 4 ms of Qwen3-30B-A3B (`moetool guide serving`)."""

ASSUMED_DISK_BYTES_S = 3e9
"""Reads from the disk of a machine without a figure: an entry-level solid-state disk on PCIe, sustained (assumed)."""

_PACKED_CPU = ((16.0, 1.0), (8.0, 0.88), (4.0, 0.72), (3.0, 0.3))
_PACKED_GPU = ((16.0, 1.0), (8.0, 0.58), (4.0, 0.3), (2.0, 0.15))
"""Rate of stored bytes by bits of a weight, relative to bfloat16: tables of `moetool guide speed`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTraffic:
    """Bytes and operations of a model's tokens.

    Attributes:
        num_layers, num_moe_layers: decoder layers, and those with experts.
        num_experts: routed experts of all layers.
        token_experts: those that a token needs, over all layers.
        dense_bytes: bytes of dense weights that a token reads.
        slot_bytes, stored_bytes: one expert in a slot, and where it is loaded from.
        kv_token_bytes: KV cache of one token.
        active_parameters: parameters that a token multiplies.
        expert_bits, dense_bits: bits of a weight in memory.
    """

    num_layers: int
    num_moe_layers: int
    num_experts: int
    token_experts: int
    dense_bytes: float
    slot_bytes: float
    stored_bytes: float
    kv_token_bytes: float
    active_parameters: float
    expert_bits: float = 16.0
    dense_bits: float = 16.0

    @property
    def token_bytes(self) -> float:
        """Bytes of dense weights and experts that a token reads."""
        return self.dense_bytes + self.token_experts * self.slot_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Reached rates of a machine, the shares of vendors' figures included.

    Attributes:
        device: `cuda`, or `cpu`: where the model is computed.
        memory_bytes_s: reads of bfloat16 weights by products of one token on the device.
        flops: operations per second in products of a prompt.
        layer_s: fixed seconds of a decoder layer.
        miss_layer_s: further fixed seconds of a layer with misses.
        link_bytes_s: loads from host memory to the device; 0: no host tier.
        disk_bytes_s: loads from disk.
        load_bytes_s: bytes that one core loads in a processor second: reads, copies and unpacking; 0: not known.
    """

    device: str
    memory_bytes_s: float
    flops: float
    layer_s: float
    miss_layer_s: float
    link_bytes_s: float
    disk_bytes_s: float
    load_bytes_s: float = 0.0

    def read_s(self, num_bytes: float, bits: float) -> float:
        """Seconds in which products of one token read weights of this many bits."""
        return num_bytes / (self.memory_bytes_s * _packed_share(self.device, bits))


def rates_of(machine: NamedMachine) -> Rates:
    """Rates of one GPU of a machine, or of its cores without one."""
    if machine.gpus:
        shares_memory = bool(machine.disk_bytes_s) and not machine.host_memory_bytes
        return Rates(
            device="cuda",
            memory_bytes_s=MEMORY_SHARE * machine.memory_bytes_s,
            flops=COMPUTE_SHARE * machine.half_flops,
            layer_s=GPU_LAYER_S,
            miss_layer_s=GPU_MISS_LAYER_S,
            link_bytes_s=0.0 if shares_memory else LINK_SHARE * machine.host_bytes_s,
            disk_bytes_s=machine.disk_bytes_s or ASSUMED_DISK_BYTES_S,
        )
    return host_rates(machine)


def host_rates(machine: NamedMachine) -> Rates:
    """Rates of a machine's cores, beside a GPU or without one."""
    return Rates(
        device="cpu",
        memory_bytes_s=MEMORY_SHARE * machine.host_memory_bytes_s,
        flops=COMPUTE_SHARE * machine.host_flops,
        layer_s=CPU_LAYER_S,
        miss_layer_s=CPU_MISS_LAYER_S,
        link_bytes_s=0.0,
        disk_bytes_s=machine.disk_bytes_s or ASSUMED_DISK_BYTES_S,
        load_bytes_s=MEMORY_SHARE * machine.host_memory_bytes_s / LOAD_PASSES,
    )


def together_share(link_bytes_s: float, host: Rates, bits: float) -> float:
    """Rates of loads and of experts on the host while both run, relative to each alone.

    Both read host memory, which then gives what products of one token alone read of bfloat16. Users of FreeToken
    measured, in GB/s, 43.4 on the host and 21.6 over the link beside 65.8 and 25.1 alone; 21.9 and 8.4 beside 30.0 and
    13.1; 71.5 and 14.8 beside 65.9 and 25.2 (github.com/FlashML-org/FreeToken, issues 281 and 436, pull request 38).
    """
    alone = link_bytes_s + 1e9 / host.read_s(1e9, bits)
    return min(1.0, host.memory_bytes_s / alone)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEstimate:
    """Seconds and bytes of one new token.

    Attributes:
        memory_bytes, link_bytes, disk_bytes: read in the device's memory, over the link, and from disk.
        memory_s, fixed_s, link_s, disk_s: their seconds, and the fixed ones of layers.
        load_s: processor seconds of loads from disk, on other threads within `disk_s`.
    """

    memory_bytes: float
    link_bytes: float
    disk_bytes: float
    memory_s: float
    fixed_s: float
    link_s: float
    disk_s: float
    load_s: float

    @property
    def seconds(self) -> float:
        return self.memory_s + self.fixed_s + self.link_s + self.disk_s

    @property
    def limit(self) -> str:
        """The part that takes longest."""
        parts = {
            "memory bandwidth": self.memory_s,
            "fixed time per layer": self.fixed_s,
            "link to the GPU": self.link_s,
            "disk": self.disk_s,
        }
        return max(parts, key=parts.__getitem__)


def token_estimate(
    model: ModelTraffic, rates: Rates, *, context: int, device_misses: float, disk_misses: float
) -> TokenEstimate:
    """Estimate one new token of one request.

    Args:
        context: tokens before it.
        device_misses: needed experts without a slot, as a share of the needed ones.
        disk_misses: those of them that host memory does not hold either.
    """
    kv_bytes = context * model.kv_token_bytes
    experts_bytes = model.token_experts * model.slot_bytes
    link, disk = _loads(model, rates, model.token_experts * device_misses, model.token_experts * disk_misses)
    with_misses = 1 - (1 - device_misses) ** (model.token_experts / model.num_moe_layers)  # share of the layers
    return TokenEstimate(
        memory_bytes=model.dense_bytes + experts_bytes + kv_bytes,
        link_bytes=link,
        disk_bytes=disk,
        memory_s=rates.read_s(model.dense_bytes, model.dense_bits)
        + rates.read_s(experts_bytes, model.expert_bits)
        + kv_bytes / rates.memory_bytes_s,
        fixed_s=model.num_layers * rates.layer_s + with_misses * model.num_moe_layers * rates.miss_layer_s,
        link_s=link / rates.link_bytes_s if link else 0.0,
        disk_s=disk / rates.disk_bytes_s if disk else 0.0,
        load_s=disk / rates.load_bytes_s if rates.load_bytes_s else 0.0,
    )


def prompt_seconds(
    model: ModelTraffic, rates: Rates, *, tokens: int, chunk: int, slots: int, host_experts: int
) -> float:
    """Estimate the seconds to the first token of a prompt, with slots and host memory full of its likely experts.

    The tokens of a chunk choose experts uniformly, so a chunk needs almost all, and loads those without slots once.

    Args:
        chunk: most tokens of one forward.
        slots, host_experts: experts in the device's slots, and in host memory.
    """
    chunks = -(-tokens // chunk)
    needed = 1 - (1 - model.token_experts / model.num_experts) ** (tokens / chunks)
    missing = chunks * needed * (model.num_experts - slots)
    on_disk = chunks * needed * (model.num_experts - max(slots, host_experts))
    link, disk = _loads(model, rates, missing, on_disk)
    weights = rates.read_s(model.dense_bytes, model.dense_bits)
    weights += rates.read_s(needed * model.num_experts * model.slot_bytes, model.expert_bits)
    compute = max(2 * tokens * model.active_parameters / rates.flops, chunks * weights)
    loading = (link / rates.link_bytes_s if link else 0.0) + (disk / rates.disk_bytes_s if disk else 0.0)
    return compute + chunks * model.num_layers * rates.layer_s + loading


def _loads(model: ModelTraffic, rates: Rates, device_misses: float, disk_misses: float) -> tuple[float, float]:
    """Bytes over the link and from disk; without a link only the disk counts."""
    if not rates.link_bytes_s:
        return 0.0, device_misses * model.stored_bytes
    return device_misses * model.stored_bytes, disk_misses * model.stored_bytes


def _packed_share(device: str, bits: float) -> float:
    """Rate of stored bytes relative to bfloat16, straight between the table's rows."""
    table = _PACKED_GPU if device == "cuda" else _PACKED_CPU
    if bits >= table[0][0]:
        return table[0][1]
    for (high, first), (low, last) in pairwise(table):
        if bits >= low:
            return last + (first - last) * (bits - low) / (high - low)
    return table[-1][1]
