"""Strategies that corrupt valid files: JSON values by structure, raw bytes, and table columns."""

import copy
import json
import math
from typing import Any

import numpy as np
from hypothesis import strategies as st

Json = Any

_WHOLE = (0, 1, -1, 2, 3, 7, 255, 2**15, 2**16, 2**31 - 1, 2**31, 2**53, 2**63, 2**64, 10**9, -(10**9), 10**15, 10**400)
_FLOATS = (0.0, -0.0, 0.5, -0.5, 1e-300, 1e300, -1e300, math.nan, math.inf, -math.inf)
NUMBERS: st.SearchStrategy[Any] = st.sampled_from((*_WHOLE, *_FLOATS))
ANY_JSON: st.SearchStrategy[Json] = st.one_of(
    NUMBERS,
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.sampled_from([None, True, False, "", "x", [], {}, [[]], [{}], {"a": 1}, "\ud800", "\x00", "../../etc/passwd"]),
    st.sampled_from(["nan", "1e999", "🙂" * 40, "a" * 5000, "os.path", "moetool.base.types", "cuda", "softmax"]),
    st.recursive(
        st.none() | st.integers(-9, 9) | st.text(max_size=4),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=4,
    ),
)


@st.composite
def corrupted(draw: st.DrawFn, value: Json) -> Json:
    """The value with one to three items dropped, duplicated, retyped, swapped, shifted or made extreme."""
    whole = {"root": copy.deepcopy(value)}
    for _ in range(draw(st.integers(1, 3))):
        _corrupt_place(draw, whole)
    return whole.get("root")


def _corrupt_place(draw: st.DrawFn, whole: dict[str, Json]) -> None:
    parent: Json = whole
    key: Json = "root"
    while key in parent if isinstance(parent, dict) else key < len(parent):
        inner = parent[key]
        if not isinstance(inner, dict | list) or not inner or draw(st.integers(0, 7)) == 0:
            break
        keys = sorted(inner) if isinstance(inner, dict) else range(len(inner))
        parent, key = inner, draw(st.sampled_from(keys))
    if (isinstance(parent, dict) and key not in parent) or (isinstance(parent, list) and key >= len(parent)):
        return
    match draw(st.integers(0, 7)):
        case 0:
            del parent[key]
        case 1:
            parent[key] = copy.deepcopy(draw(ANY_JSON))  # a later corruption may be inside it
        case 2 if isinstance(parent[key], int | float) and not isinstance(parent[key], bool):
            parent[key] = draw(NUMBERS | st.sampled_from([parent[key] + 1, parent[key] - 1, -parent[key]]))
        case 3 if isinstance(parent[key], list):
            parent[key] = parent[key][: draw(st.integers(0, len(parent[key])))]
        case 4 if isinstance(parent[key], list):
            parent[key] = parent[key] * draw(st.integers(2, 4))
        case 5 if len(parent) > 1:
            other = draw(st.sampled_from(sorted(parent) if isinstance(parent, dict) else range(len(parent))))
            parent[key], parent[other] = parent[other], parent[key]
        case 6 if isinstance(parent, dict):
            parent[draw(st.text(max_size=5))] = parent[key]
        case 7 if isinstance(parent, list):
            parent.insert(draw(st.integers(0, len(parent))), copy.deepcopy(parent[key]))
        case _:
            parent[key] = draw(NUMBERS)


@st.composite
def corrupted_bytes(draw: st.DrawFn, data: bytes) -> bytes:
    """The bytes truncated, or with bits flipped, or with runs overwritten, duplicated or removed."""
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        match draw(st.integers(0, 5)):
            case 0:
                data = data[:at]
            case 1 if data:
                data = data[:at] + bytes([data[at] ^ (1 << draw(st.integers(0, 7)))]) + data[at + 1 :]
            case 2:
                run = draw(st.binary(min_size=1, max_size=8) | st.sampled_from([b"\0" * 8, b"\xff" * 8, b"{", b"["]))
                data = data[:at] + run + data[at + len(run) :]
            case 3:
                data = data[:at] + data[at : at + draw(st.integers(1, 64))] + data[at:]
            case 4:
                data = data[:at] + data[at + draw(st.integers(1, 64)) :]
            case _:
                data = data[:at] + draw(st.binary(max_size=8)) + data[at:]
    return data


@st.composite
def corrupted_header(draw: st.DrawFn, data: bytes) -> bytes:
    """The bytes with some of their first kilobytes corrupted, or numbers there made extreme."""
    head, rest = data[: 1 << 11], data[1 << 11 :]
    if draw(st.booleans()):
        return draw(corrupted_bytes(head)) + rest
    at, size = draw(st.integers(0, len(head) - 9)), draw(st.sampled_from([1, 4, 8]))
    number = draw(st.sampled_from([0, 1, 2, 2**7, 2**8 - 1, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1]))
    return head[:at] + (number % 2 ** (8 * size)).to_bytes(size, "little") + head[at + size :] + rest


@st.composite
def json_files(draw: st.DrawFn, value: Json) -> bytes:
    """JSON text of a corrupted value, sometimes with corrupted bytes, or unrelated text."""
    kind = draw(st.integers(0, 19))
    if kind == 0:
        deep = [b"[" * 100_000, b'{"a":' * 200 + b"1" + b"}" * 200, b"1" * 5000, b"", b"\xff\xfe", b"null", b"NaN"]
        return draw(st.sampled_from(deep) | st.binary(max_size=30))
    text = _dump(value if kind == 1 else draw(corrupted(value)))
    return draw(corrupted_bytes(text)) if kind < 5 else text


def _dump(value: Json) -> bytes:
    return json.dumps(value, default=str).encode("utf-8", "surrogatepass")


@st.composite
def toml_files(draw: st.DrawFn, value: Json) -> bytes:
    """TOML text of a corrupted table, sometimes with corrupted bytes."""
    kind = draw(st.integers(0, 19))
    if kind == 0:
        return draw(
            st.sampled_from([b"a." * 5000 + b"a=1", b"a=" + b"[" * 5000, b"", b"\xff"]) | st.binary(max_size=30)
        )
    table = draw(corrupted(value)) if kind > 1 else value
    lines = (
        "".join(f"{_toml(str(key))} = {_toml(item)}\n" for key, item in table.items())
        if isinstance(table, dict)
        else f"value = {_toml(table)}\n"
    )
    text = lines.encode("utf-8", "surrogatepass")
    return draw(corrupted_bytes(text)) if kind < 5 else text


def _toml(value: Json) -> str:
    match value:
        case dict():
            return "{" + ", ".join(f"{_toml(str(key))} = {_toml(item)}" for key, item in value.items()) + "}"
        case list() | tuple():
            return "[" + ", ".join(map(_toml, value)) + "]"
        case bool():
            return str(value).lower()
        case float() | int():
            return str(value)
        case None:
            return '""'
    return json.dumps(value)


@st.composite
def safetensors_files(draw: st.DrawFn, data: bytes) -> bytes:
    """A safetensors file with a corrupted header, numbers or bytes."""
    length = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    match draw(st.integers(0, 5)):
        case 0:
            return draw(corrupted_bytes(data))
        case 1:
            return data[:8] + data[8 : 8 + length] + draw(corrupted_bytes(body))
        case 2:
            fill = draw(st.sampled_from([b"\xff", b"\x7f", b"\0", b"\x80", b"\x7c\x00", b"\xc0\x7f"]))
            at = draw(st.integers(0, max(0, len(body) - 1)))
            size = draw(st.integers(1, 64))
            corrupted_body = body[:at] + (fill * size)[: len(body) - at]
            return data[: 8 + length] + corrupted_body + body[len(corrupted_body) :]
        case 3:
            declared = draw(st.sampled_from([0, 1, length - 1, length + 1, 2**31, 2**63, 2**64 - 1]))
            return declared.to_bytes(8, "little") + data[8:]
    text = _dump(draw(corrupted(header)))
    return len(text).to_bytes(8, "little") + text + body


@st.composite
def columns(draw: st.DrawFn, table: Any) -> Any:
    """An Arrow table with one or two corrupted columns, or with rows shuffled, duplicated or cut."""
    import pyarrow as pa

    for _ in range(draw(st.integers(1, 2))):
        kind = draw(st.integers(0, 7))
        if kind == 0 and len(table):
            order = draw(st.permutations(range(len(table)))) if len(table) < 40 else list(range(len(table)))[::-1]
            table = table.take(pa.array(order))
        elif kind == 1:
            table = table.slice(0, draw(st.integers(0, len(table))))
        elif kind == 2:
            table = pa.concat_tables([table, table])
        elif kind == 3:
            table = table.drop_columns([draw(st.sampled_from(table.column_names))]) if table.num_columns > 1 else table
        elif len(table):
            table = _corrupt_column(draw, table)
    return table


def _corrupt_column(draw: st.DrawFn, table: Any) -> Any:
    import pyarrow as pa

    name = draw(st.sampled_from(table.column_names))
    place, kind = table.schema.get_field_index(name), table.schema.field(name).type
    values = table[name].to_pylist()
    at = draw(st.integers(0, len(values) - 1))
    if pa.types.is_fixed_size_list(kind):
        inner = list(values[at] or [None] * kind.list_size)
        if inner:
            inner[draw(st.integers(0, len(inner) - 1))] = _of_type(draw, kind.value_type)
        values[at] = draw(st.sampled_from([inner, inner, inner, None]))
    else:
        values[at] = _of_type(draw, kind)
    if draw(st.integers(0, 9)) == 0:
        kind = draw(st.sampled_from([pa.int64(), pa.string(), pa.float32(), pa.list_(pa.int8())]))
    try:
        return table.set_column(place, name, pa.array(values, kind))
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        return table


def _of_type(draw: st.DrawFn, kind: Any) -> Any:
    import pyarrow as pa

    if pa.types.is_float16(kind):
        return draw(st.sampled_from([np.float16(x) for x in (0, -1, np.nan, np.inf, -np.inf, 65504)]))
    if pa.types.is_integer(kind):
        least, most = (0, 2**kind.bit_width - 1) if not pa.types.is_signed_integer(kind) else (-1, 2**31 - 1)
        return draw(st.sampled_from([least, most, 0, 1, 2, 7, 8, None]) | st.integers(least, most))
    return draw(st.none() | st.text(max_size=5))
