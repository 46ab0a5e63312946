"""Checks of this machine for `moetool doctor`."""

import importlib.metadata
import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moetool.base.errors import MoetoolError
from moetool.base.machine import Machine, load_average, memory_bytes
from moetool.base.tables import count
from moetool.measuring.probes.disk import DiskProbe, scratch_shards
from moetool.measuring.probes.expert_compute import bfloat16_gain
from moetool.models.libraries import read_machine

_READ_BYTES = 8 * 2**20
_READS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineCheck:
    """One check: its name, the value found, and its meaning for moetool.

    Attributes:
        data: numbers behind `value`.
    """

    name: str
    value: str
    meaning: str
    data: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "value": self.value, "meaning": self.meaning, **self.data}


def doctor(folder: Path = Path(), file_bytes: int = 128 * 10**6) -> list[MachineCheck]:
    """Check the machine, and measure its compute and the disk of `folder`.

    Args:
        file_bytes: size of the file that is written and read back.

    Effects: takes a few seconds; removes the file.
    """
    machine = read_machine()
    checks: list[Callable[[], MachineCheck | tuple[MachineCheck, ...]]] = [
        lambda: _cpu(machine),
        lambda: _memory(),
        lambda: bfloat16_units(machine),
        lambda: _bfloat16_gain(),
        lambda: _disk(folder, file_bytes),
        lambda: gpu(machine),
        lambda: _pinned(machine),
        lambda: _ray(),
        lambda: libraries(machine),
    ]
    findings: list[MachineCheck] = []
    for check in checks:
        found = check()
        findings += found if isinstance(found, tuple) else (found,)
    return findings


def _cpu(machine: Machine) -> MachineCheck:
    threads = torch.get_num_threads()
    load = load_average()
    busy = load > machine.cores / 2
    return MachineCheck(
        name="processor",
        value=f"{machine.cpu}, {machine.cores} cores",
        meaning=f"compute uses {threads} thread{'s' if threads > 1 else ''}"
        + (f"; the machine is busy (load {load:.1f}), measure again when it is idle" if busy else ""),
        data={"cpu": machine.cpu, "cores": machine.cores, "threads": threads, "load_average": load},
    )


def _memory() -> MachineCheck:
    total, free = memory_bytes()
    return MachineCheck(
        name="memory",
        value=f"{count(free, 'B')} free of {count(total, 'B')}",
        meaning="dense weights, KV cache and expert slots share the free memory: see --device-memory",
        data={"free_bytes": free, "total_bytes": total},
    )


def bfloat16_units(machine: Machine) -> MachineCheck:
    units = [name for name, there in (("AMX", machine.amx), ("AVX512-BF16", machine.avx512_bf16)) if there]
    means = {
        "AMX": "prompts run several times as fast in bfloat16",
        "AVX512-BF16": "prompts run faster in bfloat16",
        "": "products of bfloat16 are computed in float32; a checkpoint in bfloat16 still moves half the bytes",
    }
    return MachineCheck(
        name="bfloat16 units",
        value=" and ".join(units) or "none",
        meaning=means[units[0] if units else ""],
        data={"amx": machine.amx, "avx512_bf16": machine.avx512_bf16},
    )


def _bfloat16_gain() -> MachineCheck:
    decode, prompt = bfloat16_gain(1), bfloat16_gain(64)
    better = "bfloat16" if decode * prompt > 1 else "float32"
    return MachineCheck(
        name="bfloat16 / float32",
        value=f"{decode:.2g} times as fast for 1 token, {prompt:.2g} for 64",
        meaning=f"use --dtype {better} where a command has it, and --set dtype={better} to serve",
        data={"gain_1_token": decode, "gain_64_tokens": prompt, "better": better},
    )


def _disk(folder: Path, file_bytes: int) -> tuple[MachineCheck, ...]:
    names = ("O_DIRECT", "disk reads")
    try:
        with scratch_shards(folder, file_bytes) as shards:
            rates = {threads: _read_rate(shards, threads, min(_READ_BYTES, file_bytes // 2)) for threads in (1, 4)}
            direct = shards.direct
    except (OSError, MoetoolError) as error:
        unknown = "cannot be tested in this directory; run it where the model will be stored"
        return tuple(MachineCheck(name=name, value=f"unknown ({error})", meaning=unknown, data={}) for name in names)
    return (
        MachineCheck(
            name=names[0],
            value="works in this folder" if direct else "refused in this folder",
            meaning="experts are read with direct I/O: memory use and timings exclude the page cache"
            if direct
            else "experts are read through the page cache, which takes memory and shortens timings",
            data={"direct": direct},
        ),
        MachineCheck(
            name=names[1],
            value=f"{count(rates[1], 'B')}/s on 1 thread, {count(rates[4], 'B')}/s on 4",
            meaning=f"an expert of 10 MB that is not in memory costs about {10**7 / rates[1] * 1e3:,.1f} ms",
            data={"bytes_per_s_1_thread": rates[1], "bytes_per_s_4_threads": rates[4]},
        ),
    )


def _read_rate(shards: Any, threads: int, num_bytes: int) -> float:
    probe = DiskProbe(shards, num_bytes, threads)
    try:
        probe.seconds(num_bytes)
        return num_bytes / min(probe.seconds(num_bytes) for _ in range(_READS))
    finally:
        probe.close()


def gpu(machine: Machine) -> MachineCheck:
    if machine.gpu is None:
        built = torch.version.cuda is not None
        why = "torch sees no CUDA device" if built else f"this torch ({torch.__version__}) is built without CUDA"
        return MachineCheck(name="GPU", value="none", meaning=f"everything runs on the CPU: {why}", data={"gpu": None})
    driver = _driver()
    return MachineCheck(
        name="GPU",
        value=f"{machine.gpu}, {count(machine.gpu_memory_bytes, 'B')}, driver {driver}, CUDA {torch.version.cuda}",
        meaning="'moetool profile' measures it too",
        data={
            "gpu": machine.gpu,
            "memory_bytes": machine.gpu_memory_bytes,
            "driver": driver,
            "cuda": torch.version.cuda,
        },
    )


def _driver() -> str:
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return "unknown"
    match = re.search(r"Kernel Module(?: for \S+)?\s+(\S+)", text)
    return match[1] if match else "unknown"


def _pinned(machine: Machine) -> MachineCheck:
    if machine.gpu is None:
        return MachineCheck(
            name="pinned memory", value="none", meaning="only copies to a GPU need it", data={"pinned": False}
        )
    try:
        torch.empty(2**26, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        meaning = f"copies to the GPU are slower and block: {str(error).splitlines()[0]}"
        return MachineCheck(name="pinned memory", value="refused", meaning=meaning, data={"pinned": False})
    return MachineCheck(
        name="pinned memory", value="works", meaning="copies to the GPU overlap with compute", data={"pinned": True}
    )


def _ray() -> MachineCheck:
    there = importlib.util.find_spec("ray") is not None
    version = importlib.metadata.version("ray") if there else None
    return MachineCheck(
        name="ray",
        value=version or "not installed",
        meaning="clusters of several hosts are possible"
        if there
        else "for clusters of several hosts: pip install 'moetool[cluster]'",
        data={"ray": version},
    )


def libraries(machine: Machine) -> MachineCheck:
    from packaging.requirements import Requirement

    versions = {"torch": machine.torch, "transformers": machine.transformers}
    try:
        requirements = [Requirement(text) for text in importlib.metadata.requires("moetool") or ()]
    except importlib.metadata.PackageNotFoundError:
        requirements = []
    ranges = {r.name: r.specifier for r in requirements if r.name in versions and not r.marker}
    outside = [
        f"{name} {version} is outside the tested {ranges[name]}"
        for name, version in versions.items()
        if name in ranges and not ranges[name].contains(version.partition("+")[0], prereleases=True)
    ]
    tested = "in the tested range" if len(ranges) == len(versions) else "tested range unknown: moetool is not installed"
    return MachineCheck(
        name="libraries",
        value=", ".join(f"{name} {version}" for name, version in versions.items()),
        meaning="; ".join(outside) or tested,
        data={**versions, "in_tested_range": not outside if ranges else None},
    )
