"""Self-describing JSON files: plans and profiles begin with their kind, schema version and maker."""

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from moetool import __version__
from moetool.base import config, durable
from moetool.base.errors import MismatchError, MoetoolError, UsageError, first_line, shortened
from moetool.base.json_files import read_json
from moetool.base.types import ModelSpec

MAX_BYTES = 64 << 20
"""Maximum bytes of a plan or profile: a placement on 64 GPUs takes 1 MB."""
KINDS = ("cache_plan", "cost_profile", "migration_plan", "placement_plan")
"""The KIND of every plan and profile."""


def kind_of(path: Path) -> str | None:
    """Return the KIND of a plan or profile by its first bytes; None for other files and directories."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        found = re.match(rb'\s*\{\s*"kind": "(\w+)"', file.read(100))
    kind = found[1].decode() if found else None
    return kind if kind in KINDS else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Artefact:
    """A decision or measurement for a model, and its file.

    Attributes:
        KIND: first field of such a file, before its schema VERSION.
        WHAT: its name in messages.
        COMMAND: the command that makes it.
        EXAMPLE: arguments of that command, for messages (default: its --help).
        INDENT: indentation of its JSON; None: one line.
        FORMER: fields of earlier versions, which may be there if they are empty.
    """

    KIND: ClassVar[str]
    VERSION: ClassVar[int] = 1
    WHAT: ClassVar[str] = "plan"
    COMMAND: ClassVar[str]
    EXAMPLE: ClassVar[str] = ""
    INDENT: ClassVar[int | None] = None
    FORMER: ClassVar[tuple[str, ...]] = ()

    spec: ModelSpec

    def check(self, spec: ModelSpec) -> None:
        """Raises: MismatchError if it belongs to another model than `spec`."""
        spec.require_same(self.spec, "the model", f"the {self.WHAT}")

    def validate(self) -> None:
        """Raises: MoetoolError with the field, the value found and the values allowed, where it is invalid."""
        raise NotImplementedError

    def to_json(self) -> dict[str, Any]:
        head = {"kind": self.KIND, "schema_version": self.VERSION, "moetool_version": __version__}
        return {**head, **asdict(self), "spec": self.spec.to_json()}

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        durable.write_text(path, json.dumps(self.to_json(), indent=self.INDENT, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read and validate a file.

        Raises:
            UsageError: there is no such file.
            MismatchError: it is of another kind or version, damaged or invalid.
            CapacityError: its plan does not fit its device or cluster.
        """
        what, command = cls.WHAT, cls.COMMAND
        advice = f"make the {what} again with: {command}"
        try:
            values = read_json(Path(path), advice=advice, max_bytes=MAX_BYTES)
        except IsADirectoryError:
            raise UsageError(f"{path} is a directory, expected a {what}'s file; one is made with: {command}") from None
        except (FileNotFoundError, NotADirectoryError):
            more = "" if cls.EXAMPLE else f" (see {command} --help)"
            making = f"{command} {cls.EXAMPLE or '…'} --out {path}{more}"
            raise UsageError(f"no {what} at {path}; make one with: {making}") from None
        found = values.pop("kind", "something else"), values.pop("schema_version", None)
        if found != (cls.KIND, cls.VERSION):
            raise MismatchError(
                f"{path} holds {shortened(found[0], 40)} of schema version {shortened(found[1], 40)}, expected a "
                f"{cls.KIND} of version {cls.VERSION}; {advice}"
            )
        former = {name for name in cls.FORMER if not values.get(name)}
        values = {name: value for name, value in values.items() if name not in {"moetool_version", *former}}
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
