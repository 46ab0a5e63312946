"""Make a checkpoint with routed experts rounded to nearest in 4 bits: real bytes of a packed form, in seconds.

It replaces a replica where only bytes and times matter; `moetool.quantize` makes replicas with searched scales.
"""

import json
import shutil
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

from moetool import durable
from moetool.errors import CapacityError, UsageError
from moetool.models.checkpoint import Checkpoint
from moetool.models.packed import Scheme, quantization_config, round_weight, to_tensors

MARKER = "rounded.json"
_INDEX = "model.safetensors.index.json"
_OTHERS = r"re:^(?!.*\.experts\.\d+\.)"  # all but routed experts


def rounded_checkpoint(checkpoint: Checkpoint, scheme: Scheme) -> Path:
    """Write a checkpoint with packed experts next to the original; all other weights are unchanged.

    A folder of an earlier call is reused by name, which `checkpoint`'s name should make unique
    (`random_checkpoint`).

    Effects: writes it atomically, with one file's tensors in memory at a time.

    Raises:
        UsageError: experts are not stored one by one, or groups do not divide their widths.
        CapacityError: the disk has no room for it.
    """
    path = checkpoint.path
    out = path.with_name(f"{path.name}-int{scheme.bits}-{scheme.group}")
    if (out / MARKER).is_file():
        return out
    _require_room(out.parent, checkpoint.index.num_bytes, scheme)
    weight_map: dict[str, str] = {}
    with durable.staged_directory(out, overwrite=True, marker=MARKER) as staged:
        for file in checkpoint.index.files:
            tensors = {}
            with safe_open(file, "pt") as stored:
                for name in stored.keys():  # noqa: SIM118
                    weight = stored.get_tensor(name)
                    if ".experts." not in name or weight.dim() < 2:
                        tensors[name] = weight
                        continue
                    _require_layout(path, name, tuple(weight.shape), scheme)
                    tensors |= to_tensors(name, round_weight(weight, scheme, weight.dtype), scheme.bits)
            save_file(tensors, staged / file.name, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(tensors, file.name)
        size = sum(file.stat().st_size for file in staged.iterdir())
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        (staged / _INDEX).write_text(json.dumps(index), encoding="utf-8")
        config = {**checkpoint.raw, "quantization_config": quantization_config(scheme, [_OTHERS])}
        (staged / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
        (staged / MARKER).write_text(json.dumps({"of": path.name}), encoding="utf-8")
    return out


def _require_room(folder: Path, size: int, scheme: Scheme) -> None:
    needed = size * (scheme.bits + 16 // scheme.group + 1) // 16 + 2**24  # as if all were packed, from 16 bits
    if (free := shutil.disk_usage(folder).free) < needed:
        raise CapacityError(
            f"the packed form takes {needed:,} bytes on disk and {folder.resolve()} has {free:,} free; give fewer "
            "--layers, or another directory with --work"
        )


def _require_layout(path: Path, name: str, shape: tuple[int, ...], scheme: Scheme) -> None:
    if len(shape) != 2 or not name.endswith(".weight"):
        raise UsageError(
            f"{path.name} stores {name} of shape {list(shape)}, expected one matrix per expert; experts of this "
            "family cannot be packed"
        )
    if shape[1] % scheme.group:
        raise UsageError(
            f"bench.group is {scheme.group}, and {name} has rows of {shape[1]}; set one that divides them, such as 32"
        )
