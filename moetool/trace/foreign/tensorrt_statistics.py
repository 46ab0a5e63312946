"""Common parts of TensorRT-LLM's expert statistics: a directory with `meta_info.json` and files by rank.

    meta_info.json              {"num_experts", "num_experts_per_token"}
    rank{r}.safetensors         "{iter}_{layer}": tokens that used each expert, [E]
    rank{r}_raw.safetensors     "{iter}_{layer}": the experts of each token, [T, K]

Made with EXPERT_STATISTIC_ITER_RANGE and EXPERT_STATISTIC_PATH. Layers are absolute, and only those with experts occur.
Experts are logical.
"""

import json
import re
from pathlib import Path

import numpy as np

from moetool.base.errors import MismatchError, UsageError, first_line

META = "meta_info.json"
_KEY = re.compile(r"(\d{1,9})_(\d{1,6})")


def recognized(path: Path, raw: bool) -> str | None:
    """Return the reason if a folder holds such statistics (`raw`: those of tokens)."""
    if not (path / META).is_file():
        return None
    files = [file.name for file in path.glob("rank*.safetensors") if file.stem.endswith("_raw") == raw]
    return f"a directory with {META} and {min(files)}" if files else None


def read_meta(folder: Path) -> tuple[int, int]:
    """Return num_experts and num_experts_per_token.

    Raises:
        UsageError: the path is not a folder.
        MismatchError: meta_info.json is missing or invalid.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a directory, expected that of EXPERT_STATISTIC_PATH")
    try:
        meta = json.loads((folder / META).read_text(encoding="utf-8"))
        values = [meta["num_experts"], meta["num_experts_per_token"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise MismatchError(f"{folder / META} is missing or damaged ({first_line(error)}); record again") from None
    if any(type(value) is not int for value in values) or not 1 <= values[1] <= values[0]:
        raise MismatchError(f"{folder / META} has {values[1]} of {values[0]} experts per token, expected fewer")
    return values[0], values[1]


def read_ranks(folder: Path, raw: bool) -> dict[int, dict[tuple[int, int], np.ndarray]]:
    """Return the arrays of each rank by (iteration, layer).

    Raises:
        MismatchError: a file is damaged, there are none, a key is invalid, or an iteration lacks layers.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    ending = "_raw" if raw else ""
    ranks: dict[int, dict[tuple[int, int], np.ndarray]] = {}
    for file in sorted(folder.glob(f"rank*{ending}.safetensors")):
        if (match := re.fullmatch(rf"rank(\d{{1,6}}){ending}\.safetensors", file.name)) is None:
            continue
        try:
            tensors = load_file(file)
        except (SafetensorError, OSError, ValueError, TypeError) as error:
            raise MismatchError(
                f"{file} is not a complete safetensors file ({first_line(error)}); record again"
            ) from None
        arrays = {}
        for key, array in tensors.items():
            if (parts := _KEY.fullmatch(key)) is None or array.dtype.kind not in "iu":
                raise MismatchError(f"{file} has {array.dtype} {key!r}, expected whole numbers ITERATION_LAYER")
            arrays[int(parts[1]), int(parts[2])] = array.astype(np.int64)
        ranks[int(match[1])] = arrays
    if not any(ranks.values()):
        kind = f"rank*{ending}.safetensors"
        raise MismatchError(
            f"{folder} has no {kind} with tokens, expected one per rank; record with {'a newer ' * raw}TensorRT-LLM"
        )
    for rank, arrays in ranks.items():
        iterations, layers = ({key[i] for key in arrays} for i in (0, 1))
        if len(arrays) != len(iterations) * len(layers):
            raise MismatchError(f"{folder}, rank {rank}: some iterations lack layers; the recording was cut off")
    return ranks


def write_meta(folder: Path, num_experts: int, top_k: int) -> None:
    """Write meta_info.json."""
    meta = {"num_experts": num_experts, "num_experts_per_token": top_k}
    (folder / META).write_text(json.dumps(meta), encoding="utf-8")


def write_counts(folder: Path, counts_WLE: np.ndarray, layers: tuple[int, ...]) -> None:
    """Write counts to rank0.safetensors, with iterations from 0."""
    from safetensors.numpy import save_file

    arrays = {
        f"{w}_{layer}": np.ascontiguousarray(counts_WLE[w, i], np.int64)
        for w in range(len(counts_WLE))
        for i, layer in enumerate(layers)
    }
    save_file(arrays, folder / "rank0.safetensors")
