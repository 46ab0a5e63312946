"""Detection of a file's format by its content."""

from dataclasses import dataclass
from pathlib import Path

from moetool.base import plugins
from moetool.base.errors import UsageError, shortened
from moetool.trace.foreign.file_sample import PARSED_BYTES, FileSample, read_objects


@dataclass(frozen=True, slots=True)
class Guess:
    """A possible format of a file, and the reason."""

    format: str
    reason: str


def candidates(path: Path) -> list[Guess]:
    """Return the formats that recognize a file; generic ones only where no other does."""
    sample = FileSample(path)
    found: list[tuple[bool, Guess]] = []
    for name in plugins.names("format"):
        module = plugins.load("format", name)
        recognize = getattr(module, "recognize", None)
        if recognize is not None and (reason := recognize(sample)):
            found.append((getattr(module, "GENERIC", False), Guess(name, reason)))
    least = min((generic for generic, _ in found), default=False)
    return [guess for generic, guess in found if generic == least]


def guess(path: Path) -> Guess:
    """Return the one format that recognizes a file.

    Raises:
        UsageError: there is no such file, none recognizes it, or several do.
        MismatchError: it begins like JSON and is none; of a large file only the beginning is judged.
    """
    if not path.exists():
        raise UsageError(f"no file at {path}; give the path of a file of routes or counts")
    found = candidates(path)
    if not found:
        first = next(iter(FileSample(path).lines), "")
        if first.lstrip()[:1] in ("{", "[") and path.stat().st_size <= PARSED_BYTES:
            read_objects(path)  # which names the line that is no JSON
        begins = f" (it begins with {shortened(first, 60)!r})" if first else ""
        raise UsageError(
            f"{path} has an unknown format{begins}; name it with --format, or the columns of a table with --map "
            f"layer=COLUMN,expert=COLUMN"
        )
    if len(found) > 1:
        each = "; ".join(f"{one.format} ({one.reason})" for one in found)
        raise UsageError(f"{path} may be any of {each}; choose with --format")
    return found[0]
