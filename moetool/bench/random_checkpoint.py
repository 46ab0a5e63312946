"""A checkpoint of a real shape with random weights: real bytes to read, without a download.

Values do not change the time of a read or a product, so a few layers of a shape stand for the model's own. Files have
the family's layout: each expert's matrices contiguous, one file per layer.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moetool.base import durable
from moetool.base.errors import CapacityError, MoetoolError, UsageError
from moetool.base.types import ModelSpec
from moetool.models.checkpoint import Checkpoint
from moetool.models.transformers_internals import weight_loading

MARKER = "random.json"
_SCHEMA = 1
_INDEX = "model.safetensors.index.json"
_PER_LAYER = ("layer_types", "mlp_layer_types")
_CHUNK = 2**22  # numbers generated and written at a time
_SIGN_AND_FRACTION, _EXPONENT = 0x807F, 0x3C80  # bfloat16 between 2^-6 and 2^-5, of either sign
_ONE = 0x3F80


def cut_config(shape: str, layers: int | None) -> dict[str, Any]:
    """The config.json of a shape reduced to this number of MoE layers, with the dense ones before them.

    Args:
        shape: argument of `moetool.models.files.location.locate_config`.
        layers: None: all.

    Raises:
        UsageError: the shape does not exist, or has fewer MoE layers.
    """
    checkpoint = Checkpoint.open(shape, weights=False)
    raw = dict(checkpoint.raw)
    found = [layer.layer_id for layer in checkpoint.layers]
    if layers is None:
        layers = len(found)
    if not 1 <= layers <= len(found):
        raise UsageError(f"--layers {layers} of {shape}, which has {len(found)} MoE layers; give 1 to {len(found)}")
    if "num_hidden_layers" not in raw:
        raise UsageError(f"the config of {shape} has no num_hidden_layers to reduce; give a text model's config")
    kept = found[layers - 1] + 1
    raw["num_hidden_layers"] = kept
    for name in _PER_LAYER:
        if isinstance(raw.get(name), list):
            raw[name] = raw[name][:kept]
    raw["dtype"] = "bfloat16"
    raw.pop("torch_dtype", None)
    return raw


def cut_spec(shape: str, layers: int | None) -> ModelSpec:
    """The experts of `random_checkpoint` for the same arguments, without its weights. Raises: as `cut_config`."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(cut_config(shape, layers)), encoding="utf-8")
        return replace(Checkpoint(Path(folder), weights=False).spec, name=shape)


def random_checkpoint(shape: str, layers: int | None, work: Path, *, seed: int = 0) -> Path:
    """Write a checkpoint with this number of a shape's MoE layers (None: all), bfloat16, random by `seed`.

    Matrices hold values between 2^-6 and 2^-5 of either sign, vectors hold ones. There is no tokenizer.

    Args:
        work: folder that keeps it, for reuse with the same config and seed.

    Effects: writes it atomically, a file at a time with a few megabytes in memory; drops it from the page cache.

    Raises:
        UsageError: the shape does not exist, or has fewer MoE layers.
        CapacityError: the disk is too full.
    """
    config = cut_config(shape, layers)
    facts = {"schema_version": _SCHEMA, "seed": seed, "config": config}
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    name = Path(shape).resolve().parts[-1 if Path(shape).is_dir() else -2] if Path(shape).exists() else shape
    out = work / f"{name.replace('/', '--')}-{layers or 'all'}-{digest[:12]}"
    if (out / MARKER).is_file():
        return out
    work.mkdir(parents=True, exist_ok=True)
    with durable.staged_directory(out, overwrite=True, marker=MARKER) as staged:
        (staged / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        files = _files(staged)
        total = sum(_num_bytes(shape_) for tensors in files.values() for shape_ in tensors.values())
        free = shutil.disk_usage(work).free
        if free < total * 1.02 + 2**24:  # headers, and a reserve for other writers
            raise CapacityError(
                f"{layers or 'all'} MoE layers of {shape} take {total:,} bytes on disk and {work.resolve()} has "
                f"{free:,} free; give fewer --layers, or another directory with --work"
            )
        for number, (name, tensors) in enumerate(files.items()):
            write_tensors(staged / name, tensors, [seed, number])
        weight_map = {tensor: name for name, tensors in files.items() for tensor in tensors}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (staged / _INDEX).write_text(json.dumps(index), encoding="utf-8")
        (staged / MARKER).write_text(json.dumps(facts, indent=1), encoding="utf-8")
    return out


def _files(folder: Path) -> dict[str, dict[str, tuple[int, ...]]]:
    """The tensors of each file with their shapes, named as the family's own checkpoints name them."""
    checkpoint = Checkpoint(folder, weights=False)
    model, layers = checkpoint.empty_model(torch.bfloat16), checkpoint.layers
    try:
        tensors = weight_loading().revert_weight_conversion(model, model.state_dict())
    except (RuntimeError, ValueError, NotImplementedError) as error:
        raise MoetoolError(f"transformers cannot name the tensors of {type(model).__name__} ({error})") from None
    stem = layers[0].path[: layers[0].path.index(f".{layers[0].layer_id}.") + 1]
    groups: dict[str, dict[str, tuple[int, ...]]] = defaultdict(dict)
    for name in sorted(tensors):
        number = name.removeprefix(stem).partition(".")[0] if name.startswith(stem) else ""
        file = f"layer-{int(number):03d}" if number.isdecimal() else "rest"
        groups[f"model-{file}.safetensors"][name] = tuple(tensors[name].shape)
    return dict(sorted(groups.items()))


def _num_bytes(shape: tuple[int, ...]) -> int:
    return 2 * int(np.prod(shape, dtype=np.int64))


def write_tensors(file: Path, tensors: dict[str, tuple[int, ...]], seed: list[int]) -> None:
    """Write one safetensors file, with tensors in the order of their names."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in tensors.items():
        begin, end = end, end + _num_bytes(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    generator = np.random.PCG64(seed)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for shape in tensors.values():
            left = _num_bytes(shape) // 2
            while left:
                count = min(left, _CHUNK)
                if len(shape) < 2:
                    values = np.full(count, _ONE, np.uint16)
                else:
                    values = generator.random_raw(-(-count // 4)).view(np.uint16)[:count]
                    values &= _SIGN_AND_FRACTION
                    values |= _EXPONENT
                stream.write(values.astype("<u2", copy=False).data)
                left -= count
        stream.flush()
        os.fsync(stream.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
