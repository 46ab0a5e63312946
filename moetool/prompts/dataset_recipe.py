"""Recipe of a public data set: location, prompt templates, answer lengths.

    recipes/datasets/NAME.toml    one file per data set, named by it

Templates are text with fields in braces, and `{{` and `}}` for literal braces. A field is a path in the row:
`{question}`, `{answers.text.0}` (a key, then the first element of a list), `{conversation.role=user.content}` (the
first element of a list whose `role` is `user`). A style may follow a colon: `{options:letters}` gives a line `A. …` for
each element, `{answer:commas}` one line of all, `{label:yes_no}` yes or no.
"""

import string
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from moetool.base import assets
from moetool.base.bounded_read import read_toml
from moetool.base.config import parse
from moetool.base.errors import MismatchError, UsageError, shortened

ANSWER = "answer"


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetRecipe:
    """A data set by name.

    Attributes:
        hub: id on the Hugging Face hub.
        split: split to read.
        config: config to read; None where the data set has only one.
        tasks: configs that are separate tasks, instead of `config`; the default where no task is named.
        files: pattern of files in the hub's repository, optionally with {split}, to read instead of a config.
        answer: template of the reference answer; None without one.
        task: template of the task (default: the config's name with `tasks`, else the data set's).
        id: template of the row's id; None takes a checksum of the prompt.
        output: tokens to decode: `answer` (length of the reference answer), a number, or None (the caller decides).
            Deviation: an end of text ends the answer earlier, while FineMoE forces the length.
        input_tokens: maximum length of a prompt in tokens; None leaves prompts whole. Deviation: shorter prompts are
            not extended, while FineMoE's prompts have one length, by an unstated method.
        min_chars: minimum length of a prompt; shorter ones, such as headings, are left out.
        licence: licence of the data, as its publisher names it.
        gated: whether the hub requires accepting its terms.
        source: paper that uses it, with the place of the lengths.
    """

    hub: str
    split: str
    prompt: str
    licence: str
    source: str
    config: str | None = None
    tasks: tuple[str, ...] = ()
    files: str | None = None
    answer: str | None = None
    task: str | None = None
    id: str | None = None
    output: Literal["answer"] | int | None = None
    input_tokens: int | None = None
    min_chars: int = 1
    gated: bool = False

    def __post_init__(self) -> None:
        for name in ("prompt", "answer", "task", "id"):
            if (template := getattr(self, name)) is not None:
                _fields(template)
        if not any(part.path for part in _fields(self.prompt)):
            raise UsageError(
                f"the template {shortened(self.prompt)!r} names no field, expected one such as {{question}}"
            )
        if self.output == ANSWER and self.answer is None:
            raise UsageError("output is 'answer', but there is no template of an answer; give one, or a number")
        for name in ("output", "input_tokens"):
            if isinstance(value := getattr(self, name), int) and value < 1:
                raise UsageError(f"{name} is {value}, expected at least 1")

    @property
    def configs(self) -> tuple[str | None, ...]:
        """Return the tasks that are read by default."""
        return self.tasks or (self.config,)

    @property
    def fields(self) -> tuple[str, ...]:
        """Return the columns that the prompt uses."""
        return tuple(dict.fromkeys(part.path[0] for part in _fields(self.prompt) if part.path))

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


def names() -> list[str]:
    """Return the names of the data sets, sorted."""
    return sorted(file.stem for file in assets.path("recipes", "datasets").glob("*.toml"))


def load(name: str) -> DatasetRecipe:
    """Load the recipe of the data set `name`, or of the file `name` if it ends in `.toml`.

    Raises:
        UsageError: the file does not exist, or is not a recipe.
    """
    file = Path(name).expanduser() if name.endswith(".toml") else assets.path("recipes", "datasets", f"{name}.toml")
    try:
        values = read_toml(file)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read the data set's recipe {file}: {error}") from None
    return parse(DatasetRecipe, values, str(file))


class Incomplete(Exception):
    """A row lacks a value of the template: a list is too short, or the value is null or blank."""


def fill(template: str, row: Mapping[str, Any], where: str) -> tuple[str, str]:
    """Return the template filled with the row's values, and the values alone, a line each.

    Raises:
        Incomplete: the row lacks a value.
        MismatchError: the rows have no such field.
    """
    parts: list[str] = []
    values: list[str] = []
    for part in _fields(template):
        parts.append(part.literal)
        if part.path:
            values.append(_write(_find(row, part.path, where), part, where))
            parts.append(values[-1])
    return "".join(parts), "\n".join(values)


class _Part(NamedTuple):
    """Literal text and the field after it; the path is empty at the template's end."""

    literal: str
    path: tuple[str, ...]
    style: str


_STYLES = ("", "letters", "commas", "yes_no")


@lru_cache(maxsize=256)
def _fields(template: str) -> tuple[_Part, ...]:
    try:
        parsed = list(string.Formatter().parse(template))
    except ValueError as error:
        raise UsageError(
            f"the template {shortened(template)!r} is damaged ({error}); write {{{{ for a brace itself"
        ) from None
    parts = []
    for literal, field, style, conversion in parsed:
        if field is not None and (not all(field.split(".")) or conversion or style not in _STYLES):
            styles = ", ".join(filter(None, _STYLES))
            raise UsageError(
                f"the template {shortened(template)!r} has a field {shortened(field)!r} that cannot be read, expected "
                f"a path such as {{answers.text.0}}, and after a colon one of {styles}"
            )
        parts.append(_Part(literal, tuple(field.split(".")) if field is not None else (), style or ""))
    return tuple(parts)


def _find(row: Mapping[str, Any], path: tuple[str, ...], where: str) -> Any:
    value: Any = row
    for depth, step in enumerate(path):
        if value is None:
            raise Incomplete
        if isinstance(value, Mapping) and step in value:
            value = value[step]
        elif isinstance(value, list | tuple) and step.isdecimal():
            if int(step) >= len(value):
                raise Incomplete
            value = value[int(step)]
        elif isinstance(value, list | tuple) and "=" in step:
            name, _, wanted = step.partition("=")
            found = next((item for item in value if isinstance(item, Mapping) and item.get(name) == wanted), None)
            if found is None and value and not any(isinstance(item, Mapping) and name in item for item in value):
                raise _no_field(value[0], name, path, depth, where)
            value = found
        else:
            raise _no_field(value, step, path, depth, where)
    if value is None or (isinstance(value, str | list | tuple) and not value):
        raise Incomplete
    return value


def _no_field(value: Any, step: str, path: tuple[str, ...], depth: int, where: str) -> MismatchError:
    above = f"{'.'.join(path[:depth])} of {where}" if depth else where
    found = f"has the fields {', '.join(map(str, value)) or 'none'}" if isinstance(value, Mapping) else "has none"
    return MismatchError(f"{above} {found}, expected a field {step!r}; take the copy of the hub as it is, or rename it")


def _write(value: Any, part: _Part, where: str) -> str:
    name = ".".join(part.path)
    if part.style in ("letters", "commas"):
        if not isinstance(value, list | tuple) or len(value) > 26:
            raise MismatchError(f"{where} has a field {name!r} that is not a list of up to 26 values")
        if part.style == "commas":
            return ", ".join(map(str, value))
        return "\n".join(f"{letter}. {option}" for letter, option in zip(string.ascii_uppercase, value, strict=False))
    if part.style == "yes_no":
        known = {"true": "yes", "t": "yes", "1": "yes", "yes": "yes", "false": "no", "f": "no", "0": "no", "no": "no"}
        if (found := known.get(str(value).lower())) is None:
            raise Incomplete  # -1 is a secret label
        return found
    if isinstance(value, Mapping | list | tuple):
        raise MismatchError(
            f"{where} has a field {name!r} that is a {type(value).__name__}, expected text; name a part, as in {name}.0"
        )
    text = str(value)
    if not text.strip():
        raise Incomplete
    return text
