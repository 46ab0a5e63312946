"""Division of memory: one function for serving, capturing, planning and comparing."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from moetool.base.errors import CapacityError, UsageError
from moetool.base.families import own_cache
from moetool.base.machine import memory_bytes, resident_bytes
from moetool.base.tables import count
from moetool.base.types import ModelSpec
from moetool.caching.policy import MIN_SLOTS, parse_options, policy_class
from moetool.kernels.cpu.kinds import BFLOAT16
from moetool.kernels.cpu.tiles import FEATURES, find_tiles
from moetool.kernels.cpu.vectors import has_features
from moetool.models.cache_size import RESERVED
from moetool.models.checkpoint import Checkpoint
from moetool.models.experts.packed_slot import stays_packed
from moetool.models.loading import device_kind, parse_device, parse_dtype
from moetool.runtime.decoding import PAGE_TOKENS, cache_bytes, kv_shape
from moetool.runtime.expected_reads import PUBLISHED, ExpectedSplit, MissCurve, best_split, miss_curve
from moetool.runtime.experts.copies import stride_of
from moetool.runtime.memory_share import MemoryShare, fixed_share, flexible_share
from moetool.runtime.serve_options import ServeOptions
from moetool.runtime.sizing import (
    GOOD_CONTEXT,
    LEAST_CHUNK,
    LEAST_CONTEXT,
    MOST_CHUNK,
    Footprint,
    MemorySplit,
    pages,
    with_rest,
)
from moetool.runtime.warm_start import kept_routes

AUTO = "auto"
_RESERVE_BYTES = 430_000_000
"""Uncounted memory of a process: late libraries, tokenizer, HTTP, compiled products, allocators.

Qwen3-30B-A3B's shape with four layers took about 340 MB, with prompts of 30 lengths up to 2,000 tokens, four at once.
It and DeepSeek-V2-Lite's shape left 130 MB of a third of their size (tests/soak/test_memory_limit.py).
"""
_TORCH_PRODUCTS_BYTES = 340_000_000
"""Code that torch compiles for each number of rows, where products of many rows are not computed by tiles.

It takes up to 340 MB over 80 prompts of different lengths (weights of Qwen3-30B-A3B's shape).
"""
_GPU_HEADROOM = 0.08  # of a GPU's free memory, for the CUDA context, workspaces and fragmentation


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Limits of a machine's memory, and its known miss curve.

    Attributes:
        limit_bytes: memory for weights, activations, KV cache and slots.
        source: what sets the limit.
        library_bytes: memory of the process beside them.
        curve: misses by slots.
    """

    limit_bytes: int
    source: str
    library_bytes: int = 0
    curve: MissCurve = PUBLISHED


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """Wishes for a division of memory.

    Attributes:
        options: device, data type and, where `why` names them, `kv_tokens` and `prefill_chunk`.
        why: reasons for options that are set, by name, and for `memory`.
        device_memory_bytes: limit of dense weights, predictor, KV cache and slots.
        predictor_bytes: device memory of the policy's predictor.
        slots: most expert slots; None: as many as fit.
        share_slots: whether prompts and KV cache borrow slots where nothing fixes their sizes.
        planned: whether `device_memory_bytes` holds whatever the machine has free.
        kv_cache: whether the KV cache is a part.
    """

    options: ServeOptions
    why: Mapping[str, str] = field(default_factory=dict)
    device_memory_bytes: int | None = None
    predictor_bytes: int = 0
    slots: int | None = None
    share_slots: bool = False
    planned: bool = False
    kv_cache: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """A division of memory, in bytes by part at the start, and the counts behind it.

    Attributes:
        limit_bytes: limit of the device's parts; None: none.
        dense_bytes: weights outside the routed experts.
        kv_bytes: KV cache.
        activation_bytes: activations of the longest forward that borrows no slots.
        host_bytes: host memory for experts, beside the device.
        library_bytes: libraries and buffers of the process, beside the device's parts.
        unused_bytes: the rest below the limit.
        slots: expert slots, reserved ones included.
        base_slots: expert slots of the division that reserves none.
        kv_tokens: tokens of the KV cache, fully grown.
        first_kv_tokens: its tokens at the start; 0: all.
        chunk_tokens: most prompt tokens of one forward.
        share: slots that long prompts and the KV cache borrow.
        why: reason for each part: memory, slots, kv_tokens, chunk_tokens, host_memory_bytes.
        found: expected reads behind a chosen KV cache.
    """

    limit_bytes: int | None
    dense_bytes: int
    predictor_bytes: int
    kv_bytes: int
    activation_bytes: int
    slots_bytes: int
    host_bytes: int
    library_bytes: int
    unused_bytes: int
    slots: int
    base_slots: int
    kv_tokens: int
    first_kv_tokens: int
    chunk_tokens: int
    share: MemoryShare
    why: Mapping[str, str]
    found: ExpectedSplit

    @property
    def device_bytes(self) -> int:
        """Bytes of dense weights, predictor, KV cache and slots at the start."""
        return self.dense_bytes + self.predictor_bytes + self.kv_bytes + self.slots_bytes

    @property
    def kept_slots(self) -> int:
        """Slots that are never reserved."""
        return self.slots - self.share.most_slots - self.share.kv_slots


def divide_memory(checkpoint: Checkpoint, wishes: Wishes, machine: Machine | None = None) -> Budget:
    """Divide memory between a model's parts.

    Args:
        machine: None: only `wishes.device_memory_bytes` limits, else every expert has a slot.

    Raises:
        CapacityError: the model does not fit, with its parts and the minimum.
    """
    options, why, memory = wishes.options, dict(wishes.why), wishes.device_memory_bytes
    model = footprint(checkpoint, options, wishes.predictor_bytes)
    empty_kv = _cache_bytes(checkpoint, options, 0)
    if not wishes.kv_cache:
        model, empty_kv = replace(model, dense_bytes=model.dense_bytes - empty_kv, kv_token_bytes=0), 0
    kv_tokens = options.kv_tokens if "kv_tokens" in why or machine is None else None
    chunk = options.prefill_chunk if "prefill_chunk" in why or machine is None else None
    if memory is not None:
        least_kv = kv_tokens or min(model.max_context, LEAST_CONTEXT)
        _require_room(checkpoint.spec, model, memory, least_kv, wishes.predictor_bytes, settable=machine is not None)
    curve = PUBLISHED if machine is None else machine.curve
    divide = partial(best_split, kv_tokens=kv_tokens, longest=options.expected_context, curve=curve)
    limit, counted, found = None if machine is None else machine.limit_bytes, model, None
    if limit is not None:
        if wishes.planned and memory is not None:
            tokens = kv_tokens or model.max_context
            limit = max(limit, memory + tokens * model.context_bytes + (chunk or LEAST_CHUNK) * model.token_bytes)
        share_slots: Callable[[MemorySplit], MemoryShare] = fixed_share
        if wishes.share_slots and memory is None:
            cache = "kv_tokens" not in why and not own_cache(checkpoint.config)
            share_slots = partial(flexible_share, model, chunk="prefill_chunk" not in why, cache=cache)
        found = divide(model, limit, chunk_tokens=chunk, share=share_slots)
    chunk_why = why.get("prefill_chunk", "as set" if found is None else found.split.why["chunk_tokens"])
    source = "" if machine is None else machine.source
    if found is None and memory is None:
        memory = model.dense_bytes + pages(options.kv_tokens) * model.kv_token_bytes
        memory += model.num_experts * model.slot_bytes
    if memory is not None:
        chunk = options.prefill_chunk if found is None else found.split.chunk_tokens
        activations = chunk * model.token_bytes
        outside = activations + (0 if found is None else found.split.kv_tokens * model.context_bytes)
        if limit is None or wishes.planned or memory + outside < limit:
            counted = replace(model, context_bytes=0)
            found = divide(counted, memory + activations, chunk_tokens=chunk)
            source = why.get("memory", "--device-memory")
    assert found is not None
    split, every = found.split, found.split.slots == model.num_experts
    if every and kv_tokens is None:
        grown = [with_rest(counted, split)]
        if limit is not None:
            free = limit - split.chunk_tokens * model.token_bytes - split.slots * model.slot_bytes - model.dense_bytes
            free -= split.kv_tokens * (model.kv_token_bytes + model.context_bytes)
            grown.append(with_rest(model, replace(split, unused_bytes=free)))
        split = min(grown, key=lambda one: one.kv_tokens)  # both limits hold
    share = found.share if split is found.split else fixed_share(split)
    first, slots = split.kv_tokens - share.kv_tokens if share.kv_slots else 0, share.slots
    if wishes.slots is not None:
        slots = min(slots, wishes.slots)
    kept = slots - share.most_slots - share.kv_slots
    slots_why = split.why["slots"]
    kv_why = "rest, with every expert in a slot" if every else "largest within 2 % of the fewest expected reads"
    kv_why = why.get("kv_tokens", kv_why)
    if kept < slots:
        slots_why = f"{kept} beside a long prompt and a full KV cache"
    if first:
        kv_why = f"begins with {first:,}, grows into expert slots" + (f"; {kv_why}" if kv_tokens is None else "")
    if share.most_slots:
        chunk_why = f"beyond {share.first_chunk} tokens it borrows expert slots"
    dense = model.dense_bytes - wishes.predictor_bytes - empty_kv
    kv_bytes, slots_bytes = empty_kv + (first or split.kv_tokens) * model.kv_token_bytes, slots * model.slot_bytes
    parts = dense + wishes.predictor_bytes + kv_bytes + slots_bytes
    alone = min(share.first_chunk, share.chunk_tokens) if share.most_slots else share.chunk_tokens
    bound = memory if counted is not model else limit
    outside = (
        0 if counted is not model else alone * model.token_bytes + (first or split.kv_tokens) * model.context_bytes
    )
    return Budget(
        limit_bytes=None if machine is None and wishes.device_memory_bytes is None else bound,
        dense_bytes=dense,
        predictor_bytes=wishes.predictor_bytes,
        kv_bytes=kv_bytes,
        activation_bytes=alone * model.token_bytes,
        slots_bytes=slots_bytes,
        host_bytes=options.host_memory_bytes,
        library_bytes=0 if machine is None else machine.library_bytes,
        unused_bytes=max(0, (bound or 0) - parts - outside),
        slots=slots,
        base_slots=split.slots,
        kv_tokens=split.kv_tokens,
        first_kv_tokens=first,
        chunk_tokens=share.chunk_tokens,
        share=share,
        why=why | {"memory": source, "slots": slots_why, "kv_tokens": kv_why, "chunk_tokens": chunk_why},
        found=found,
    )


def divide_with_slots(checkpoint: Checkpoint, options: ServeOptions, slots: int) -> Budget:
    """The division with a KV cache and chunks as in `options` and this number of expert slots."""
    return divide_memory(checkpoint, Wishes(options=options, slots=slots))


def served_budgets(
    checkpoint: Checkpoint, options: ServeOptions, given: Collection[str]
) -> Callable[[int, int], Budget]:
    """Return the division of `moetool serve --device-memory` here, as a function of device and predictor bytes.

    Args:
        options: completed for the machine.
        given: names of the options that the user set.

    Raises:
        CapacityError: the made function, where the model does not fit.
    """
    machine = this_machine(checkpoint, options, planned=True)
    wishes = Wishes(options=options, why=dict.fromkeys(given, "as set"), planned=True)

    def divide(device_memory_bytes: int, predictor_bytes: int) -> Budget:
        wanted = replace(wishes, device_memory_bytes=device_memory_bytes, predictor_bytes=predictor_bytes)
        return divide_memory(checkpoint, wanted, machine)

    return divide


def free_device_bytes(checkpoint: Checkpoint, options: ServeOptions) -> int:
    """Bytes that this machine has free for dense weights, KV cache and expert slots.

    Raises:
        UsageError: there is no such device.
        CapacityError: the model does not fit.
    """
    return divide_memory(checkpoint, Wishes(options=options), this_machine(checkpoint, options)).device_bytes


def least_and_most(checkpoint: Checkpoint, options: ServeOptions, *, fixed_kv: bool) -> tuple[int, int]:
    """Device memory of the smallest pool, and of every expert with the longest expected context.

    Args:
        fixed_kv: whether the KV cache has `options.kv_tokens`.
    """
    model = footprint(checkpoint, options)
    context = min(model.max_context, options.expected_context)
    least, most = (options.kv_tokens,) * 2 if fixed_kv else (min(model.max_context, LEAST_CONTEXT), context)
    slots = zip((least, most), (model.min_slots, model.num_experts), strict=True)
    small, large = (
        model.dense_bytes + pages(tokens) * model.kv_token_bytes + number * model.slot_bytes for tokens, number in slots
    )
    return small, large


def this_machine(
    checkpoint: Checkpoint,
    options: ServeOptions,
    *,
    policy: str = AUTO,
    process_memory_bytes: int | None = None,
    planned: bool = False,
    taken_bytes: int | None = None,
) -> Machine:
    """This machine's free memory for a model.

    Args:
        policy: cache policy; `auto` divides by the misses of this model's last server.
        process_memory_bytes: limit of this process's resident memory, on a CPU.
        planned: whether it may have too little memory, or no such device.
        taken_bytes: resident memory of the process that loads the model (default: this one's).

    Raises:
        UsageError: there is no such device.
        CapacityError: nothing is free.
    """
    curve = _curve(checkpoint.spec, options.warm_start) if policy == AUTO else PUBLISHED
    if planned and device_kind(options.device).type == "cuda" and not torch.cuda.is_available():
        return Machine(limit_bytes=0, source="", curve=curve)
    device = parse_device(options.device, options.first_device or 0)
    if device.type == "cuda":
        if process_memory_bytes is not None:
            raise UsageError("--process-memory bounds a process on a CPU; beside a GPU use --host-memory")
        free = int(torch.cuda.mem_get_info(device)[0] * (1 - _GPU_HEADROOM))
        return Machine(limit_bytes=free, source="free on the GPU", curve=curve)
    libraries = _reserve_bytes(checkpoint, options, compile=taken_bytes is None)
    libraries += _state_bytes(checkpoint.spec, policy, options)
    try:
        limit, source = _process_limit(process_memory_bytes, libraries, taken_bytes)
    except CapacityError:
        if not planned:
            raise
        limit, source = 0, ""
    return Machine(limit_bytes=limit, source=source, library_bytes=libraries, curve=curve)


def gpu_with(memory_bytes: float, checkpoint: Checkpoint, options: ServeOptions) -> Machine:
    """A machine whose GPU has this much memory, all of it free; `this_machine` with a limit stands for a CPU."""
    return Machine(
        limit_bytes=int(memory_bytes * (1 - _GPU_HEADROOM)),
        source="the GPU's memory",
        curve=_curve(checkpoint.spec, options.warm_start),
    )


def slot_stride(checkpoint: Checkpoint, options: ServeOptions) -> int:
    """Bytes from one expert slot to the next."""
    fastest = parse_dtype(options.dtype) if options.products and options.device == "cpu" else None
    return stride_of(checkpoint.slot_bytes(fastest))


def every_slot_bytes(checkpoint: Checkpoint, options: ServeOptions) -> int:
    """Bytes of slots for every expert of a model."""
    return checkpoint.spec.total_experts * slot_stride(checkpoint, options)


def _require_room(
    spec: ModelSpec, model: Footprint, device_memory_bytes: int, kv_tokens: int, predictor_bytes: int, *, settable: bool
) -> None:
    """Raises: CapacityError, which names the setting of the KV cache where the command has one."""
    kv_bytes, slots_bytes = kv_tokens * model.kv_token_bytes, model.min_slots * model.slot_bytes
    needed = model.dense_bytes + kv_bytes + slots_bytes
    if device_memory_bytes < needed:
        parts = [f"dense weights {count(model.dense_bytes - predictor_bytes, 'B')}"]
        parts += [f"predictor {count(predictor_bytes, 'B')}"] if predictor_bytes else []
        parts += [f"KV cache of {kv_tokens:,} tokens {count(kv_bytes, 'B')}"] if kv_bytes else []
        raise CapacityError(
            f"--device-memory {count(device_memory_bytes, 'B')} is too small for {spec.name}: it needs at least "
            f"{count(needed, 'B')} ({', '.join(parts)}, {model.min_slots} expert slots {count(slots_bytes, 'B')}); "
            f"raise it{', or give a smaller --set kv_tokens' if kv_bytes and settable else ''}"
        )


def footprint(checkpoint: Checkpoint, options: ServeOptions, predictor_bytes: int = 0) -> Footprint:
    """Memory of a checkpoint's parts on the options' device and in their dtype."""
    spec, config, dtype = checkpoint.spec, checkpoint.config, parse_dtype(options.dtype)
    empty, many = (_cache_bytes(checkpoint, options, pages * PAGE_TOKENS) for pages in (0, 64))
    return Footprint(
        dense_bytes=checkpoint.dense_bytes(dtype, options.device, options.products) + predictor_bytes + empty,
        slot_bytes=slot_stride(checkpoint, options),
        num_experts=spec.total_experts,
        min_slots=MIN_SLOTS,
        kv_token_bytes=max(1, (many - empty) // (64 * PAGE_TOKENS)),
        token_bytes=_token_bytes(checkpoint, options),
        max_context=checkpoint.max_context or MOST_CHUNK,
        token_experts=sum(spec.top_k_L),
        context_bytes=2 * max(1, (many - empty) // (64 * PAGE_TOKENS)) // len(config.per_layer_config),
    )


def _cache_bytes(checkpoint: Checkpoint, options: ServeOptions, kv_tokens: int) -> int:
    """Bytes of the KV cache for `kv_tokens`, with the fixed parts of own caches for as many requests as run."""
    requests = 1 if options.deterministic else options.max_requests or RESERVED
    return cache_bytes(checkpoint, parse_dtype(options.dtype), kv_tokens, requests)


def _token_bytes(checkpoint: Checkpoint, options: ServeOptions) -> int:
    """Peak bytes of activations per token, over MoE layers, dense layers and attention."""
    spec, config, size = checkpoint.spec, checkpoint.config, parse_dtype(options.dtype).itemsize
    rows = max(spec.top_k_L) + spec.num_shared_experts
    intermediate = getattr(config, "intermediate_size", None) or 0
    width = getattr(config, "moe_intermediate_size", None) or intermediate
    if device_kind(options.device).type == "cpu" and options.devices == 1:
        # Outputs of its experts, their sum in float32, and one expert's rows, which may be those of every token.
        experts = rows * spec.hidden_size * size + 12 * spec.hidden_size + (2 * spec.hidden_size + 3 * width) * size
    else:  # rows of its experts are gathered, computed and summed together
        experts = rows * spec.hidden_size * (3 * size + 8)
    experts += 16 * spec.num_experts
    queries = 4 * max(layer.num_attention_heads * kv_shape(layer)[1] for layer in config.per_layer_config)
    mask = 3 * min(checkpoint.max_context or GOOD_CONTEXT, GOOD_CONTEXT)  # masks of a later chunk, in two forms
    return 8 * spec.hidden_size * size + max(experts, 3 * intermediate * size, queries * size + mask)


def _curve(spec: ModelSpec, warm: bool) -> MissCurve:
    """Return misses by slots, from routes that the model's last server kept, else from published ones."""
    routes = kept_routes(spec) if warm else None
    return PUBLISHED if routes is None else miss_curve(spec, routes) or PUBLISHED


def _state_bytes(spec: ModelSpec, policy: str, options: ServeOptions) -> int:
    """Bytes of the policy's state, twice: the live comparison (`LiveOracle`) holds a copy."""
    name, given = ("foresight", {}) if policy == AUTO else (policy, options.policy)
    return 2 * policy_class(name).state_bytes(spec, parse_options(name, given))


def _reserve_bytes(checkpoint: Checkpoint, options: ServeOptions, *, compile: bool) -> int:
    """Bytes of this process's memory that nothing counts."""
    dtype, forms = parse_dtype(options.dtype), [layer.form for layer in checkpoint.layers]
    formats = checkpoint.quantization.formats if checkpoint.quantization is not None else ()
    by_torch = dtype == torch.bfloat16 and (  # products in float32 need no code of their own
        any(form.up_transposed or form.down_transposed for form in forms)
        or any(stays_packed(format, form, dtype) for format in formats for form in forms)
        or not (find_tiles(BFLOAT16) if compile else has_features(*FEATURES))  # compiled code: memory taken
    )
    return _RESERVE_BYTES + by_torch * _TORCH_PRODUCTS_BYTES


def _process_limit(process_memory_bytes: int | None, library_bytes: int, taken_bytes: int | None) -> tuple[int, str]:
    """Memory for weights, activations, KV cache and slots in a process, and what sets it.

    Args:
        library_bytes: what the process needs besides, and does not hold yet.
        taken_bytes: its resident memory; None: this one's.
    """
    resident = resident_bytes()
    taken = resident if taken_bytes is None else taken_bytes
    limit, source = memory_bytes()[1] + resident, "free memory"
    if process_memory_bytes is not None:
        limit, source = process_memory_bytes, "--process-memory"
    needed = taken + library_bytes
    left = limit - needed
    if left <= 0:
        raise CapacityError(
            f"{source} allows {limit:,} bytes, but the process needs {needed:,} before it loads a model; allow more"
        )
    return left, source
