"""Versions of the libraries that run models, and facts about this machine that they know."""

import importlib.metadata
import os
import platform
import re
from pathlib import Path

import torch

from moetool.base.errors import UsageError
from moetool.base.machine import Machine, memory_bytes, read_text

OLDEST_TRANSFORMERS = (5, 21)
"""Oldest version in pyproject.toml. Earlier ones have other experts, routers and cache allocators."""


def read_machine() -> Machine:
    cpuinfo = read_text(Path("/proc/cpuinfo"))
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
        transformers=importlib.metadata.version("transformers"),
    )


def require_transformers() -> None:
    """Raises: UsageError where the installed transformers is too old."""
    found = importlib.metadata.version("transformers")
    numbers = tuple(int(number) for number in re.findall(r"\d+", found)[:2])
    if numbers < OLDEST_TRANSFORMERS:
        oldest = ".".join(map(str, OLDEST_TRANSFORMERS))
        raise UsageError(
            f"transformers {found} is too old: expected {oldest} or newer; "
            f"pip install --upgrade 'transformers>={oldest}'"
        )
