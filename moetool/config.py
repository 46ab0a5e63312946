"""From plain values (of a recipe, a plan, the command line) to the frozen dataclasses that the code works with."""

from collections.abc import Mapping
from typing import Any, TypeVar

from moetool.errors import UsageError, unknown_name

T = TypeVar("T")


def parse(kind: type[T], values: Mapping[str, Any], where: str) -> T:
    """Make a dataclass from plain values, converting and checking each by its field's type.

    Args:
        where: what the values belong to, for the message ("policy lru").

    Raises:
        UsageError: an unknown field or a wrong value, named by its path.
    """
    from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config

    try:
        return TypeAdapter(with_config(ConfigDict(extra="forbid"))(kind)).validate_python(dict(values))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = ".".join(map(str, first["loc"]))
        if first["type"] == "unexpected_keyword_argument":
            raise unknown_name(f"option of {where}:", path, getattr(kind, "__dataclass_fields__", ())) from None
        raise UsageError(f"{where}: {path}: {first['msg']}") from None
