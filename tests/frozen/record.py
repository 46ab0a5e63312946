"""Recorded hashes: for which machine they hold, and which have changed."""

import hashlib
import json
import platform
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

Kinds = Mapping[str, str]
"""From a kind (`logits`, `tokens`, `decisions`, ...) to its value: a digest, or a short text."""
_LIBRARIES = ("torch", "transformers", "numpy", "numba", "llvmlite", "gguf", "compressed-tensors")


def digest(*values: Any) -> str:
    """32 hexadecimal digits over tensors, with their type and shape, and over values of JSON."""
    made = hashlib.sha256()
    for value in values:
        if isinstance(value, torch.Tensor):
            made.update(f"{value.dtype} {tuple(value.shape)} ".encode())
            made.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        else:
            made.update(json.dumps(value, sort_keys=True).encode())
    return made.hexdigest()[:32]


def machine() -> dict[str, str]:
    """Everything outside the repository that bits depend on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    flags = " ".join(sorted(facts.get("flags", facts.get("Features", "")).split()))
    return {
        "processor": facts.get("model name", platform.processor() or platform.machine()),
        "features": digest(flags),
        "kernels": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        **{name: version(name) for name in _LIBRARIES},
    }


def commit() -> str:
    """The commit of the working tree; `+` after it if tracked files are modified."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout.strip()

    return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")


@dataclass(frozen=True, kw_only=True)
class Record:
    """Recorded cases.

    Attributes:
        commit: commit that they were made from.
        machine: see `machine`.
        cases: kinds by the case's name.
    """

    commit: str
    machine: dict[str, str]
    cases: dict[str, Kinds]

    @classmethod
    def load(cls, path: Path) -> "Record":
        return cls(**json.loads(path.read_text()))

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")


@dataclass(frozen=True)
class Change:
    """A kind of a case whose value is another now; None: there is none."""

    case: str
    kind: str
    before: str | None
    now: str | None


def changes(before: Mapping[str, Kinds], now: Mapping[str, Kinds]) -> list[Change]:
    """All changes, in the order of the cases."""
    found = []
    for case in {**before, **now}:
        old, new = before.get(case, {}), now.get(case, {})
        found += [Change(case, kind, old.get(kind), new.get(kind)) for kind in {**old, **new}]
    return [change for change in found if change.before != change.now]


def table(found: Iterable[Change], cases: Mapping[str, Kinds]) -> str:
    """Changes by group of cases and by kind, and below them each case."""
    listed = list(found)
    group = {name: name.split(" ", 1)[0] for name in [*cases, *(change.case for change in listed)]}
    sizes = Counter((group[name], kind) for name, kinds in cases.items() for kind in kinds)
    counts = Counter((group[change.case], change.kind) for change in listed)
    lines = [f"{'group':<12} {'kind':<12} {'changed':>8} {'of':>6}"]
    lines += [f"{at[0]:<12} {at[1]:<12} {count:>8} {sizes[at]:>6}" for at, count in sorted(counts.items())]
    by_case: dict[str, list[str]] = {}
    for change in listed:
        by_case.setdefault(change.case, []).append(_words(change))
    lines += ["", *(f"{case}: {', '.join(kinds)}" for case, kinds in by_case.items())]
    return "\n".join(lines)


def _words(change: Change) -> str:
    """The kind, and the values where they can be read."""
    if change.before is None or change.now is None:
        return f"{change.kind} {'new' if change.before is None else 'gone'}"
    if " " in change.before:
        return f"{change.kind} {change.before} -> {change.now}"
    return change.kind
