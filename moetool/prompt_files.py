"""Prompts in files of one's own: JSON lines, Parquet, or text."""

import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from moetool.errors import MismatchError

DOCUMENT_END = "<|endoftext|>"
_BOM = b"\xef\xbb\xbf"
_SNIFF_BYTES = 1 << 24
_PARQUET_ROWS = 1024


class PromptRow(NamedTuple):
    """A prompt as a file has it; `prompt_id` is its own, or its number, counted from 1."""

    text: str
    answer: str | None
    task: str | None
    prompt_id: str


def _read_jsonl(file: Path) -> Iterator[PromptRow]:
    with file.open("rb") as lines:
        for number, (offset, line) in enumerate(_lines(lines), start=1):
            text = _decode(line, file, offset)
            if not text.strip():
                continue
            where = f"{file}:{number}"
            try:
                row = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise _refusal(where, f"is not JSON ({error})") from None
            if not isinstance(row, dict):
                raise _refusal(where, f"is a JSON {type(row).__name__}")
            yield plain(row, number, where)


def _read_parquet(file: Path) -> Iterator[PromptRow]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    with file.open("rb") as raw:
        try:
            parquet = pq.ParquetFile(raw)
            found = parquet.schema_arrow.names
            if "prompt" not in found:
                raise _refusal(str(file), f"has the columns {', '.join(found) or 'none'}", "a column 'prompt'")
            columns = [name for name in ("prompt", "answer", "task", "id") if name in found]
            for batch in parquet.iter_batches(_PARQUET_ROWS, columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    yield plain(row, number, f"{file}, row {number}")
        except (pa.ArrowException, OSError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise _refusal(str(file), f"is damaged ({reason})", "Parquet") from error
        except UnicodeDecodeError:
            raise _refusal(str(file), f"has text that is not UTF-8 after row {number}", "UTF-8 text") from None


def _read_text(file: Path) -> Iterator[PromptRow]:
    with file.open("rb") as lines:
        end = DOCUMENT_END if _has_line(lines, DOCUMENT_END.encode()) else ""
        number = 0
        document: list[str] = []
        for offset, line in itertools.chain(_lines(lines), [(0, end.encode())]):
            text = _decode(line, file, offset).rstrip()
            if text != end:
                document.append(text)
            elif whole := "\n".join(document).strip("\n"):
                number += 1
                yield plain({"prompt": whole}, number, f"{file}, document {number}")
                document = []


READERS: dict[str, Callable[[Path], Iterator[PromptRow]]] = {
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
    ".txt": _read_text,
}
"""What reads a file, by its name's end. Every reader raises MismatchError, with the place, for what is not as it has to
be, and OSError as it comes."""


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """(byte offset, line) of every line, without a byte order mark."""
    offset = 0
    for line in file:
        mark = len(_BOM) if offset == 0 and line.startswith(_BOM) else 0
        yield offset + mark, line[mark:]
        offset += len(line)


def _has_line(file: BinaryIO, wanted: bytes) -> bool:
    """Whether such a line is near the beginning. Effects: rewinds the file."""
    found = any(line.rstrip() == wanted for line in file.read(_SNIFF_BYTES).split(b"\n"))
    file.seek(0)
    return found


def _decode(line: bytes, file: Path, offset: int) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _refusal(f"{file}, byte {offset + error.start}", "is not UTF-8", "UTF-8 text") from None


def plain(row: Mapping[str, Any], number: int, where: str) -> PromptRow:
    """A row in the fields of our own files: `prompt`, and perhaps `answer`, `task` and `id`.

    Raises:
        MismatchError: it has no prompt, or one that is no text.
    """
    if "prompt" not in row:
        raise _refusal(where, f"has {', '.join(map(repr, row)) or 'no fields'} and no 'prompt'")
    text = row["prompt"]
    if not isinstance(text, str):
        raise _refusal(where, f"has a prompt that is {'null' if text is None else type(text).__name__}")
    if not text.strip():
        raise _refusal(where, "has a blank prompt", "text")
    require_text(text, where)
    return PromptRow(
        text=text,
        answer=_optional(row, "answer", where),
        task=_optional(row, "task", where) or None,
        prompt_id=_optional(row, "id", where) or str(number),
    )


def require_text(text: str, where: str) -> None:
    """Raises: MismatchError for what JSON can escape and neither a UTF-8 file nor a tokenizer can hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _refusal(where, "has half of a surrogate pair in its prompt", "UTF-8 text") from None


def _optional(row: Mapping[str, Any], name: str, where: str) -> str | None:
    """A field that may be missing or null; numbers become text, as data sets often number their rows."""
    value = row.get(name)
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _refusal(where, f"has a field {name!r} that is {type(value).__name__}", "a string")
    return str(value)


def _refusal(where: str, found: str, expected: str = 'an object like {"prompt": "…"}') -> MismatchError:
    return MismatchError(f"{where} {found}, expected {expected}; repair the file and try again")
