"""JSON files that say what they are: plans and profiles begin with their kind, schema version and maker."""

from pathlib import Path
from typing import Any, Protocol, TypeVar

from moetool import __version__, config
from moetool.errors import MismatchError, MoetoolError, UsageError, first_line, shortened
from moetool.json_files import read_json

MAX_BYTES = 64 << 20
"""Of a plan or profile: a placement on 64 GPUs takes 1 MB."""


class Validated(Protocol):
    """An artefact that can tell whether it makes sense."""

    def validate(self) -> None:
        """Raises: MoetoolError, naming the field, what was found and what is expected."""


T = TypeVar("T", bound=Validated)


def head(kind: str, version: int) -> dict[str, Any]:
    """First keys of such a file."""
    return {"kind": kind, "schema_version": version, "moetool_version": __version__}


def load(cls: type[T], path: str | Path, *, what: str, kind: str, version: int, command: str, example: str = "") -> T:
    """Read a dataclass from a file that `head` is the head of.

    Args:
        what: such a file is called ("plan").
        kind, version: that the head has to have.
        command: makes one.
        example: what else that may be given; without, its help is named.

    Raises:
        UsageError: there is no such file.
        MismatchError: it is something else, or of another version, or damaged, or makes no sense.
        CapacityError: what it plans does not fit where it says.
    """
    advice = f"make the {what} again with: {command}"
    try:
        values = read_json(Path(path), advice=advice, max_bytes=MAX_BYTES)
    except IsADirectoryError:
        raise UsageError(f"{path} is a directory, expected a {what}'s file; one is made with: {command}") from None
    except (FileNotFoundError, NotADirectoryError):
        whole = f"{command} {example} --out {path}" if example else f"{command} … --out {path} (see {command} --help)"
        raise UsageError(f"no {what} at {path}; make one with: {whole}") from None
    found = values.pop("kind", "something else"), values.pop("schema_version", None)
    if found != (kind, version):
        raise MismatchError(
            f"{path} holds {shortened(found[0], 40)} of schema version {shortened(found[1], 40)}, expected a "
            f"{kind} of version {version}; {advice}"
        )
    values.pop("moetool_version", None)
    try:
        made = config.parse(cls, values, str(path))
    except UsageError as error:
        said = first_line(error)
        raise MismatchError(f"{said if str(path) in said else f'{path}: {said}'}; {advice}") from None
    try:
        made.validate()
    except MoetoolError as error:
        raise type(error)(f"{path}: {first_line(error)}; {advice}") from None
    return made
