"""The machine that moetool runs on, as far as it matters for speed."""

import os
import platform
import re
import resource
from dataclasses import dataclass
from pathlib import Path

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a measurement depends on besides the model.

    Attributes:
        cpu: the processor's name.
        cores: processors that this process may use.
        memory_bytes: memory that this process may use in all, taken or free.
        amx: whether the processor has tiles for bfloat16 products.
        avx512_bf16: whether it has vector instructions for them.
        gpu: name of the first CUDA device; None without one.
        gpu_memory_bytes: its memory.
        system: operating system and its release.
        torch, transformers: their versions.
    """

    cpu: str
    cores: int
    memory_bytes: int
    amx: bool
    avx512_bf16: bool
    gpu: str | None
    gpu_memory_bytes: int
    system: str
    torch: str
    transformers: str


def read_machine() -> Machine:
    """The machine that this process runs on."""
    import torch
    import transformers

    cpuinfo = _text(Path("/proc/cpuinfo"))
    name = re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.M)
    flags = set(next(iter(re.findall(r"^flags\s*:\s*(.+)$", cpuinfo, re.M)), "").split())
    gpu = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    total, _ = memory_bytes()
    return Machine(
        cpu=name[1].strip() if name else platform.processor() or platform.machine(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=total,
        amx={"amx_tile", "amx_bf16"} <= flags,
        avx512_bf16="avx512_bf16" in flags,
        gpu=gpu.name if gpu else None,
        gpu_memory_bytes=gpu.total_memory if gpu else 0,
        system=f"{platform.system()} {platform.release()}",
        torch=torch.__version__,
        transformers=transformers.__version__,
    )


def memory_bytes() -> tuple[int, int]:
    """Memory that this process may use, and how much of it is free: of the machine, its container or its own limit."""
    rows = dict(re.findall(r"^(\w+):\s+(\d+) kB$", _text(Path("/proc/meminfo")), re.M))
    total, free = (int(rows.get(name, 0)) * 1024 for name in ("MemTotal", "MemAvailable"))
    for file in _CGROUP_LIMITS:
        text = _text(Path(file)).strip()
        if text.isdigit() and int(text) < total:
            total, free = int(text), min(free, int(text))
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]  # ulimit -v
    if limit != resource.RLIM_INFINITY and limit < total:
        used = dict(re.findall(r"^(\w+):\s+(\d+) kB$", _text(Path("/proc/self/status")), re.M)).get("VmSize", 0)
        total, free = limit, min(free, max(0, limit - int(used) * 1024))
    return total, free


def load_average() -> float:
    """Processes that ran or waited to run over the last minute; 0 where the system does not say."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


def _text(file: Path) -> str:
    """What a file of the system says; nothing where there is no such file."""
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
