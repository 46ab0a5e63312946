"""FLAME-MoE's routes of one checkpoint: a folder with a folder for each layer, named by its number, of `.pt` files.

Each file is one tensor [T, E] of a run's tokens: the router's probabilities, 0 except for the chosen experts. Files of
the same name belong to the same tokens. Their ids are in `samples/NAME.pt`, beside the folder `actives` that holds the
checkpoints, and are read if present. Megatron counts layers from 1. Source: `scripts/empirical_analysis` and `analysis`
of github.com/cmu-flame/FLAME-MoE.
"""

from pathlib import Path
from typing import Any

import numpy as np

from moetool.base.errors import MismatchError
from moetool.trace.foreign import array_file
from moetool.trace.foreign.array_routes import routes
from moetool.trace.foreign.file_sample import FileSample
from moetool.trace.foreign.model_facts import ModelFacts
from moetool.trace.foreign.routes import Routes, RouteSequence
from moetool.trace.formats.router_logits import chosen

READS_FOLDERS = True


def recognize(sample: FileSample) -> str | None:
    """Recognize a folder of numbered folders of `.pt` files."""
    layers = _layers(sample.path) if sample.path.is_dir() else {}
    return "a folder with .pt files of each layer" if layers and all(layers.values()) else None


def _layers(path: Path) -> dict[int, list[Path]]:
    found = {int(one.name): sorted(one.glob("*.pt")) for one in path.iterdir() if one.is_dir() and one.name.isdigit()}
    return dict(sorted(found.items()))


def read_routes(path: Path, facts: ModelFacts) -> Routes:
    """Read and check all files; each name is a sequence.

    Raises:
        MismatchError: a layer lacks a file, or its tensor has another shape or is damaged.
        UsageError: top-k is neither in the files nor given.
    """
    layers = _layers(path)
    if not layers or not all(layers.values()):
        raise MismatchError(f"{path} has no numbered folders of .pt files, expected one for each layer")
    if min(layers) < 1:
        raise MismatchError(f"{path} has a layer {min(layers)}, expected Megatron's numbers from 1")
    names = sorted({file.name for files in layers.values() for file in files})
    sequences: list[RouteSequence] = []
    made: Routes | None = None
    for name in names:
        parts = [_tensor(path / str(layer) / name) for layer in layers]
        if len(shapes := {part.shape for part in parts}) > 1:
            raise MismatchError(f"{path} has {name} of {sorted(shapes)[:3]}, expected one shape for all layers")
        values = np.stack(parts, axis=1)[None].astype(np.float32)
        arrays, more = chosen(path, values, tuple(layer - 1 for layer in layers), None, facts)
        samples = path.parent.parent / "samples" / name
        pack: dict[str, Any] = {"input_ids": _ids(samples)} if samples.is_file() else {}
        read = routes(path / name, pack, arrays, facts, more)
        if made is not None and read.spec.top_k_L != made.spec.top_k_L:
            raise MismatchError(f"{path} has {name} with another top-k than {names[0]}, expected the same")
        made = made or read
        sequences += [
            RouteSequence(
                name=Path(name).stem,
                prompt_tokens=None,
                **{
                    field: getattr(one, field)
                    for field in ("experts_TS", "weights_TS", "logits_TF", "token_id_T", "position_T")
                },
            )
            for one in read.sequences
        ]
    assert made is not None
    return Routes(
        spec=made.spec,
        task=path.name,
        sequences=sequences,
        notes=[
            *made.notes,
            f"layers {min(layers)} to {max(layers)} of the files count from 1; the trace counts from 0",
        ],
    )


def _tensor(file: Path) -> np.ndarray:
    if not file.is_file():
        raise MismatchError(f"{file} is missing, expected a file of that name in each layer; download it again")
    found = array_file.load(file).get(array_file.BARE)
    if not isinstance(found, np.ndarray) or found.ndim != 2 or found.dtype.kind != "f":
        raise MismatchError(f"{file} is not a tensor of floats (tokens, experts), expected one")
    return found


def _ids(file: Path) -> np.ndarray:
    found = array_file.load(file).get(array_file.BARE)
    if not isinstance(found, np.ndarray) or found.dtype.kind not in "iu":
        raise MismatchError(f"{file} is not a tensor of token ids, expected one")
    return found
