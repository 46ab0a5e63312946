"""colibri's `.coli_usage`: selections of each expert, over the life of the file.

    -1 <layers> <experts>          the model's layers; MoE layers and that of a draft head are numbered up to this
    -2 <version> <engine>          version 1; the engine's name as a 32-bit FNV-1a hash
    <layer> <expert> <count>       for counts above 0

Older files have no header lines. The engine inkling has a binary layout: "IKU1", uint32 layers and experts, then uint32
counts [layers, experts]. Counts may have decayed (`COLI_USAGE_DECAY`).

Source: github.com/JustVugg/colibri, c/route_trace.h.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from moetool.base.errors import MismatchError
from moetool.trace.expert_counts import Counted
from moetool.trace.foreign.file_sample import FileSample
from moetool.trace.foreign.model_facts import ModelFacts

_VERSION = 1
_INKLING = b"IKU1"
_ENGINES = ("glm_moe_dsa", "inkling", "olmoe", "kimi_k3")
_MOST_LAYERS = 10_000


def recognize(sample: FileSample) -> str | None:
    """Recognize the header lines, the binary mark, or the file's name."""
    if sample.head.startswith(_INKLING):
        return "it begins with IKU1"
    triples = [line.split() for line in sample.lines]
    if not triples or not all(len(t) == 3 and all(n.removeprefix("-").isdigit() for n in t) for t in triples):
        return None
    if triples[0][0] == "-1":
        return "it begins with the header line -1 <layers> <experts>"
    return "lines of <layer> <expert> <count>" if triples[0][0].isdigit() else None


def read_counts(paths: Sequence[Path], facts: ModelFacts) -> Counted:
    """Return the counts of each file as a pass.

    Raises:
        MismatchError: a file is damaged, of a later version, or the files are of different models.
        UsageError: top-k or the bytes of an expert are not given.
    """
    notes: list[str] = []
    found = [_read(path, notes) for path in paths]
    shapes = {shape for shape, _ in found if shape is not None}
    if len(shapes) > 1:
        raise MismatchError(f"{', '.join(map(str, paths))} have {sorted(shapes)} (layers, experts), expected one model")
    num_experts = shapes.pop()[1] if shapes else None
    if num_experts is None:
        num_experts = facts.said(paths[0], "num_experts", "top_k")
    rows = np.concatenate([triples for _, triples in found])
    limit = facts.num_hidden_layers
    if limit is not None and (rows[:, 0] >= limit).any():
        notes.append(f"layers from {limit} on belong to a draft head and are left out")
    layers = np.unique(rows[:, 0] if limit is None else rows[rows[:, 0] < limit, 0])
    if (high := rows[:, 1].max()) >= num_experts:
        raise MismatchError(f"{paths[0]} counts expert {high}, expected 0 to {num_experts - 1}; is it of this model?")
    spec = facts.spec_of(paths[0], layers=layers.tolist(), num_experts=num_experts)
    counts_WLE = np.zeros((len(paths), len(layers), num_experts), np.int64)
    for w, (_, triples) in enumerate(found):
        known = triples[np.isin(triples[:, 0], layers)]
        np.add.at(counts_WLE[w], (np.searchsorted(layers, known[:, 0]), known[:, 1]), known[:, 2])
    sums_L = counts_WLE.sum(axis=(0, 2))
    if (sums_L != sums_L[0]).any():
        notes.append(
            f"layers have {sums_L.min():,} to {sums_L.max():,} selections: decayed counts are rounded, and draft heads "
            f"run less often"
        )
    return Counted(spec=spec, counts_WLE=counts_WLE, notes=notes)


def _read(path: Path, notes: list[str]) -> tuple[tuple[int, int] | None, np.ndarray]:
    """Return (layers, experts), if the file has them, and its triples, int64 [N, 3]."""
    data = path.read_bytes()
    if data.startswith(_INKLING):
        return _read_inkling(path, data)
    try:
        lines = [line.split() for line in data.decode("ascii").splitlines() if line.strip()]
        if any(len(line) != 3 for line in lines):
            raise MismatchError(f"{path} has lines that are not <layer> <expert> <count>; it is cut off or damaged")
        triples = np.array([[int(number) for number in line] for line in lines], np.int64)
    except (UnicodeDecodeError, ValueError, OverflowError):
        triples = np.zeros((0, 0), np.int64)
    if not len(triples):
        raise MismatchError(f"{path} has no lines of <layer> <expert> <count>; it is empty or not a .coli_usage file")
    shape = None
    for kind, first, second in triples[triples[:, 0] < 0].tolist():
        if kind == -1:
            shape = (first, second)
        elif kind == -2 and first > _VERSION:
            raise MismatchError(f"{path} is of version {first}, expected {_VERSION}; update moetool")
        elif kind == -2:
            name = next((one for one in _ENGINES if _fnv1a(one) == second), "an engine not known here")
            notes.append(f"{path.name} was written by {name}")
    counts = triples[triples[:, 0] >= 0]
    if shape is None:
        notes.append(f"{path.name} has no header: its shape is as given, and its engine is unknown")
    elif not 0 < shape[0] <= _MOST_LAYERS or shape[1] < 1 or (counts[:, 0] > shape[0]).any():
        raise MismatchError(
            f"{path} says {shape} (layers, experts) and counts layer {counts[:, 0].max()}; it is damaged"
        )
    if not len(counts):
        raise MismatchError(f"{path} counts nothing, expected some selections; run the engine first")
    if (counts[:, 1:] < 0).any() or len(np.unique(counts[:, :2], axis=0)) < len(counts):
        raise MismatchError(f"{path} has numbers below 0 or an expert twice; it is damaged")
    return shape, counts


def _read_inkling(path: Path, data: bytes) -> tuple[tuple[int, int], np.ndarray]:
    layers, experts = np.frombuffer(data[4:12].ljust(8, b"\0"), "<u4").tolist()
    if not 0 < layers <= _MOST_LAYERS or not experts or len(data) != 12 + 4 * layers * experts:
        raise MismatchError(
            f"{path} has {len(data):,} bytes, expected {12 + 4 * layers * experts:,} for {layers} layers of {experts} "
            f"experts; it is cut off or damaged"
        )
    counts_LE = np.frombuffer(data, "<u4", offset=12).reshape(layers, experts)
    where = np.argwhere(counts_LE)
    if not len(where):
        raise MismatchError(f"{path} counts nothing, expected some selections; run the engine first")
    return (layers, experts), np.column_stack([where, counts_LE[counts_LE > 0]]).astype(np.int64)


def _fnv1a(text: str) -> int:
    found = 2166136261
    for byte in text.encode():
        found = (found ^ byte) * 16777619 % 2**32
    return found


def write_counts(counted: Counted, out: Path, num_hidden_layers: int | None = None) -> list[str]:
    """Write the sum of all passes, without the header, so that any of colibri's engines reads it."""
    counts_LE = counted.counts_WLE.sum(axis=0)
    with out.open("w", encoding="ascii", newline="\n") as file:
        for place, layer in enumerate(counted.spec.layer_ids_L):
            for expert in np.flatnonzero(counts_LE[place]).tolist():
                file.write(f"{layer} {expert} {min(int(counts_LE[place, expert]), 2**32 - 1)}\n")
    return ["all passes are summed; without a header colibri cannot check the model: start it with PIN=FILE"]
