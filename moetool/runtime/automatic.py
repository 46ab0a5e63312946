"""Choose serving options from the checkpoint, the machine and its free memory."""

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from moetool.base.config import parse
from moetool.base.errors import MoetoolError
from moetool.base.machine import memory_bytes
from moetool.base.tables import count
from moetool.base.types import ModelSpec
from moetool.caching.layer_slots import POOL_FORMS
from moetool.caching.policy import MIN_SLOTS
from moetool.models.checkpoint import Checkpoint
from moetool.models.loading import available_device, device_kind, served_dtype
from moetool.prediction.token_memory import compile_loops
from moetool.runtime.budget import AUTO, Budget, Wishes, divide_memory, every_slot_bytes, this_machine
from moetool.runtime.expected_reads import ExpectedSplit, MissCurve
from moetool.runtime.serve_options import ServeOptions

_LOG = logging.getLogger(__name__)
_HOST_SHARE = 0.8  # of the free host memory beside a GPU that experts may take
_IO_THREADS = 4  # readers that keep an NVMe drive busy


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSetup:
    """Automatic choices for serving a model.

    Attributes:
        options: every option, set or chosen.
        choices: (setting, value, reason) for display.
    """

    options: ServeOptions
    budget: Budget
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
    slots: int | None = None,
) -> ServeSetup:
    """Choose what the user has not set.

    Args:
        values: fields of `ServeOptions` set by the user or a plan.
        planned: names of the values that come from a plan, `memory` and `policy` included.
        slots: expert slots of a plan (default: as many as fit).
        device_memory_bytes: limit of weights, KV cache and expert slots.
        process_memory_bytes: limit of this process's resident memory, on a CPU (default: as control groups and free
            memory allow).
        predictor_bytes: device memory of the policy's predictor (`moetool.runtime.assembly.predictor_bytes`).
        policy: cache policy; `auto` is the best one without a trained predictor and, unless set otherwise, starts warm.

    Raises:
        UsageError: the option does not accept a value.
        CapacityError: the model does not fit, with its parts and the minimum.
    """
    automatic, spec = policy == AUTO, checkpoint.spec
    chosen, reasons = on_this_machine(checkpoint, {"warm_start": True, **values} if automatic else values)
    why = reasons | dict.fromkeys(values, "as set") | dict.fromkeys(planned, "from the plan")
    options = parse(ServeOptions, chosen, "--set")  # refuse bad values before they are used
    wishes = Wishes(
        options=options,
        why=why,
        device_memory_bytes=device_memory_bytes,
        predictor_bytes=predictor_bytes,
        slots=slots,
        share_slots=automatic and options.device == "cpu" and options.devices == 1,
        planned="memory" in planned,
    )
    machine = this_machine(checkpoint, options, policy=policy, process_memory_bytes=process_memory_bytes)
    budget = divide_memory(checkpoint, wishes, machine)
    every = budget.base_slots == spec.total_experts
    chosen |= {"kv_tokens": budget.kv_tokens, "prefill_chunk": budget.chunk_tokens}
    if every and "host_memory_bytes" not in values:
        chosen.pop("host_memory_bytes", None)
    if automatic:
        policy, why["policy"] = _policy(budget.base_slots, spec.total_experts)
        if chosen.get("devices", 1) == 1 and not every and budget.base_slots >= MIN_SLOTS * spec.num_layers:
            chosen.setdefault("pool", "layer")
    memory = machine.limit_bytes if device_memory_bytes is None else budget.device_bytes
    choices = [
        ("device", chosen["device"], why["device"]),
        ("dtype", chosen["dtype"], why["dtype"]),
        ("memory", count(memory, "B"), budget.why["memory"]),
        ("weights", count(budget.dense_bytes, "B"), "outside the routed experts"),
        ("expert slots", f"{budget.slots} of {spec.total_experts}", budget.why["slots"]),
        ("KV cache", f"{budget.kv_tokens:,} tokens", budget.why["kv_tokens"]),
        ("prefill chunk", f"{budget.chunk_tokens:,} tokens", budget.why["chunk_tokens"]),
    ]
    if predictor_bytes:
        choices.insert(4, ("predictor", count(predictor_bytes, "B"), "--predictor, or the plan's"))
    if budget.found.others and not every:
        choices.append(_reads_row(spec, budget.found, machine.curve))
    form = chosen.get("pool") or "one"
    shape = "" if form == "one" else f", {POOL_FORMS.get(form, form)}"
    choices.append(("policy", policy + shape, why.get("policy", "as set")))
    if chosen.get("host_memory_bytes"):
        choices.append(("host memory", count(chosen["host_memory_bytes"], "B"), why["host_memory_bytes"]))
    return ServeSetup(
        options=parse(ServeOptions, chosen, "--set"), budget=budget, policy=policy, choices=tuple(choices)
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
        chosen["device"] = available_device()
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
