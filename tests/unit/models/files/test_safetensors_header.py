"""Damaged safetensors headers: what the safetensors library refuses is refused, and what both read is the same."""

import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from moetool.base.errors import MismatchError, UsageError
from moetool.models.files.safetensors_header import DTYPE_BITS, HeaderEntry, read_header
from moetool.models.files.tensor_index import read_index
from tests.logs import warnings
from tests.refusals import refused

_Header = dict[str, Any]

_numbers = st.one_of(
    st.integers(0, 40), st.integers(-3, 2**65), st.sampled_from([2**63, 2**64, 1.0, 0.5, True, None, "8", []])
)
_dtypes = st.sampled_from([*DTYPE_BITS, "F32", "f32", "F128", "", None, 4, ["F32"]])
_shapes = st.one_of(st.lists(st.integers(0, 5), max_size=3), st.lists(_numbers, max_size=3), _numbers)
_offsets = st.one_of(st.lists(st.integers(0, 80), min_size=2, max_size=2), st.lists(_numbers, max_size=3), _numbers)
_entries = st.one_of(
    st.fixed_dictionaries({"dtype": _dtypes, "shape": _shapes, "data_offsets": _offsets}),
    st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets", "more"]), _numbers),
    _numbers,
)
_metadata = st.one_of(
    st.none(), st.dictionaries(st.text(max_size=3), st.one_of(st.text(max_size=3), _numbers)), _numbers
)


def _layout(shapes: list[tuple[str, list[int]]]) -> tuple[_Header, int]:
    header: _Header = {}
    at = 0
    for number, (dtype, shape) in enumerate(shapes):
        size = math.prod(shape) * DTYPE_BITS[dtype] // 8
        header[f"t{number}"] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    return header, at


_layouts = st.lists(
    st.tuples(st.sampled_from(sorted(DTYPE_BITS)), st.lists(st.integers(0, 4), max_size=3)), max_size=4
).map(_layout)


@st.composite
def _damaged(draw: st.DrawFn) -> tuple[bytes, int]:
    """The text of a header with up to two changes, and the bytes of data after it."""
    header, size = draw(_layouts)
    for _ in range(draw(st.integers(0, 2))):
        names = sorted(header)
        change = draw(st.sampled_from(["field", "entry", "shift", "swap", "drop", "copy", "metadata", "size"]))
        if change == "metadata":
            header["__metadata__"] = draw(_metadata)
        elif change == "size":
            size = max(0, size + draw(st.integers(-9, 9)))
        elif change == "entry" or not names:
            header[draw(st.sampled_from(["t0", "t1", "new", ""]))] = draw(_entries)
        elif not isinstance(entry := header[draw(st.sampled_from(names))], dict):
            continue
        elif change == "field":
            field, values = draw(st.sampled_from([("dtype", _dtypes), ("shape", _shapes), ("data_offsets", _offsets)]))
            entry[field] = draw(values)
        elif change == "shift" and isinstance(entry.get("data_offsets"), list):
            by = draw(st.integers(-8, 8))
            entry["data_offsets"] = [n + by if type(n) is int else n for n in entry["data_offsets"]]
        elif change == "swap" and isinstance(other := header[names[0]], dict):
            other["data_offsets"], entry["data_offsets"] = entry.get("data_offsets"), other.get("data_offsets")
        elif change == "drop":
            entry.pop(draw(st.sampled_from(["dtype", "shape", "data_offsets"])), None)
        elif change == "copy":
            header["copy"] = dict(entry)
    text = json.dumps(header).encode()
    cut = draw(st.integers(0, 3))
    return (text[:-cut] if cut == 3 else text + b" " * cut), size


def _write(folder: Path, text: bytes, size: int, length: int | None = None) -> Path:
    file = folder / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + bytes(size))
    return file


def _theirs(file: Path) -> dict[str, tuple[str, tuple[int, ...]]] | None:
    try:
        with safe_open(file, "pt") as stored:
            slices = {name: stored.get_slice(name) for name in stored.keys()}  # noqa: SIM118
            return {name: (one.get_dtype(), tuple(one.get_shape())) for name, one in slices.items()}
    except (SafetensorError, OSError):
        return None


def _ours(file: Path) -> dict[str, HeaderEntry] | None:
    try:
        return read_header(file)
    except MismatchError as error:
        assert str(error).startswith(f"{file} is damaged: ") and "\n" not in str(error)
        return None


def _compare(file: Path) -> None:
    theirs, ours = _theirs(file), _ours(file)
    assert (theirs is None) == (ours is None)
    if theirs is not None and ours is not None:
        assert theirs == {name: (entry.dtype, entry.shape) for name, entry in ours.items()}


@settings(max_examples=1500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(damaged=_damaged())
@example(damaged=(b'{"t":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}', 8))
@example(damaged=(b'{"t":{"dtype":"F4","shape":[3],"data_offsets":[0,1]}}', 1))
@example(damaged=(b'{"\\ud800":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', 1))
@example(damaged=(b'{"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"more":NaN}}', 1))
@example(damaged=(b'\xef\xbb\xbf{"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', 1))
@example(damaged=(b"[]", 0))
@example(damaged=(b"{}", 0))
@example(damaged=(b"{}", 1))
@example(damaged=(b"  {}\n", 0))
@example(damaged=(b"{}\0", 0))
@example(damaged=(b"\xff", 0))
def test_as_the_library_reads_it(damaged: tuple[bytes, int], tmp_path: Path) -> None:
    _compare(_write(tmp_path, *damaged))


@pytest.mark.parametrize("length", [0, 1, 3, 60, 10**8, 10**8 + 1, 2**63, 2**64 - 1])
def test_other_lengths_of_the_header(length: int, tmp_path: Path) -> None:
    _compare(_write(tmp_path, b'{"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', 1, length))


@pytest.mark.parametrize("size", range(9))
def test_files_of_few_bytes(size: int, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(size))
    _compare(file)


def test_names_that_stand_twice_are_refused(tmp_path: Path) -> None:
    """The library lets the second one win; nobody writes such a file on purpose."""
    entry = b'{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
    file = _write(tmp_path, b'{"t":' + entry + b',"t":' + entry + b"}", 1)
    with refused(MismatchError, "t", "twice"):
        read_header(file)


def test_what_pytorch_saves_is_read_as_it_lies(tmp_path: Path) -> None:
    tensors = {"b": torch.arange(6.0).reshape(2, 3), "a": torch.arange(5, dtype=torch.int32), "e": torch.empty(0, 4)}
    file = tmp_path / "model.safetensors"
    save_file(tensors, file, metadata={"format": "pt"})
    content = file.read_bytes()
    for name, entry in read_header(file).items():
        assert content[entry.begin : entry.end] == tensors[name].numpy().tobytes()


def _sharded(folder: Path, weight_map: Any) -> Path:
    save_file({"a": torch.ones(2)}, folder / "one.safetensors")
    save_file({"b": torch.ones(2)}, folder / "two.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_an_index_of_two_files(tmp_path: Path) -> None:
    index = read_index(_sharded(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"}))
    assert [file.name for file in index.files] == ["one.safetensors", "two.safetensors"]
    assert {name: tensor.file for name, tensor in index.tensors.items()} == {"a": 0, "b": 1}


@pytest.mark.parametrize(
    ("weight_map", "reason"),
    [
        ({"a": "../one.safetensors"}, "names the file '../one.safetensors', expected a .safetensors file of its own"),
        ({"a": "/etc/passwd"}, "names the file '/etc/passwd'"),
        ({"a": "x/../../one.safetensors"}, "of its own directory"),
        ({"a": "config.json"}, "of its own directory"),
        ({"a": 1}, "has no weight_map"),
        ({}, "has no weight_map"),
        (["one.safetensors"], "has no weight_map"),
    ],
)
def test_indexes_that_are_refused(weight_map: Any, reason: str, tmp_path: Path) -> None:
    with pytest.raises(MismatchError, match=reason):
        read_index(_sharded(tmp_path, weight_map))


@pytest.mark.parametrize(
    ("weight_map", "absent", "read"),
    [
        ({"a": "two.safetensors"}, "a", ["b"]),
        ({"a": "one.safetensors", "c": "one.safetensors"}, "c", ["a"]),
        ({"a": "two.safetensors", "b": "one.safetensors"}, "", ["a", "b"]),
    ],
)
def test_headers_decide_where_a_tensor_is(
    weight_map: Any, absent: str, read: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert sorted(read_index(_sharded(tmp_path, weight_map)).tensors) == read
    said = warnings(caplog)
    assert len(said) == bool(absent) and all(f" {absent}, " in one for one in said)


def test_a_missing_file_and_a_tensor_in_two(tmp_path: Path) -> None:
    with refused(UsageError, "three.safetensors"):
        read_index(_sharded(tmp_path, {"a": "three.safetensors"}))
    _sharded(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
    save_file({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path / "two.safetensors")
    with refused(MismatchError, "one.safetensors", "two.safetensors"):
        read_index(tmp_path)
