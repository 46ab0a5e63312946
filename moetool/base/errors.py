"""Errors for users, and their exit codes.

Every message is one line with the value found, the value expected and the next step. Any other exception that reaches
the command line is a bug of moetool and shows its traceback.
"""

import contextlib
import difflib
import re
from collections.abc import Iterable, Iterator

_MOST_CHARACTERS = 1000
"""Maximum length of a message, which may quote files and requests."""
_KNOWN_NAMES = re.compile(r"(?<=\?) known: [^;]*|; known: [^;]*")


class MoetoolError(Exception):
    """A failure outside moetool (exit code 1).

    Args:
        message: value found, value expected, remedy; joined into one line, cut in its middle if too long.
    """

    exit_code = 1

    def __init__(self, message: str = "") -> None:
        line = " ".join(message.splitlines())
        if len(line) > _MOST_CHARACTERS:
            half = (_MOST_CHARACTERS - 5) // 2
            line = f"{line[:half]} ... {line[-half:]}"
        super().__init__(line)


class UsageError(MoetoolError):
    """An argument does not exist or is invalid (exit code 2)."""

    exit_code = 2


class MismatchError(MoetoolError):
    """Two artefacts do not belong together, or one is damaged (exit code 3)."""

    exit_code = 3


class CapacityError(MoetoolError):
    """Insufficient memory, disk or context length (exit code 4)."""

    exit_code = 4


class Problems:
    """Errors of one command's arguments, raised together at the end of the block.

    with Problems() as problems:
        with problems.of("--memory: "):
            num_bytes = parse_bytes(memory)

    Raises:
        MoetoolError: of the first one's kind; names all of them, without lists of known names if those make it too
            long for a message.
    """

    def __init__(self) -> None:
        self._found: dict[str, type[MoetoolError]] = {}

    def __enter__(self) -> "Problems":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None and self._found:
            line = "; ".join(self._found)
            kind = next(iter(self._found.values()))
            raise kind(line if len(line) <= _MOST_CHARACTERS else _KNOWN_NAMES.sub("", line))

    @contextlib.contextmanager
    def of(self, where: str = "") -> Iterator[None]:
        """Note the error of a block. Args: where: its place, before the message."""
        try:
            yield
        except MoetoolError as error:
            self._found[f"{where}{error}"] = type(error)


def first_line(error: BaseException) -> str:
    """Return the first line of a foreign exception to quote in a message, at most 400 characters.

    A line that ends with a colon or comma includes the next one.
    """
    first, *rest = str(error).splitlines() or [type(error).__name__]
    while rest and first.endswith((":", ",")):
        first = f"{first} {rest.pop(0).strip()}"
    return shortened(first, 400)


def shortened(value: object, most: int = 80) -> str:
    """Shorten a file's value to this many characters, to quote in a message."""
    text = str(value)
    return text if len(text) <= most else f"{text[: most - 3]}..."


def unknown_name(kind: str, name: str, known: Iterable[str], of: str = "") -> UsageError:
    """Return the error for an unknown name of a plugin, data set or option, with the nearest known one.

    Args:
        kind: what it names, for the message ("policy", "option").
        of: owner of the name ("planner prism"), if any.
    """
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f": did you mean {close[0]!r}? known: " if close else "; known: "
    owner = f" of {of}" if of else ""
    return UsageError(f"unknown {kind} {shortened(name)!r}{owner}{hint}{', '.join(names) or 'none'}")
