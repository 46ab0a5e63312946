"""llama.cpp's importance matrix, which counts the tokens of each expert during calibration.

GGUF: each tensor `blk.N.ffn_gate_exps.weight` (and `up`, `down`, or `gate_up`) of a MoE layer has `.counts` [E, 1]
float32 next to `.in_sum2`. The dense tensors of a layer have one count, that of all tokens, from which top-k follows.

The older `.dat` layout has the name, a number of calls and mean squares of each tensor, but no counts of experts. It is
refused, as is its conversion to GGUF by llama-imatrix, which has one count for all experts.

Source: github.com/ggml-org/llama.cpp, tools/imatrix/imatrix.cpp and common/imatrix-loader.cpp.
"""

import re
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moetool.base.errors import MismatchError, first_line
from moetool.trace.expert_counts import Counted
from moetool.trace.foreign.file_sample import FileSample
from moetool.trace.foreign.model_facts import ModelFacts

_EXPERTS = re.compile(r"blk\.(\d+)\.ffn_(gate_up|gate|up|down)_exps\.weight\.counts")
_DENSE = re.compile(r"blk\.(\d+)\..*\.weight\.counts")
_AGAIN = "run llama-imatrix again with --output-format gguf"
_LONGEST_NAME = 256
_EXACT_FLOAT32 = 1 << 24


def recognize(sample: FileSample) -> str | None:
    """Recognize a GGUF file of the type imatrix, or the older layout's beginning."""
    if sample.head.startswith(b"GGUF"):
        return "a GGUF file with the type imatrix" if b"imatrix" in sample.head else None
    return "it begins as llama.cpp's older imatrix .dat does" if _dat_entry(sample.head) else None


def read_counts(paths: Sequence[Path], facts: ModelFacts) -> Counted:
    """Return the counts of each file as a pass.

    Raises:
        MismatchError: a file is damaged, of the layout without counts, or the files are of different models.
        UsageError: the bytes of an expert are not given, or top-k where the file has no dense layer.
    """
    notes: list[str] = []
    found = [_read(path, notes) for path in paths]
    layers, num_experts, top_k = found[0].layers, found[0].counts_LE.shape[1], found[0].top_k
    for path, one in zip(paths, found, strict=True):
        if one.layers != layers or one.counts_LE.shape[1] != num_experts:
            raise MismatchError(f"{path} has other layers or experts than {paths[0]}; import them one by one")
    spec = facts.spec_of(
        paths[0], layers=layers, num_experts=num_experts, top_k_L=None if top_k is None else [top_k] * len(layers)
    )
    return Counted(spec=spec, counts_WLE=np.stack([one.counts_LE for one in found]), notes=notes)


class _Matrix:
    """Expert counts of one file."""

    def __init__(self, path: Path, counts: dict[str, np.ndarray], notes: list[str]) -> None:
        experts: dict[int, dict[str, np.ndarray]] = {}
        dense: dict[int, int] = {}
        for name, values in counts.items():
            if match := _EXPERTS.fullmatch(name):
                experts.setdefault(int(match[1]), {})[match[2]] = values
            elif (match := _DENSE.fullmatch(name)) and len(values) == 1:
                dense[int(match[1])] = max(dense.get(int(match[1]), 0), int(values[0]))
        if not experts:
            raise MismatchError(f"{path} has no counts of experts (ffn_*_exps), expected some; is the model an MoE?")
        self.layers = sorted(experts)
        self.counts_LE = np.stack([self._of_layer(path, layer, experts[layer], notes) for layer in self.layers])
        # The last layer may have been computed for the last tokens only.
        shares = {
            float(self.counts_LE[place].sum()) / dense[layer]
            for place, layer in enumerate(self.layers[:-1] or self.layers)
            if dense.get(layer)
        }
        ratio = shares.pop() if len(shares) == 1 else 0.0
        self.top_k = int(ratio) if ratio >= 1 and ratio.is_integer() else None

    @staticmethod
    def _of_layer(path: Path, layer: int, found: dict[str, np.ndarray], notes: list[str]) -> np.ndarray:
        first, values = next(iter(sorted(found.items())))
        for name, others in found.items():
            if others.shape != values.shape:
                raise MismatchError(
                    f"{path}: layer {layer} has {len(values)} counts for {first} and {len(others)} for {name}, "
                    f"expected one for each expert"
                )
            if (others != values).any():
                notes.append(
                    f"{path.name}: layer {layer} has other counts for {name} than for {first}; {first} is used"
                )
        if len(values) < 2 or (values == values[0]).all():
            raise MismatchError(
                f"{path}: layer {layer} has the same count for all its {len(values)} experts, as a file converted from "
                f"the older .dat layout; {_AGAIN}"
            )
        return values


def _read(path: Path, notes: list[str]) -> _Matrix:
    with path.open("rb") as file:
        head = file.read(1 << 16)
    if not head.startswith(b"GGUF"):
        if name := _dat_entry(head):
            raise MismatchError(
                f"{path} is an imatrix of the older .dat layout (first tensor {name}), which does not count experts; "
                f"{_AGAIN}"
            )
        raise MismatchError(f"{path} is not a GGUF file, expected llama.cpp's imatrix; {_AGAIN}")
    from gguf import GGUFReader

    try:
        reader: Any = GGUFReader(path)
        kind = reader.fields["general.type"].contents() if "general.type" in reader.fields else None
        counts = {
            tensor.name: np.array(tensor.data, np.float64).reshape(-1)
            for tensor in reader.tensors
            if tensor.name.endswith(".counts")
        }
    except Exception as error:  # the reader raises many types on a damaged file
        raise MismatchError(f"{path} is not a complete GGUF file ({first_line(error)[:200]}); {_AGAIN}") from None
    if kind != "imatrix":
        raise MismatchError(
            f"{path} is a GGUF file of the type {kind!r}, expected an imatrix; give that of llama-imatrix"
        )
    for name, values in counts.items():
        if not np.isfinite(values).all() or (values < 0).any() or (values % 1).any():
            raise MismatchError(f"{path} has {name} that are not whole numbers from 0, expected counts; {_AGAIN}")
        if values.max(initial=0) >= _EXACT_FLOAT32:
            notes.append(f"{path.name}: counts from {_EXACT_FLOAT32:,} on are rounded, as float32 holds them")
    return _Matrix(path, {name: values.astype(np.int64) for name, values in counts.items()}, notes)


def _dat_entry(head: bytes) -> str | None:
    """Return the name of the first tensor of a `.dat` file, or None."""
    if len(head) < 16:
        return None
    entries, length = struct.unpack_from("<ii", head)
    if entries < 1 or not 0 < length <= _LONGEST_NAME or len(head) < 16 + length:
        return None
    name = head[8 : 8 + length]
    return name.decode() if re.fullmatch(rb"[\w.\-]+\.weight", name) else None
