"""Choose serving options from the checkpoint, the machine and its free memory."""

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from moetool.base.config import parse
from moetool.base.errors import CapacityError, MoetoolError, UsageError
from moetool.base.families import own_cache
from moetool.base.machine import memory_bytes, resident_bytes
from moetool.base.tables import count
from moetool.base.types import ModelSpec
from moetool.caching.layer_slots import POOL_FORMS
from moetool.caching.policy import MIN_SLOTS, parse_options, policy_class
from moetool.kernels.cpu.tiles import find_tiles
from moetool.models.checkpoint import Checkpoint
from moetool.models.experts.packed_slot import stays_packed
from moetool.models.loading import device_kind, parse_device, parse_dtype, served_dtype
from moetool.prediction.token_memory import compile_loops
from moetool.runtime.assembly import ServeOptions, slot_bytes
from moetool.runtime.decoding import PAGE_TOKENS, kv_cache_bytes, kv_shape
from moetool.runtime.expected_reads import PUBLISHED, ExpectedSplit, MissCurve, best_split, miss_curve
from moetool.runtime.experts.copies import stride_of
from moetool.runtime.memory_share import lendable
from moetool.runtime.sizing import (
    GOOD_CONTEXT,
    LEAST_CHUNK,
    LEAST_CONTEXT,
    MOST_CHUNK,
    Footprint,
    MemorySplit,
    with_rest,
)
from moetool.runtime.warm_start import kept_routes, policy_in_force

_LOG = logging.getLogger(__name__)
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
_HOST_SHARE = 0.8  # of the free host memory beside a GPU that experts may take
_IO_THREADS = 4  # readers that keep an NVMe drive busy


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSetup:
    """Automatic choices for serving a model.

    Attributes:
        options: every option, set or chosen.
        device_memory_bytes: bytes for weights, KV cache and expert slots.
        policy: cache policy.
        choices: (setting, value, reason) for display.
    """

    options: ServeOptions
    device_memory_bytes: int
    policy: str
    choices: tuple[tuple[str, str, str], ...]


def choose(
    checkpoint: Checkpoint,
    values: Mapping[str, Any],
    *,
    device_memory_bytes: int | None = None,
    process_memory_bytes: int | None = None,
    predictor_bytes: int = 0,
    policy: str = AUTO,
    planned: Collection[str] = (),
) -> ServeSetup:
    """Choose what the user has not set.

    Args:
        values: fields of `ServeOptions` set by the user or a plan.
        planned: names of the values that come from a plan, `memory` and `policy` included.
        device_memory_bytes: limit of weights, KV cache and expert slots.
        process_memory_bytes: limit of this process's resident memory, on a CPU (default: as control groups and free
            memory allow).
        predictor_bytes: device memory of the policy's predictor (`moetool.runtime.assembly.predictor_bytes`).
        policy: cache policy; `auto` is the policy in force at the end of the last run, else the best one without a
            trained predictor. Unless set otherwise, `auto` starts warm and may switch policies.

    Raises:
        UsageError: the option does not accept a value.
        CapacityError: the model does not fit, with its parts and the minimum.
    """
    chosen, reasons = on_this_machine(checkpoint, values)
    why = reasons | dict.fromkeys(values, "as set") | dict.fromkeys(planned, "from the plan")
    options = parse(ServeOptions, chosen, "--set")  # refuse bad values before they are used
    device = parse_device(options.device, options.first_device or 0)
    if device.type == "cuda":
        limit, source = int(torch.cuda.mem_get_info(device)[0] * (1 - _GPU_HEADROOM)), "free on the GPU"
        if process_memory_bytes is not None:
            raise UsageError("--process-memory bounds a process on a CPU; beside a GPU use --host-memory")
    else:
        beside = _reserve_bytes(checkpoint, options) + _state_bytes(checkpoint.spec, policy, options)
        limit, source = _process_limit(process_memory_bytes, beside)
    model = footprint(checkpoint, options, predictor_bytes)
    automatic = policy == AUTO
    curve = _curve(checkpoint.spec, chosen) if automatic else PUBLISHED
    kv_tokens, longest = chosen.get("kv_tokens"), options.expected_context
    shares_memory = automatic and device.type == "cpu" and options.devices == 1 and device_memory_bytes is None
    found = best_split(
        model,
        limit,
        kv_tokens=kv_tokens,
        chunk_tokens=chosen.get("prefill_chunk"),
        longest=longest,
        curve=curve,
        lend=partial(_shared, checkpoint, model, values) if shares_memory else lambda split: {},
    )
    chunk_why, counted = found.split.why["chunk_tokens"], model
    if device_memory_bytes is not None:
        least_kv = kv_tokens or min(model.max_context, LEAST_CONTEXT)
        _require_room(checkpoint.spec, model, device_memory_bytes, least_kv, predictor_bytes)
        chunk = found.split.chunk_tokens
        activations = chunk * model.token_bytes
        if device_memory_bytes + activations + found.split.kv_tokens * model.context_bytes < limit:
            counted = replace(model, context_bytes=0)
            found = best_split(
                counted,
                device_memory_bytes + activations,
                kv_tokens=kv_tokens,
                chunk_tokens=chunk,
                longest=longest,
                curve=curve,
            )
            source = why.get("memory", "--device-memory")
    split, every = found.split, found.split.slots == model.num_experts
    if every and kv_tokens is None:
        free = limit - split.chunk_tokens * model.token_bytes - split.slots * model.slot_bytes - model.dense_bytes
        free -= split.kv_tokens * (model.kv_token_bytes + model.context_bytes)
        grown = with_rest(counted, split), with_rest(model, replace(split, unused_bytes=free))
        split = min(grown, key=lambda one: one.kv_tokens)  # both limits hold
    chosen |= {"kv_tokens": split.kv_tokens, "prefill_chunk": split.chunk_tokens}
    if every and "host_memory_bytes" not in values:
        chosen.pop("host_memory_bytes", None)
    shares = dict(found.lent)
    slots = shares.pop("slots", split.slots)
    if "prefill_chunk" in shares:
        chosen["prefill_chunk"] = shares.pop("prefill_chunk")
        unlent = shares.get("first_chunk", values.get("first_chunk", LEAST_CHUNK))
        chunk_why = f"beyond {unlent} tokens it borrows expert slots"
    kept_slots = slots - sum(shares.get(name, 0) for name in ("borrowed_slots", "kv_slots"))
    if automatic:
        for name in ("warm_start", "change_policy", "remember_policy"):
            chosen.setdefault(name, True)
        policy, why["policy"] = _policy(split.slots, model.num_experts)
        shared = chosen.get("devices", 1) > 1 or split.slots == model.num_experts
        if not shared and split.slots >= MIN_SLOTS * checkpoint.spec.num_layers:
            begins = chosen["warm_start"] and chosen["change_policy"] and chosen["remember_policy"]
            if begins and values.keys().isdisjoint(("policy", "pool", "state")):
                kept = policy_in_force(checkpoint.spec, slots)
                if kept is not None and (kept.policy != "foresight" or policy == "foresight"):
                    policy, chosen["pool"] = kept.policy, kept.pool
                    why["policy"] = "policy that was in force at the end of the last run"
            chosen.setdefault("pool", "layer")
    slots_why = split.why["slots"]
    most_why = "rest, with every expert in a slot" if every else "largest within 2 % of the fewest expected reads"
    kv_why = why.get("kv_tokens", most_why)
    chosen = shares | chosen
    if kept_slots < slots:
        slots_why = f"{kept_slots} beside a long prompt and a full KV cache"
    if first := chosen.get("first_kv_tokens", 0):
        kv_why = f"begins with {first:,}, grows into expert slots" + (f"; {kv_why}" if kv_tokens is None else "")
    memory = model.dense_bytes + split.kv_tokens * model.kv_token_bytes + slots * model.slot_bytes
    choices = [
        ("device", chosen["device"], why["device"]),
        ("dtype", chosen["dtype"], why["dtype"]),
        ("memory", count(limit, "B") if device_memory_bytes is None else count(memory, "B"), source),
        ("weights", count(model.dense_bytes - predictor_bytes, "B"), "outside the routed experts"),
        ("expert slots", f"{slots} of {model.num_experts}", slots_why),
        ("KV cache", f"{split.kv_tokens:,} tokens", kv_why),
        ("prefill chunk", f"{chosen['prefill_chunk']:,} tokens", chunk_why),
    ]
    if predictor_bytes:
        choices.insert(4, ("predictor", count(predictor_bytes, "B"), "--predictor, or the plan's"))
    if found.others and not every:
        choices.append(_reads_row(checkpoint.spec, found, curve))
    form = chosen.get("pool") or "one"
    shape = "" if form == "one" else f", {POOL_FORMS.get(form, form)}"
    choices.append(("policy", policy + shape, why.get("policy", "as set")))
    if chosen.get("host_memory_bytes"):
        choices.append(("host memory", count(chosen["host_memory_bytes"], "B"), why["host_memory_bytes"]))
    return ServeSetup(
        options=parse(ServeOptions, chosen, "--set"),
        device_memory_bytes=memory,
        policy=policy,
        choices=tuple(choices),
    )


def on_this_machine(checkpoint: Checkpoint, values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Complete device, data type, threads that read experts and, beside a GPU, host memory, for this machine.

    Args:
        values: fields of `ServeOptions` that are set.

    Returns:
        The completed values, and the reason for each added one.

    Raises:
        UsageError: an option does not accept a value.
    """
    chosen, why = dict(values), dict[str, str]()
    if "device" not in values:
        chosen["device"] = "cuda" if torch.cuda.is_available() else "cpu"
        why["device"] = "the first GPU" if chosen["device"] == "cuda" else "torch sees no GPU"
    device = device_kind(chosen["device"])
    if "dtype" not in values:
        chosen["dtype"], why["dtype"] = served_dtype(checkpoint, device)
    if "io_threads" not in values:
        chosen["io_threads"], why["io_threads"] = _IO_THREADS if device.type == "cuda" else 2, "threads reading experts"
    if device.type == "cuda" and "host_memory_bytes" not in values:
        everything = every_slot_bytes(checkpoint, parse(ServeOptions, chosen, "--set"))
        chosen["host_memory_bytes"] = min(everything, int(memory_bytes()[1] * _HOST_SHARE))
        why["host_memory_bytes"] = "every expert" if chosen["host_memory_bytes"] == everything else "free host memory"
    return chosen, why


def every_slot_bytes(checkpoint: Checkpoint, options: ServeOptions) -> int:
    """Bytes of slots for every expert of a model."""
    return checkpoint.spec.total_experts * stride_of(slot_bytes(checkpoint, options))


def _require_room(
    spec: ModelSpec, model: Footprint, device_memory_bytes: int, kv_tokens: int, predictor_bytes: int
) -> None:
    kv_bytes, slots_bytes = kv_tokens * model.kv_token_bytes, model.min_slots * model.slot_bytes
    needed = model.dense_bytes + kv_bytes + slots_bytes
    if device_memory_bytes < needed:
        dense = count(model.dense_bytes - predictor_bytes, "B")
        beside = f"{dense}, predictor {count(predictor_bytes, 'B')}" if predictor_bytes else dense
        raise CapacityError(
            f"--device-memory {count(device_memory_bytes, 'B')} is too small for {spec.name}: it needs at least "
            f"{count(needed, 'B')} (dense weights {beside}, KV cache of {kv_tokens:,} tokens "
            f"{count(kv_bytes, 'B')}, {model.min_slots} expert slots {count(slots_bytes, 'B')}); raise it, or give a "
            "smaller --set kv_tokens"
        )


def footprint(checkpoint: Checkpoint, options: ServeOptions, predictor_bytes: int = 0) -> Footprint:
    """Memory of a checkpoint's parts on the options' device and in their dtype."""
    spec, config, dtype = checkpoint.spec, checkpoint.config, parse_dtype(options.dtype)
    empty, many = (kv_cache_bytes(config, dtype, pages * PAGE_TOKENS) for pages in (0, 64))
    return Footprint(
        dense_bytes=checkpoint.dense_bytes(dtype, options.device, options.products) + predictor_bytes + empty,
        slot_bytes=stride_of(slot_bytes(checkpoint, options)),
        num_experts=spec.total_experts,
        min_slots=MIN_SLOTS,
        kv_token_bytes=max(1, (many - empty) // (64 * PAGE_TOKENS)),
        token_bytes=_token_bytes(checkpoint, options),
        max_context=checkpoint.max_context or MOST_CHUNK,
        token_experts=sum(spec.top_k_L),
        context_bytes=2 * max(1, (many - empty) // (64 * PAGE_TOKENS)) // len(config.per_layer_config),
    )


def _token_bytes(checkpoint: Checkpoint, options: ServeOptions) -> int:
    """Peak bytes of activations per token, over MoE layers, dense layers and attention."""
    spec, config, size = checkpoint.spec, checkpoint.config, parse_dtype(options.dtype).itemsize
    rows = max(spec.top_k_L) + spec.num_shared_experts
    intermediate = getattr(config, "intermediate_size", None) or 0
    width = getattr(config, "moe_intermediate_size", None) or intermediate
    if parse_device(options.device).type == "cpu" and options.devices == 1:
        # Outputs of its experts, their sum in float32, and one expert's rows, which may be those of every token.
        experts = rows * spec.hidden_size * size + 12 * spec.hidden_size + (2 * spec.hidden_size + 3 * width) * size
    else:  # rows of its experts are gathered, computed and summed together
        experts = rows * spec.hidden_size * (3 * size + 8)
    experts += 16 * spec.num_experts
    queries = 4 * max(config.num_attention_heads * width for _, width in map(kv_shape, config.per_layer_config))
    mask = 3 * min(checkpoint.max_context or GOOD_CONTEXT, GOOD_CONTEXT)  # masks of a later chunk, in two forms
    return 8 * spec.hidden_size * size + max(experts, 3 * intermediate * size, queries * size + mask)


def _curve(spec: ModelSpec, values: Mapping[str, Any]) -> MissCurve:
    """Return misses by slots, from routes that the model's last server kept, else from published ones."""
    routes = kept_routes(spec) if values.get("warm_start", True) else None
    return PUBLISHED if routes is None else miss_curve(spec, routes) or PUBLISHED


def _reads_row(spec: ModelSpec, found: ExpectedSplit, curve: MissCurve) -> tuple[str, str, str]:
    """Return the row for expected reads per turn, compared with a smaller and a larger KV cache."""
    others = (
        f"{count(round(loads * spec.slot_bytes), 'B')} with {tokens:,} tokens"
        for tokens, loads in found.others
        if tokens != found.split.kv_tokens
    )
    return (
        "expected reads",
        f"{count(round(found.loads * spec.slot_bytes), 'B')} a turn",
        "; ".join((*others, curve.source)),
    )


def _shared(checkpoint: Checkpoint, model: Footprint, values: Mapping[str, Any], split: MemorySplit) -> dict[str, int]:
    """Return options that let prompt chunks and KV cache borrow expert slots, unless the user has set them."""
    if "borrowed_slots" in values:
        return {}
    kv_is_free = values.keys().isdisjoint(("kv_tokens", "first_kv_tokens", "kv_slots"))
    return lendable(
        model,
        split,
        chunk="prefill_chunk" not in values,
        cache=kv_is_free and not own_cache(checkpoint.config),
        first_chunk=values.get("first_chunk"),
    )


def _compiles() -> bool:
    try:
        compile_loops()
    except MoetoolError as error:
        _LOG.warning("%s; lfru serves instead", error)
        return False
    return True


def _policy(slots: int, num_experts: int) -> tuple[str, str]:
    """Choose the automatic policy, with the reason.

    `foresight` loads fewer experts than `lru`, and takes little CPU time per forward (`tests/bench/test_foresight.py`).
    Equal slots per layer keep a stream of events that is larger than the pool, such as a long prompt, from evicting
    everything.
    """
    if slots == num_experts:
        return "lru", "every expert has a slot"
    if not _compiles():
        return "lfru", "foresight needs numba, which fails here"
    return "foresight", "predicts from similar earlier tokens"


def _state_bytes(spec: ModelSpec, policy: str, options: ServeOptions) -> int:
    """Bytes of the policy's state, twice: the live comparison (`LiveOracle`) holds a copy."""
    name, given = ("foresight", {}) if policy == AUTO else (policy, options.policy)
    return 2 * policy_class(name).state_bytes(spec, parse_options(name, given))


def _reserve_bytes(checkpoint: Checkpoint, options: ServeOptions) -> int:
    """Bytes of this process's memory that nothing counts."""
    dtype, forms = parse_dtype(options.dtype), [layer.form for layer in checkpoint.layers]
    formats = checkpoint.quantization.formats if checkpoint.quantization is not None else ()
    by_torch = dtype == torch.bfloat16 and (  # products in float32 need no code of their own
        any(form.up_transposed or form.down_transposed for form in forms)
        or any(stays_packed(format, form, dtype) for format in formats for form in forms)
        or find_tiles() is None
    )
    return _RESERVE_BYTES + by_torch * _TORCH_PRODUCTS_BYTES


def _process_limit(process_memory_bytes: int | None, beside_bytes: int) -> tuple[int, str]:
    """Memory for weights, activations, KV cache and slots in this process, and what sets it.

    Args:
        beside_bytes: what the process needs besides, and does not hold yet.
    """
    taken = resident_bytes()
    allowed = memory_bytes()[1] + taken
    limit, source = allowed, "free memory"
    if process_memory_bytes is not None:
        limit, source = process_memory_bytes, "--process-memory"
    beside = taken + beside_bytes
    left = limit - beside
    if left <= 0:
        raise CapacityError(
            f"{source} allows {limit:,} bytes, but the process needs {beside:,} before it loads a model; allow more"
        )
    return left, source
