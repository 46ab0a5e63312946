"""JSON files that say what they are: plans and profiles begin with their kind, schema version and maker."""

import json
from pathlib import Path
from typing import Any, TypeVar

from moetool import __version__, config
from moetool.errors import MismatchError, UsageError, first_line

T = TypeVar("T")


def head(kind: str, version: int) -> dict[str, Any]:
    """What such a file begins with."""
    return {"kind": kind, "schema_version": version, "moetool_version": __version__}


def load(cls: type[T], path: Path, *, what: str, kind: str, version: int, command: str, example: str = "") -> T:
    """Read a dataclass from a file that `head` is the head of.

    Args:
        what: such a file is called ("plan").
        kind, version: that the head has to have.
        command: makes one.
        example: what else that may be given; without, its help is named.

    Raises:
        UsageError: there is no such file.
        MismatchError: it is something else, or of another version, or damaged.
    """
    advice = f"make the {what} again with: {command}"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except IsADirectoryError:
        raise UsageError(f"{path} is a folder, expected a {what}'s file; one is made with: {command}") from None
    except (FileNotFoundError, NotADirectoryError):
        whole = f"{command} {example} --out {path}" if example else f"{command} … --out {path} (see {command} --help)"
        raise UsageError(f"no {what} at {path}; make one with: {whole}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise MismatchError(f"{path} is not a {what} ({first_line(error)}); {advice}") from None
    if not isinstance(values, dict):
        raise MismatchError(f"{path} is not a {what} (it holds no JSON object); {advice}")
    found = values.pop("kind", "something else"), values.pop("schema_version", None)
    if found != (kind, version):
        raise MismatchError(
            f"{path} holds {found[0]} of schema version {found[1]}, expected a {kind} of version {version}; {advice}"
        )
    values.pop("moetool_version", None)
    try:
        return config.parse(cls, values, str(path))
    except UsageError as error:
        raise MismatchError(f"{first_line(error)}; {advice}") from None
