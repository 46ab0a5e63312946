"""Building blocks of artefacts' `validate` methods: a field, the value found and the values allowed."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from moetool.base.errors import MismatchError, shortened

MAX_LAYERS = 4096
MAX_EXPERTS = 2**16
"""Maximum experts of a layer: traces store an expert in 16 bits."""
MAX_TOTAL_EXPERTS = 2**20
MAX_WIDTH = 2**20
MAX_BYTES = 2**53
"""Maximum amounts of bytes and tokens: whole numbers that a float64 represents exactly."""
MAX_GPUS = 2**16


def require(holds: bool, field: str, found: object, expected: str) -> None:
    """Raises: MismatchError unless `holds`, with the field, the value found and the values expected."""
    if not holds:
        text = shortened(found if isinstance(found, str) else repr(found))
        raise MismatchError(f"{shortened(field)}: found {text}, expected {expected}")


def require_whole(field: str, value: int, least: int, most: int = MAX_BYTES) -> None:
    """Raises: MismatchError unless least <= value <= most."""
    if not least <= value <= most:
        expected = f"{least:,} or more" if value < least else f"at most {most:,}"
        require(False, field, f"{value:,}" if abs(value) < 10**30 else "a number of more than 30 digits", expected)


def require_number(field: str, value: float, least: float = 0.0, most: float = math.inf) -> None:
    """Raises: MismatchError unless the value is finite and least <= value <= most."""
    if not (_is_finite(value) and least <= value <= most):
        expected = f"a number of {least:g} or more" if most == math.inf else f"a number from {least:g} to {most:g}"
        require(False, field, value, expected)


def require_positive(field: str, value: float) -> None:
    """Raises: MismatchError unless the value is finite and above 0."""
    require(_is_finite(value) and value > 0, field, value, "a number above 0")


def require_one_of(field: str, value: str, known: Iterable[str]) -> None:
    """Raises: MismatchError unless the value is among `known`."""
    names = list(known)
    require(value in names, field, value, f"one of {', '.join(names)}")


def require_distinct(field: str, values: Sequence[Any]) -> None:
    """Raises: MismatchError where a value occurs twice."""
    if len(set(values)) != len(values):
        seen: set[Any] = set()
        twice = next(value for value in values if value in seen or seen.add(value))  # type: ignore[func-returns-value]
        require(False, field, f"{twice} twice", "each once")


def require_plain(field: str, value: Any) -> None:
    """Raises: MismatchError where a number within plain values (dictionaries, lists) is not finite or over 64 bits."""
    rest = [value]
    while rest:
        one = rest.pop()
        if isinstance(one, dict):
            rest += one.values()
        elif isinstance(one, list | tuple):
            rest += one
        elif isinstance(one, float) and not math.isfinite(one):
            require(False, field, one, "finite numbers")
        elif isinstance(one, int) and not -(2**63) <= one < 2**63:
            require(False, field, "a whole number of more than 64 bits", "numbers of at most 64 bits")


def outside_vocabulary(tokens: Iterable[int], vocab_size: int) -> str:
    """Return why a model cannot read these tokens; empty if it can.

    An id beyond the embedding would fail inside the forward; on a GPU that ends the process.
    """
    wrong = next((token for token in tokens if not 0 <= token < vocab_size), None)
    return "" if wrong is None else f"token {wrong} is not in the vocabulary of {vocab_size} tokens"


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond the range of float64
        return False
