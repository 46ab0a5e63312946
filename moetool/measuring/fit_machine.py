"""The machine of an estimate: this one, measured, or one by vendors' figures, with a user's sizes and rates."""

import contextlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from moetool.base.machine import memory_bytes
from moetool.base.tables import count
from moetool.costing.estimates import LINK_SHARE, LOAD_PASSES, MEMORY_SHARE, Rates, rates_of
from moetool.costing.machines import NamedMachine, read_named_machine
from moetool.measuring.machine_rates import Fact, disk_rates, measured_rates
from moetool.models.checkpoint import Checkpoint

SYSTEM_BYTES = 2_000_000_000
"""Host memory that the system of a named machine keeps (assumed)."""
_ASSUMED_GPU = "pc-rtx-3090-ddr4"


@dataclass(frozen=True, slots=True, kw_only=True)
class FitOptions:
    """A machine to fit a model to; what is not given is the named machine's, else this one's.

    Attributes:
        machine: name or TOML file of `moetool.costing.machines`.
        host_bytes: host memory for the process; without a GPU the limit of `moetool serve --process-memory`.
        gpu_bytes: memory of a GPU.
        disk_bytes_s: rate of reads from disk.
    """

    machine: str | None = None
    host_bytes: int | None = None
    gpu_bytes: int | None = None
    disk_bytes_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FitMachine:
    """A machine to serve on.

    Attributes:
        name: in words.
        rates: reached rates.
        host_bytes: host memory for the process; None: what is free here.
        gpu_bytes: memory of the GPU that the server may take; 0 without one.
        flags: flags of `moetool serve` that limit it so.
        facts: origin of each number.
    """

    name: str
    rates: Rates
    host_bytes: int | None
    gpu_bytes: int
    flags: str
    facts: tuple[Fact, ...]

    @property
    def has_gpu(self) -> bool:
        """Whether the model is computed on a GPU."""
        return self.rates.device == "cuda"

    @property
    def device_bytes(self) -> int | None:
        """Memory whose size decides how many experts have slots; None: what is free here."""
        return self.gpu_bytes if self.has_gpu else self.host_bytes


def fit_machine(options: FitOptions, checkpoint: Checkpoint | None = None) -> FitMachine:
    """Return the machine that the options describe.

    Args:
        checkpoint: model whose loads from disk are measured, if its weights are here.

    Effects: measures this machine for about a second, unless another one is named or a GPU is given that it lacks.

    Raises:
        UsageError: there is no such machine.
    """
    here = torch.cuda.is_available()
    if options.machine is not None:
        named, origin = read_named_machine(options.machine), options.machine.removesuffix(".toml")
        return _named(
            named, f"recipes/machines/{origin}.toml" if origin == options.machine else f"{origin}.toml", options
        )
    if options.gpu_bytes is not None and not here:
        return _with_assumed_gpu(options)
    with contextlib.ExitStack() as opened:
        files = None
        if not here and checkpoint is not None and checkpoint.weights:
            files = checkpoint.expert_files(fastest=checkpoint.expert_dtype)
            opened.callback(files.shards.close)
        rates, facts = measured_rates("cuda" if here else "cpu", Path(), options.disk_bytes_s, files)
    gpu_bytes = 0
    if here:
        gpu_bytes = options.gpu_bytes or torch.cuda.mem_get_info()[0]
    host_bytes = options.host_bytes
    if host_bytes is None and here:
        host_bytes = memory_bytes()[1]
    return FitMachine(
        name="this machine",
        rates=rates,
        host_bytes=host_bytes,
        gpu_bytes=gpu_bytes,
        flags=_flags(options, gpu=here),
        facts=facts,
    )


def _with_assumed_gpu(options: FitOptions) -> FitMachine:
    """This machine's memory and disk beside a GPU that it lacks."""
    disk_bytes_s, _, disk = disk_rates(Path(), options.disk_bytes_s)
    host_bytes = memory_bytes()[1] if options.host_bytes is None else options.host_bytes
    assumed = replace(read_named_machine(_ASSUMED_GPU), name="this machine with an assumed RTX 3090")
    known = replace(options, host_bytes=host_bytes, disk_bytes_s=disk_bytes_s)
    found = _named(assumed, f"assumed: recipes/machines/{_ASSUMED_GPU}.toml", known)
    facts = tuple((what, value, disk if what == "disk" else origin) for what, value, origin in found.facts)
    return replace(found, flags=_flags(options, gpu=True), facts=facts)


def _named(machine: NamedMachine, origin: str, options: FitOptions) -> FitMachine:
    """A named machine with the sizes and rates that the options give."""
    if options.gpu_bytes is not None:
        changes: dict[str, Any] = {"memory_bytes": float(options.gpu_bytes)}
        if not machine.gpus:
            gpu = read_named_machine(_ASSUMED_GPU)
            changes |= {name: getattr(gpu, name) for name in ("memory_bytes_s", "half_flops", "host_bytes_s")}
        machine = replace(machine, gpus=machine.gpus or 1, **changes)
    if options.disk_bytes_s is not None:
        machine = replace(machine, disk_bytes_s=options.disk_bytes_s)
    rates = rates_of(machine)
    share = f"{origin}, {100 * MEMORY_SHARE:.0f} % reached (assumed)"
    facts = [("memory bandwidth", f"{count(rates.memory_bytes_s, 'B')}/s in products of one token", share)]
    if rates.link_bytes_s:
        reached = f"{origin}, {100 * LINK_SHARE:.0f} % reached (assumed)"
        facts.append(("link to the GPU", f"{count(rates.link_bytes_s, 'B')}/s", reached))
    layer = "an H100" if machine.gpus else "a Xeon"
    facts.append(
        ("fixed time per layer", f"{rates.layer_s * 1e3:.2g} ms", f"measured on {layer} (moetool guide speed)")
    )
    disk = origin if machine.disk_bytes_s else "assumed"
    facts.append(("disk", f"{count(rates.disk_bytes_s, 'B')}/s", disk if options.disk_bytes_s is None else "as given"))
    if rates.load_bytes_s:
        loads = f"{LOAD_PASSES} passes over memory (assumed)"
        facts.append(("loads", f"{count(rates.load_bytes_s, 'B')} in a processor second", loads))
    host_bytes = options.host_bytes
    if host_bytes is None:
        host_bytes = max(0, int(machine.host_memory_bytes) - SYSTEM_BYTES)
        if machine.host_memory_bytes:
            facts.append(("system", count(SYSTEM_BYTES, "B"), "of the host memory, assumed to be taken"))
    return FitMachine(
        name=machine.name,
        rates=rates,
        host_bytes=host_bytes,
        gpu_bytes=int(machine.memory_bytes) if machine.gpus else 0,
        flags=_flags(options, gpu=bool(machine.gpus)),
        facts=tuple(facts),
    )


def _flags(options: FitOptions, *, gpu: bool) -> str:
    """Flags of `moetool serve` for the memory that the options give."""
    host = "" if options.host_bytes is None else f" --{'host' if gpu else 'process'}-memory {size(options.host_bytes)}"
    return (" --device cuda" if gpu and options.gpu_bytes else "") + host


def size(num_bytes: int) -> str:
    """A size as flags take it: `16GB`, `1500MB`."""
    return f"{num_bytes // 10**9}GB" if num_bytes % 10**9 == 0 else f"{num_bytes // 10**6}MB"
