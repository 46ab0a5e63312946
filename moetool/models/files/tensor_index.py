"""Tensors of a checkpoint's safetensors files, and their positions."""

import logging
import os
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import torch

from moetool.base.errors import MismatchError, UsageError
from moetool.base.json_files import read_json
from moetool.models.files.safetensors_header import read_header
from moetool.models.files.weight_files import INDEX, SINGLE, choose_weights, second_set

_log = logging.getLogger(__name__)
FLOATS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
OTHER_DTYPES = {"I64": torch.int64, "I32": torch.int32, "U8": torch.uint8, "BOOL": torch.bool}


class Tensor(NamedTuple):
    """A tensor's position in a shard: `offset` counts from the start of the file."""

    file: int
    offset: int
    num_bytes: int
    shape: tuple[int, ...]
    dtype: str


class FileStamp(NamedTuple):
    """Identity of a file's content without reading it; replacing or writing the file changes it.

    `written_ns` can be set back. `changed_ns` cannot, but it moves with permissions, links and names too; see
    `moetool.models.files.file_changes`.
    """

    device: int
    inode: int
    num_bytes: int
    written_ns: int
    changed_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> "FileStamp":
        """Identity from `os.stat` or `os.fstat`."""
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


class TensorIndex(NamedTuple):
    """Tensors of a checkpoint by name, and the files that `Tensor.file` indexes.

    Attributes:
        stamps: stamps of the files, taken before their headers were read.
    """

    files: tuple[Path, ...]
    stamps: tuple[FileStamp, ...]
    tensors: dict[str, Tensor]

    @property
    def num_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.files)

    def read(self, tensor: Tensor) -> bytes:
        """The bytes of a small tensor."""
        with self.files[tensor.file].open("rb") as stream:
            stream.seek(tensor.offset)
            return stream.read(tensor.num_bytes)


def read_index(folder: Path, named: object = None) -> TensorIndex:
    """Read the header of every safetensors file of a checkpoint, once.

    Args:
        named: the file that its config names (`transformers_weights`), if any.

    Effects: warns of a second set of weights that is not read, and of tensors in the index that no file holds: as in
        transformers, the headers decide, and only a tensor that the model uses must exist.

    Raises:
        UsageError: there is no file, it is unclear which ones are meant (`choose_weights`), or one in the index is
            missing.
        MismatchError: a file is damaged; two hold a tensor of the same name; the index names a file outside the folder.
    """
    files, listed = _weight_files(folder, named)
    stamps = tuple(FileStamp.of(file.stat()) for file in files)
    tensors: dict[str, Tensor] = {}
    for number, file in enumerate(files):
        for name, entry in read_header(file).items():
            if name in tensors:
                raise MismatchError(
                    f"{name} is in {files[tensors[name].file]} and in {file}, expected it once; download the model "
                    "again"
                )
            tensors[name] = Tensor(number, entry.begin, entry.end - entry.begin, entry.shape, entry.dtype)
    if absent := sorted(listed - tensors.keys()):
        _log.warning(
            "%s names %s%s, which no file holds; this matters only if the model uses it",
            folder / INDEX,
            absent[0],
            f" and {len(absent) - 1} more" if len(absent) > 1 else "",
        )
    return TensorIndex(files, stamps, tensors)


def has_weights(folder: Path) -> bool:
    """Whether a folder has a model's safetensors files, or the path is a GGUF file."""
    return folder.is_file() or any((folder / name).is_file() for name in (SINGLE, INDEX))


def _weight_files(folder: Path, named: object) -> tuple[tuple[Path, ...], set[str]]:
    """Return a model's safetensors files in order, and the tensors in its index."""
    existing = {path.name for path in folder.glob("*") if path.is_file()}
    if not existing & {SINGLE, INDEX}:
        _require_linked(folder / SINGLE)
        _require_linked(folder / INDEX)
    index = folder / INDEX
    if choose_weights(existing, str(folder), named) == SINGLE:
        if said := second_set(index, existing, str(folder)):
            _log.warning("%s", said)
        return (folder / SINGLE,), set()
    content = read_json(index, advice="download the model again")
    weight_map = content.get("weight_map")
    if not (isinstance(weight_map, dict) and weight_map and all(isinstance(v, str) for v in weight_map.values())):
        raise MismatchError(f"{index} has no weight_map from tensors to files; download the model again")
    files = []
    for name in sorted(set(weight_map.values())):
        place = PurePosixPath(name)
        if place.is_absolute() or ".." in place.parts or "\\" in name or "\0" in name or place.suffix != ".safetensors":
            raise MismatchError(
                f"{index} names the file {name!r}, expected a .safetensors file of its own directory; download the "
                "model again"
            )
        _require_linked(folder / place)
        if not (folder / place).is_file():
            raise UsageError(f"{folder / place} is missing, though {INDEX} names it; download the model again")
        files.append(folder / place)
    return tuple(files), set(weight_map)


def _require_linked(file: Path) -> None:
    """Raises: UsageError: a file is a link to nothing, as in a copy of the hub's cache without its blobs."""
    if file.is_symlink() and not file.exists():
        raise UsageError(f"{file} links to a file that is gone; copy the model with cp -rL, or download it again")
