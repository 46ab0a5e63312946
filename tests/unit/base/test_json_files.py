"""JSON that somebody else wrote: what is refused, and that the message names the file and the next command."""

import contextlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetool.base import json_files
from moetool.base.errors import MismatchError
from moetool.base.json_files import parse_object, read_json
from tests.refusals import refused

_values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**63), 2**64 - 1),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=8,
)


@given(values=st.dictionaries(st.text(max_size=3), _values, max_size=4))
def test_every_object_comes_back(values: dict[str, object]) -> None:
    assert parse_object(json.dumps(values).encode()) == values


@given(content=st.binary(max_size=40))
def test_other_bytes_raise_nothing_but_a_value_error(content: bytes) -> None:
    with contextlib.suppress(ValueError):
        assert isinstance(parse_object(content), dict)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "Expecting value"),
        (b"[]", "it holds no JSON object"),
        (b"null", "it holds no JSON object"),
        (b'{"a": 1, "a": 2}', "it has 'a' twice"),
        (b'{"a": {"b": 1, "c": 2, "b": 1}}', "it has 'b' twice"),
        (b'{"a": NaN}', "NaN is not a JSON number"),
        (b'{"a": [-Infinity]}', "-Infinity is not a JSON number"),
        (b'{"a": "\xff"}', "can't decode byte"),
        ('{"a": 1}'.encode("utf-16"), "can't decode byte"),
        (b'\xef\xbb\xbf{"a": 1}', "BOM"),
        (b'{"a": ' * 101 + b"{}" + b"}" * 101, "nested deeper than 100 levels"),
        (b'{"a": ' + b"[" * 10**5 + b"]" * 10**5 + b"}", "nested deeper than 100 levels"),
        (b'{"a": 1} {', "Extra data"),
        (b'{"a": ' + b"1" * 5000 + b"}", "11111111111111111... is too large for a number"),
        (b'{"a": [18446744073709551616]}', "18446744073709551616 is too large for a number"),
        (b'{"a": -9223372036854775809}', "-9223372036854775809 is too large for a number"),
    ],
)
def test_what_is_refused(content: bytes, reason: str, tmp_path: Path) -> None:
    file = tmp_path / "card.json"
    file.write_bytes(content)
    with pytest.raises(MismatchError, match=reason) as told:
        read_json(file, advice="train again")
    assert str(told.value).startswith(f"{file} is damaged (") and str(told.value).endswith("; train again")
    assert "\n" not in str(told.value)


def test_constants_where_they_are_numbers() -> None:
    assert parse_object(b'{"a": [0.0, Infinity]}', constants=True) == {"a": [0.0, float("inf")]}
    assert parse_object(b'{"a": %d}' % 10**30, constants=True) == {"a": 10**30}
    assert parse_object(b'{"a": ' * 100 + b"1" + b"}" * 100)


def test_a_file_that_is_too_large_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_files, "MAX_BYTES", 10)
    file = tmp_path / "plan.json"
    file.write_text('{"a": 1}  ')
    assert read_json(file, advice="plan again") == {"a": 1}
    file.write_text('{"a": 1}   ')
    with refused(MismatchError, "plan.json", "10"):
        read_json(file, advice="plan again")
