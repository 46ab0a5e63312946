"""Automatic choices of a capture: device, data type, memory, policy, and the prompts that run together."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from moetool.base.config import parse
from moetool.base.families import own_cache
from moetool.base.tables import count
from moetool.capture.composition import MOST_PROMPTS, Composition, compose
from moetool.capture.estimate import CaptureCost, Lengths, capture_cost, most_reads
from moetool.costing.estimates import Rates
from moetool.measuring.fit import memory_of, options_on
from moetool.measuring.fit_machine import FitMachine
from moetool.measuring.machine_rates import measured_rates
from moetool.models.checkpoint import Checkpoint
from moetool.models.loading import LoadedModel
from moetool.runtime.assembly import open_pooled
from moetool.runtime.automatic import on_this_machine
from moetool.runtime.budget import Budget, Machine, Wishes, divide_memory, footprint, this_machine
from moetool.runtime.serve_options import ServeOptions
from moetool.runtime.sizing import LEAST_CHUNK, Footprint

_KV_SHARE, _CHUNK_SHARE = 3 / 8, 1 / 8  # of the memory beside weights and the smallest pool
_MOST_CHUNK = 32_768
_ESTIMATED_BYTES, _ESTIMATED_PRODUCTS = 20e9, 1e13
"""Reads and products from which the time is worth an estimate: rates are measured for a second."""
_MOST_IN_MEMORY = 64  # requests together, where every expert has a slot: more do not compute faster
_MOST_OWN_CACHES = 16  # each request of a forward has a thread
_CHUNK_IN_MEMORY = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureMemory:
    """Wishes for the memory of a capture.

    Attributes:
        device_memory_bytes: limit of dense weights, KV cache and expert slots (default: what is free).
        host_memory_bytes: memory of the host tier (default: free memory beside a GPU, else none).
        io_threads: threads that read experts (default: automatic).
        policy: cache policy (default: lru with equal slots per layer).
        processes: processes on this machine that divide its memory.
        limit_bytes: memory of this process, as another has divided that of the machine (default: as it is free now).
        shards: processes and machines that share the batches.
        composition: the prompts that run together, as another process or machine or an interrupted run has chosen them.
    """

    device_memory_bytes: int | None = None
    host_memory_bytes: int | None = None
    io_threads: int | None = None
    policy: str | None = None
    processes: int = 1
    limit_bytes: int | None = None
    shards: int = 1
    composition: Composition | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureSetup:
    """Choices of a capture.

    Attributes:
        options: device, data type, threads and memory, as for a server.
        pool: form of the pool.
        composition: the prompts that run together.
        choices: (setting, value, reason) for display.
        lengths: of the prompts.
        memory: wishes of the other processes of this machine, so that all have equal parts of its memory.
    """

    options: ServeOptions
    budget: Budget
    policy: str
    pool: str
    composition: Composition
    choices: tuple[tuple[str, str, str], ...]
    lengths: Lengths
    memory: CaptureMemory

    def open_model(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> LoadedModel:
        """Load the model with its experts in the pool."""
        return open_pooled(
            checkpoint,
            dtype,
            device,
            device_memory_bytes=self.budget,
            host_memory_bytes=self.options.host_memory_bytes or None,
            io_threads=self.options.io_threads,
            policy=self.policy,
            pool=self.pool,
        )

    def cost(self, checkpoint: Checkpoint, rates: Rates) -> CaptureCost:
        """Estimate the capture at these rates."""
        processes = _processes(self.memory, self.composition)
        return capture_cost(
            checkpoint, self.options, self.composition, self.lengths, self.budget.slots, rates, processes
        )

    def cost_here(self, checkpoint: Checkpoint, folder: Path) -> CaptureCost | None:
        """Estimate a large capture on this machine; None for a small one. Args and effects: as of `measured_rates`."""
        processes = _processes(self.memory, self.composition)
        num_bytes = most_reads(checkpoint.spec, self.composition, self.lengths, self.budget.slots, processes)
        num_bytes *= checkpoint.spec.slot_bytes
        products = 2 * sum(full for _, full in self.lengths) * checkpoint.num_active_parameters
        if num_bytes < _ESTIMATED_BYTES and products < _ESTIMATED_PRODUCTS:
            return None
        return self.cost(checkpoint, measured_rates(self.options.device, folder)[0])


def cost_on(checkpoint: Checkpoint, machine: FitMachine, lengths: Lengths) -> CaptureCost:
    """Estimate a capture on a machine. Raises: CapacityError: the model does not fit."""
    options = options_on(checkpoint, machine)
    memory = CaptureMemory(host_memory_bytes=options.host_memory_bytes)
    limit = memory_of(checkpoint, options, machine.has_gpu, machine.device_bytes)
    setup = choose(checkpoint, lengths, {"device": options.device}, memory=memory, machine=limit)
    return setup.cost(checkpoint, machine.rates)


def choose(
    checkpoint: Checkpoint,
    lengths: Lengths,
    values: dict[str, Any],
    *,
    memory: CaptureMemory,
    batch_size: int | None = None,
    machine: Machine | None = None,
) -> CaptureSetup:
    """Choose what the user has not set.

    Args:
        lengths: tokens of each prompt, and most tokens with its answer.
        values: device and data type, if set.
        batch_size: prompts per batch, if set.
        machine: memory of the machine (default: this one's).

    Raises:
        UsageError: a value is invalid.
        CapacityError: the model does not fit, with its parts and the minimum.
    """
    given = {"host_memory_bytes": memory.host_memory_bytes, "io_threads": memory.io_threads}
    given = values | {name: value for name, value in given.items() if value is not None}
    chosen, why = on_this_machine(checkpoint, given)
    why |= dict.fromkeys(given, "as set")
    options = parse(ServeOptions, chosen, "capture")
    divided = memory.limit_bytes is not None
    machine = machine or this_machine(checkpoint, options, policy=memory.policy or "lru", planned=divided)
    if memory.limit_bytes is not None:
        machine = replace(machine, limit_bytes=memory.limit_bytes, source="part of this process")
    if memory.processes > 1:
        share = (machine.limit_bytes - (memory.processes - 1) * machine.library_bytes) // memory.processes
        machine = replace(
            machine, limit_bytes=max(0, share), source=f"{machine.source} of {memory.processes} processes"
        )
        options = replace(options, host_memory_bytes=options.host_memory_bytes // memory.processes)
    part = replace(memory, limit_bytes=machine.limit_bytes, host_memory_bytes=options.host_memory_bytes, processes=1)
    model = footprint(checkpoint, options)
    limit, beside = machine.limit_bytes, 0
    if memory.device_memory_bytes is not None:
        limit = min(limit, memory.device_memory_bytes)
        beside = (machine.limit_bytes - limit) // 2
    composition = memory.composition
    chosen_before = composition is not None
    if composition is None:
        composition = _compose(checkpoint, model, (limit, beside), lengths, batch_size, memory.shards)
    wishes = Wishes(
        options=replace(options, kv_tokens=composition.kv_tokens, prefill_chunk=composition.chunk_tokens),
        why=why | {"kv_tokens": "requests together", "prefill_chunk": "prompts together"},
        device_memory_bytes=memory.device_memory_bytes,
    )
    budget = divide_memory(checkpoint, wishes, machine)
    every = budget.slots == checkpoint.spec.total_experts
    if not every and not chosen_before and batch_size is None:
        composition = replace(composition, slots=budget.slots)
    by_layer = not every and budget.slots >= 2 * checkpoint.spec.num_layers
    policy, pool = memory.policy or "lru", "layer" if by_layer else "one"
    if every:
        options = replace(options, host_memory_bytes=0)
    return CaptureSetup(
        options=replace(options, kv_tokens=composition.kv_tokens, prefill_chunk=composition.chunk_tokens),
        budget=budget,
        policy=policy,
        pool=pool,
        composition=composition,
        choices=_choices(
            checkpoint, options, budget, why, composition, (policy, pool), lengths, _processes(memory, composition)
        ),
        lengths=lengths,
        memory=part,
    )


def _compose(
    checkpoint: Checkpoint,
    model: Footprint,
    limits: tuple[int, int],
    lengths: Lengths,
    batch_size: int | None,
    shards: int = 1,
) -> Composition:
    """Divide the memory beside weights between requests together, prompt tokens together and expert slots.

    A batch reads nearly every expert for its prompts, and again for each step of wide decoding; so requests together
    save more than slots do.

    Args:
        limits: bytes for weights, KV cache, slots and activations, and bytes for activations alone.
    """
    limit_bytes, activation_bytes = limits
    rest = limit_bytes - model.dense_bytes - model.min_slots * model.slot_bytes
    longest = max(total for _, total in lengths)
    token_bytes = model.kv_token_bytes + model.context_bytes
    beside = limit_bytes - model.dense_bytes - model.num_experts * model.slot_bytes
    in_memory = _CHUNK_IN_MEMORY * model.token_bytes + 2 * longest * token_bytes <= beside
    most_chunk, most = _MOST_CHUNK, None
    if in_memory:
        rest, most_chunk, most = 2 * beside, _CHUNK_IN_MEMORY, _MOST_IN_MEMORY
    if own_cache(checkpoint.config):
        most = _MOST_OWN_CACHES
    activation_bytes = max(activation_bytes, int(rest * _CHUNK_SHARE))
    chunk = max(LEAST_CHUNK, min(most_chunk, activation_bytes // model.token_bytes))
    kv_tokens = max(longest, int(rest * _KV_SHARE) // token_bytes)
    return compose(
        lengths,
        batch_size=batch_size,
        kv_tokens=kv_tokens,
        chunk_tokens=chunk,
        most_together=most,
        most_prompts=min(MOST_PROMPTS, -(-len(lengths) // shards)),
    )


def _processes(memory: CaptureMemory, composition: Composition) -> int:
    """Processes that have a batch."""
    return min(memory.shards, len(composition.sizes))


def _choices(
    checkpoint: Checkpoint,
    options: ServeOptions,
    budget: Budget,
    why: dict[str, str],
    composition: Composition,
    policy: tuple[str, str],
    lengths: Lengths,
    processes: int,
) -> tuple[tuple[str, str, str], ...]:
    spec = checkpoint.spec
    memory = budget.limit_bytes if budget.limit_bytes is not None else budget.device_bytes
    batches = len(composition.sizes)
    together = f"{composition.most} together" + (f", {batches:,} batches" if batches > 1 else "")
    form = ", equal slots per layer" if policy[1] == "layer" else ""
    width, reason = "all requests of a batch", "every expert has a slot"
    if composition.slots:
        width, reason = "chosen by the routes", "the fewest reads per token"
    elif budget.slots < spec.total_experts:
        reason = "as set" if why.get("batch_size") else "as the capture began"
    rows = [
        ("device", options.device, why["device"]),
        ("dtype", options.dtype, why["dtype"]),
        ("memory", count(memory, "B"), budget.why["memory"]),
        ("weights", count(budget.dense_bytes, "B"), "outside the routed experts"),
        ("expert slots", f"{budget.slots} of {spec.total_experts}", budget.why["slots"]),
        ("KV cache", f"{composition.kv_tokens:,} tokens", "requests together"),
        ("prompt tokens", f"{composition.chunk_tokens:,} per forward", "each forward reads an expert once"),
        ("prompts", together, "in their order, the next as others end; a finished batch is kept"),
        ("decode width", width, reason),
        ("policy", policy[0] + form, why.get("policy") or ("survives cyclic scans" if form else "the default")),
    ]
    reads = most_reads(spec, composition, lengths, budget.slots, processes)
    rows.append(("reads", f"at most {count(reads * spec.slot_bytes, 'B')}", "if tokens chose experts independently"))
    if options.host_memory_bytes:
        rows.append(("host memory", count(options.host_memory_bytes, "B"), why["host_memory_bytes"]))
    return tuple(rows)
