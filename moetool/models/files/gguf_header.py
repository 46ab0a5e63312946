"""Headers of GGUF files: metadata of the model and the position of each tensor.

A model may be split over files named `NAME-00001-of-00003.gguf`; the first one's header describes the model.
"""

import math
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from moetool.base.bounded_read import require_itself
from moetool.base.errors import MismatchError, UsageError
from moetool.models.files.gguf_end_tokens import END_TEXTS
from moetool.models.files.tensor_index import FileStamp

PLAIN = {0: "F32", 1: "F16", 26: "I32", 30: "BF16"}
"""ggml's numbers of the types that are plain numbers."""
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_MOST_BYTES = 2**28  # limit of a header; published models have a few million
_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


class HeaderCut(MismatchError):
    """A file ends inside its header."""


class GgufTensor(NamedTuple):
    """A tensor's position in a file: `offset` counts from the start of the file, `kind` is its ggml type."""

    file: int
    offset: int
    num_bytes: int
    shape: tuple[int, ...]
    kind: int


class GgufHeader(NamedTuple):
    """Headers of a model's files.

    Attributes:
        metadata: values by key; for a list of strings only its length.
        end_ids: ids of the tokens of `gguf_end_tokens.END_TEXTS`, by text.
        tensors: tensors by ggml name.
        num_bytes: smallest valid size of each file.
    """

    files: tuple[Path, ...]
    stamps: tuple[FileStamp, ...]
    metadata: dict[str, Any]
    end_ids: dict[str, int]
    tensors: dict[str, GgufTensor]
    num_bytes: tuple[int, ...]

    def require_whole(self) -> None:
        """Check sizes. Raises: MismatchError: a file is shorter than its header says."""
        for number, (file, stamp, expected) in enumerate(zip(self.files, self.stamps, self.num_bytes, strict=True)):
            if stamp.num_bytes < expected:
                mine = {name: tensor for name, tensor in self.tensors.items() if tensor.file == number}
                lost = next(name for name, tensor in mine.items() if tensor.offset + tensor.num_bytes > stamp.num_bytes)
                raise MismatchError(
                    f"{file} is truncated: it has {stamp.num_bytes:,} bytes, expected {expected:,}; {lost} and "
                    "later tensors are incomplete; download the model again"
                )


def read_gguf_header(path: Path) -> GgufHeader:
    """Read the header of a GGUF file, or of all files of a split model.

    Raises:
        MismatchError: one is damaged, or they do not match.
        UsageError: one is missing, or holds tensors of an unsupported type.
    """
    files = _files(path)
    metadata: dict[str, Any] = {}
    end_ids: dict[str, int] = {}
    tensors: dict[str, GgufTensor] = {}
    stamps, sizes = [], []
    for number, file in enumerate(files):
        stamps.append(FileStamp.of(file.stat()))
        found, ids, mine, num_bytes = _read(file, number)
        part = found.get("split.no", 0), found.get("split.count", 1) or 1
        if not all(isinstance(value, int) for value in part):
            raise MismatchError(f"{file} has no number of its part of the model; download the model again")
        if part != (number, len(files)):
            raise MismatchError(
                f"{file} is part {part[0] + 1} of {part[1]} by its header, expected {number + 1} of {len(files)}; "
                "download the model again"
            )
        if repeated := sorted(mine.keys() & tensors.keys()):
            raise MismatchError(f"{file}: {repeated[0]} is in another file too; download the model again")
        metadata, end_ids = metadata or found, end_ids | ids
        tensors |= mine
        sizes.append(num_bytes)
    if (count := metadata.get("split.tensors.count", len(tensors))) != len(tensors):
        raise MismatchError(f"{path} has {len(tensors)} tensors, expected {count}; download the model again")
    return GgufHeader(files, tuple(stamps), metadata, end_ids, tensors, tuple(sizes))


def require_header(file: Path) -> None:
    """Read the header of one file.

    Raises:
        HeaderCut: the file ends inside it.
        MismatchError, UsageError: see `read_gguf_header`.
    """
    _read(file, 0)


def _files(path: Path) -> tuple[Path, ...]:
    match = _SPLIT.fullmatch(path.name)
    if match is None:
        return (path,)
    files = tuple(path.with_name(f"{match[1]}-{i + 1:05}-of-{match[3]}.gguf") for i in range(int(match[3])))
    for file in files:
        if not file.is_file():
            raise UsageError(f"{file} is missing, a part of the same model as {path.name}; download it too")
    return files


class _Reader:
    """Reads values sequentially from the start of a file, never beyond its end.

    Raises:
        MismatchError: the file ends early, or a size in it is too large.
    """

    def __init__(self, file: Path) -> None:
        require_itself(file)
        self._file = file
        with file.open("rb") as stream:
            self._data = stream.read(_MOST_BYTES)
        self.position = 0
        self.positions: dict[str, int] = {}

    def error(self, problem: str, kind: type[MismatchError] = MismatchError) -> MismatchError:
        return kind(f"{self._file} is a damaged GGUF file: {problem}; download the model again")

    def take(self, count: int) -> bytes:
        if count > len(self._data) - self.position:
            raise self.error(f"it ends at byte {len(self._data):,}, inside its header", HeaderCut)
        self.position += count
        return self._data[self.position - count : self.position]

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def text(self) -> str:
        try:
            return self.take(self.number("<Q")).decode()
        except UnicodeDecodeError:
            raise self.error("a name in it is not text") from None

    def value(self, kind: int, wanted: Mapping[bytes, str] = MappingProxyType({})) -> Any:
        """Read a value.

        Args:
            wanted: strings whose positions in a list of strings `positions` receives, with their keys there.
        """
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            raise self.error(f"it has a value of type {kind}")
        kind, count = self.number("<I"), self.number("<Q")
        if kind in _SCALARS:
            form = f"<{count}{_SCALARS[kind][1]}" if count <= _MOST_BYTES else ""
            return list(struct.unpack(form, self.take(struct.calcsize(form)))) if form else self.take(count)
        if kind != _STRING:
            raise self.error(f"it has a list of type {kind}")
        for position in range(count):
            if (key := wanted.get(self.take(self.number("<Q")))) is not None:
                self.positions[key] = position
        return count


def _read(file: Path, number: int) -> tuple[dict[str, Any], dict[str, int], dict[str, GgufTensor], int]:
    """Return metadata, end tokens, tensors, and the expected bytes of the file."""
    reader = _Reader(file)
    if reader.take(4) != b"GGUF":
        raise MismatchError(f"{file} is not a GGUF file: it does not begin with GGUF; download the model again")
    if (version := reader.number("<I")) not in (2, 3):
        raise UsageError(f"{file} is a GGUF file of version {version}, expected 2 or 3; convert the model again")
    num_tensors, num_values = reader.number("<Q"), reader.number("<Q")
    metadata, ends = {}, {text.encode(): text for text in END_TEXTS}
    for _ in range(num_values):
        key = reader.text()
        metadata[key] = reader.value(reader.number("<I"), ends if key == "tokenizer.ggml.tokens" else {})
    found = []
    for _ in range(num_tensors):
        name, dims = reader.text(), reader.number("<I")
        if dims > 4:
            raise reader.error(f"{name} has {dims} dimensions")
        shape = tuple(reader.number("<Q") for _ in range(dims))[::-1]  # ggml lists the innermost dimension first
        if not all(shape):
            raise reader.error(f"{name} has the shape {list(shape)}")
        found.append((name, shape, reader.number("<I"), reader.number("<Q")))
    alignment = metadata.get("general.alignment", 32)
    if not (isinstance(alignment, int) and alignment > 0):
        raise reader.error(f"its alignment is {alignment!r}")
    start = end = -(-reader.position // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    before = "the header"
    for name, shape, kind, offset in sorted(found, key=lambda entry: entry[3]):
        if name in tensors:
            raise reader.error(f"{name} occurs twice")
        expected = -(-end // alignment) * alignment  # llama.cpp refuses holes too
        if start + offset != expected:
            raise reader.error(
                f"{name} begins at byte {start + offset:,}, expected {expected:,}, where {before} ends: the data type, "
                "shape or offset of one of them is wrong"
            )
        tensors[name] = GgufTensor(number, start + offset, _num_bytes(file, name, shape, kind), shape, kind)
        end, before = start + offset + tensors[name].num_bytes, name
    return metadata, reader.positions, tensors, end


def _num_bytes(file: Path, name: str, shape: tuple[int, ...], kind: int) -> int:
    from gguf import GGML_QUANT_SIZES

    values, num_bytes = GGML_QUANT_SIZES.get(kind, (0, 0))
    if not values:
        raise UsageError(f"{file}: {name} is of ggml type {kind}, which the installed gguf package does not know")
    if not shape or shape[-1] % values:
        raise MismatchError(
            f"{file}: {name} has rows of {shape[-1] if shape else 0} numbers, expected a multiple of {values}; "
            "download the model again"
        )
    if len(shape) < 2 and kind not in PLAIN:
        raise MismatchError(f"{file}: {name} has shape {list(shape)} and is quantized; download the model again")
    return math.prod(shape) // values * int(num_bytes)
