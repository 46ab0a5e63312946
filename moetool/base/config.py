"""Parsing of plain values (recipes, plans, command line) into frozen dataclasses."""

import math
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeVar, cast, get_args, get_type_hints

from moetool.base.errors import UsageError, shortened, unknown_name

T = TypeVar("T")
_MOST_PROBLEMS = 8
"""Most wrong fields that an error names."""


def parse(kind: type[T], values: Mapping[str, Any], where: str) -> T:
    """Create a dataclass from plain values, converting and checking each by its field's type.

    Args:
        kind: its `REFUSED`, if any, says by name what to do instead of a field that it no longer has.
        where: owner of the values, for messages ("policy lru").

    Raises:
        UsageError: unknown fields or invalid values, named by their paths, at most eight of them.
    """
    from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config

    if not isinstance(values, Mapping):
        raise UsageError(f"{where} is {shortened(repr(values))}, expected options by name, such as {where}.name=value")
    first: dict[Any, Any] = {}  # of each field: a value that may have several types has an error for each
    valid: Any
    try:
        valid = TypeAdapter(with_config(ConfigDict(extra="forbid"))(kind)).validate_python(dict(values))
    except ValidationError as error:
        for found in error.errors(include_url=False):
            whole = found["type"] in ("missing", "unexpected_keyword_argument")
            first.setdefault(found["loc"] if whole else found["loc"][:1], found)
        invalid = {name for found in first.values() for name in found["loc"][:1]}
        valid = {name: value for name, value in values.items() if name not in invalid}
    problems = [f"{where}: {large}" for large in _beyond_64_bits(valid)]
    problems += [_problem(kind, found, where) for found in first.values()]
    if not problems:
        return cast(T, valid)
    problems.sort(key=lambda said: "known: " in said)
    if len(problems) > _MOST_PROBLEMS:
        problems[_MOST_PROBLEMS - 1 : -1] = [f"{len(problems) - _MOST_PROBLEMS} more"]
    short = [said.partition(" known: ")[0].rstrip(";") for said in problems[:-1]]  # the names are listed once
    raise UsageError("; ".join([*short, problems[-1]]))


def _beyond_64_bits(value: Any, path: str = "") -> Iterator[str]:
    """Describe the whole numbers of a dataclass or plain value that exceed those of arrays and compiled code."""
    parts: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, int):
        if not -(2**63) <= value < 2**63:
            yield f"{path} is {shortened(value)}, expected a number of at most 64 bits"
    elif isinstance(value, list | tuple):
        parts = enumerate(value)
    elif isinstance(value, Mapping):
        parts = value.items()
    elif is_dataclass(value):
        parts = ((field.name, getattr(value, field.name)) for field in fields(value))
    for name, part in parts:
        yield from _beyond_64_bits(part, f"{path}.{name}" if path else str(name))


def _problem(kind: type, found: Mapping[str, Any], where: str) -> str:
    """Describe the fault of one field, with a remedy."""
    path = shortened(".".join(map(str, found["loc"])))
    if found["type"] == "dict_type":
        return f"{where}: {path} holds settings by name, such as {path}.NAME=VALUE"
    if found["type"] != "unexpected_keyword_argument":
        value = f" is {shortened(repr(found['input']), 40)}" if isinstance(found["input"], str | int | float) else ""
        return f"{where}: {path}{value}: {shortened(found['msg'], 300)}"
    if instead := getattr(kind, "REFUSED", {}).get(path):
        return f"{where}: {path} is no setting: {instead}"
    *parents, _ = found["loc"]
    known = [".".join([*map(str, parents), name]) for name in _names(kind, parents)]
    return str(unknown_name("option", path, known, where)) if known else f"unknown option {path!r} of {where}"


def _names(kind: Any, parents: Iterable[str | int]) -> list[str]:
    """Fields of a dataclass, or of those in a field of it."""
    for name in parents:
        if isinstance(name, int):
            continue
        declared = get_type_hints(kind).get(name) if is_dataclass(kind) else None
        kind = next((each for each in (declared, *get_args(declared)) if is_dataclass(each)), None)
    return [field.name for field in fields(kind)] if is_dataclass(kind) else []


@dataclass(frozen=True, slots=True)
class Span:
    """The allowed range of a number, from `low` to `high`; `above` and `below` exclude the ends."""

    low: float
    high: float = math.inf
    above: bool = False
    below: bool = False

    def __contains__(self, value: float) -> bool:
        fits = self.low < value if self.above else self.low <= value
        return bool(fits and (value < self.high if self.below else value <= self.high))

    def __str__(self) -> str:
        low, high = (f"{end:,}" if isinstance(end, int) else f"{end:g}" for end in (self.low, self.high))
        low = f"above {low}" if self.above else low
        if self.high == math.inf:
            return low if self.above else f"at least {low}"
        return f"{low} to {'below ' if self.below else ''}{high}"


POSITIVE = Span(0, above=True, below=True)
"""A finite number above 0."""
SHARE = Span(0, 1, above=True)
"""A share above 0 and at most 1."""
DROPPED = Span(0, 1, below=True)
"""A share of at least 0 and below 1."""


MOST_THREADS = 1024
"""Most threads or processes that an option may ask for."""
MOST_SEED = 2**32 - 1
"""The largest seed that every generator takes."""


def require_within(options: object, where: str = "", /, **spans: Span) -> None:
    """Check options by name; None passes, and a tuple is checked value by value.

    Args:
        where: owner of the options, before their names ("policy lru: ").

    Raises:
        UsageError: an option is not within its span.
    """
    for name, span in spans.items():
        value = getattr(options, name)
        for one in value if isinstance(value, tuple) else (value,):
            if one is not None and one not in span:
                raise UsageError(f"{where}{name} is {value}, expected {span}")


_UNITS = {
    "": 1,
    "b": 1,
    **{f"{p}b": 1000**i for i, p in enumerate("kmgt", 1)},
    **{f"{p}ib": 1024**i for i, p in enumerate("kmgt", 1)},
}


def parse_bytes(text: str, whole: int | None = None) -> int:
    """Parse bytes from `64MB`, `20GiB`, `1500000`, or, with `whole`, a share of it such as `25%`.

    Raises:
        UsageError: the text is none of these, less than one byte, or a share above 100%.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*|%)", text.strip().lower())
    if match and math.isfinite(number := float(match[1])):
        amount = 0
        if match[2] == "%" and whole is not None:
            if number > 100:
                raise UsageError(f"{text!r} is more than the whole; a share is above 0% and at most 100%")
            amount = int(number / 100 * whole)
        elif match[2] in _UNITS:
            amount = int(number * _UNITS[match[2]])
        if amount > 0:
            return amount
    shares = ", or a share like 25%" if whole is not None else ""
    raise UsageError(
        f"{text!r} is not an amount of memory; write bytes, or a number with a unit like 64MB or 20GiB{shares}"
    )


def parse_rate(text: str) -> int:
    """Parse bytes per second from `3GB/s`, `500MB` or `1500000`. Raises: UsageError: the text is none of these."""
    try:
        return parse_bytes(text.strip().removesuffix("/s"))
    except UsageError:
        raise UsageError(f"{text!r} is not a speed; write bytes per second, such as 3GB/s or 500MB/s") from None


def parse_seconds(text: str) -> float:
    """Parse seconds from `80ms`, `0.08s` or `250us`. Raises: UsageError for other texts, or 0."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(us|ms|s)", text.strip().lower())
    if match is None or not float(match[1]):
        raise UsageError(f"{text!r} is not a duration; write a number with a unit, like 80ms or 0.08s")
    return float(match[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[match[2]]


def parse_settings(settings: Iterable[str]) -> dict[str, Any]:
    """Parse `a=1`, `b.c=text`, `d=[text,2]` into a dictionary; values are TOML if possible, else text or lists of it.

    Raises:
        UsageError: a setting has no `=`, or two of them contradict each other.
    """
    values: dict[str, Any] = {}
    for setting in settings:
        path, equals, text = setting.partition("=")
        *parents, leaf = path.strip().split(".")
        if not equals or not leaf:
            raise UsageError(f"--set {setting!r} is not a setting; write name=value")
        place = values
        for parent in parents:
            place = place.setdefault(parent, {})
            if not isinstance(place, dict):
                raise UsageError(f"--set {setting!r} contradicts an earlier --set {parent}=…")
        place[leaf] = _parsed(text)
    return values


def _parsed(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        found = re.fullmatch(r"\s*\[([\w./%, -]+?),?\s*\]\s*", text)  # not an address such as [::1]
        words = [word.strip() for word in found[1].split(",")] if found else [""]
        return [_parsed(word) for word in words] if all(words) else text
