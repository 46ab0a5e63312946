"""Facts about this machine that determine speed."""

import os
import re
import resource
from dataclasses import dataclass
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
_UNLIMITED = 1 << 60  # version 1 encodes "unlimited" as a number near 2**63


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Machine facts that a measurement depends on.

    Attributes:
        cpu: name of the processor.
        cores: processors that this process may use.
        memory_bytes: memory that this process may use, used or free.
        amx: whether the processor has tiles for bfloat16 products.
        avx512_bf16: whether it has bfloat16 vector instructions.
        gpu: name of the first CUDA device; None without one.
        gpu_memory_bytes: memory of that device.
        system: operating system and its release.
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


def memory_bytes() -> tuple[int, int]:
    """Return the memory that this process may use, and its free part.

    The limit is the least of machine, control groups of the process and address-space limit (`ulimit -v`).
    Page cache that the kernel can drop counts as free.
    """
    rows = dict(re.findall(r"^(\w+):\s+(\d+) kB$", read_text(Path("/proc/meminfo")), re.M))
    total, free = (int(rows.get(name, 0)) * 1024 for name in ("MemTotal", "MemAvailable"))
    for limit, used in cgroup_memory():
        if limit < total:
            total = limit
        free = min(free, max(0, limit - used))
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY and limit < total:
        size = dict(re.findall(r"^(\w+):\s+(\d+) kB$", read_text(Path("/proc/self/status")), re.M)).get("VmSize", 0)
        total, free = limit, min(free, max(0, limit - int(size) * 1024))
    return total, free


def cgroup_memory(root: Path = _CGROUPS, membership: Path = _MEMBERSHIP) -> list[tuple[int, int]]:
    """Return limit and used memory of each control group of this process that has a limit.

    Args:
        root: mount point of control groups.
        membership: file with the process's groups, of version 2 (`0::/path`) and 1 (`4:memory:/path`).

    Returns:
        (limit, used) in bytes, the innermost group first. `used` leaves out inactive file pages, which the kernel drops
        before it kills.
    """
    found = []
    for _, controllers, path in re.findall(r"^(\d+):([^:]*):(/.*)$", read_text(membership), re.M):
        if controllers == "":
            base, limit_file, used_file, inactive = root, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            base, inactive = root / "memory", "total_inactive_file"
            limit_file, used_file = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        group = base / path.lstrip("/")
        for folder in (group, *group.parents):
            limit = read_text(folder / limit_file).strip()
            if limit.isdigit() and int(limit) < _UNLIMITED:
                statistics = dict(re.findall(r"^(\w+) (\d+)$", read_text(folder / "memory.stat"), re.M))
                used = int(read_text(folder / used_file).strip() or 0) - int(statistics.get(inactive, 0))
                found.append((int(limit), max(0, used)))
            if folder == base:
                break
    return found


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes."""
    fields = read_text(Path("/proc/self/statm")).split()
    return int(fields[1]) * resource.getpagesize() if len(fields) > 1 else 0


def load_average() -> float:
    """Return the load average over the last minute; 0 where unknown."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


def read_text(file: Path) -> str:
    """Return the content of a system file; empty if there is none."""
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
