"""The errors that a user meets, and their exit codes.

Every message says in one line what was found, what was expected and what to do next. Any other exception
that reaches the command line is a bug of ours and shows its traceback.
"""

import difflib
from collections.abc import Iterable

_MOST_CHARACTERS = 1000
"""Limit of a message's length: it quotes files and requests."""


class MoetoolError(Exception):
    """Something outside moetool is not as it has to be (exit code 1).

    Args:
        message: value found, value expected, remedy; put into one line, cut in its middle where it is too long.
    """

    exit_code = 1

    def __init__(self, message: str = "") -> None:
        line = " ".join(message.splitlines())
        if len(line) > _MOST_CHARACTERS:
            half = (_MOST_CHARACTERS - 5) // 2
            line = f"{line[:half]} ... {line[-half:]}"
        super().__init__(line)


class UsageError(MoetoolError):
    """The command was given something that does not exist or makes no sense (exit code 2)."""

    exit_code = 2


class MismatchError(MoetoolError):
    """Two artefacts do not belong together, or one is damaged (exit code 3)."""

    exit_code = 3


class CapacityError(MoetoolError):
    """It does not fit: memory, disk, context length (exit code 4)."""

    exit_code = 4


def first_line(error: BaseException) -> str:
    """The first line of a foreign exception, to quote inside a one-line message; 400 characters of it at most.

    A line that ends with a colon or comma takes the next one along.
    """
    first, *rest = str(error).splitlines() or [type(error).__name__]
    while rest and first.endswith((":", ",")):
        first = f"{first} {rest.pop(0).strip()}"
    return shortened(first, 400)


def shortened(value: object, most: int = 80) -> str:
    """A value that a file holds, in at most so many characters, to quote inside a one-line message."""
    text = str(value)
    return text if len(text) <= most else f"{text[: most - 3]}..."


def unknown_name(kind: str, name: str, known: Iterable[str]) -> UsageError:
    """The error for a name that no plugin, dataset or option has, with the nearest right one."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return UsageError(f"unknown {kind} {shortened(name)!r}: {hint}known: {', '.join(names) or 'none'}")
