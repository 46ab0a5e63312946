"""Prompts in a user's files: JSON lines, CSV, Parquet, or text.

A row has `prompt`, or the `messages` of a chat in OpenAI's form, whose last answer is the reference answer.
"""

import csv
import io
import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from moetool.base.errors import MismatchError

DOCUMENT_END = "<|endoftext|>"
_BOM = b"\xef\xbb\xbf"
_SNIFF_BYTES = 1 << 24
_PARQUET_ROWS = 1024
_FIELDS = ("prompt", "messages", "answer", "task", "id", "label", "pair")
_CHAT = 'messages like [{"role": "user", "content": "…"}]'


class PromptRow(NamedTuple):
    """A prompt as stored in a file; `prompt_id` is the file's id, or the row's number, counted from 1.

    `messages` are those of a chat, in the form of chat templates; `text` joins their contents. `where` is its
    place in the file, for messages.
    """

    text: str
    answer: str | None
    task: str | None
    prompt_id: str
    messages: tuple[dict[str, Any], ...] = ()
    label: str = ""
    pair: str = ""
    where: str = ""


Rows = Iterator[PromptRow | MismatchError]
"""The rows of a file; in place of a malformed one, the error that says where and why."""


def _read_jsonl(file: Path) -> Rows:
    with file.open("rb") as lines:
        for number, (offset, line) in enumerate(_lines(lines), start=1):
            where = f"{file}:{number}"
            try:
                text = _decode(line, file, offset)
                if text.strip():
                    yield plain(_object(text, where), number, where)
            except MismatchError as error:
                yield error


def _object(text: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _refusal(where, f"is not JSON ({error})") from None
    if not isinstance(row, dict):
        raise _refusal(where, f"is a JSON {type(row).__name__}")
    return row


def _read_csv(file: Path) -> Rows:
    with file.open("rb") as lines:
        text = "".join(_decode(line, file, offset) for offset, line in _lines(lines))
    separator = "\t" if file.suffix.lower() == ".tsv" else separator_of(text.partition("\n")[0])
    rows = csv.DictReader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    rows.fieldnames = [name.strip().lower() for name in rows.fieldnames or ()]
    try:
        for number, row in enumerate(rows, start=1):
            where = f"{file}:{rows.line_num}"
            if None in row or None in row.values():
                yield _refusal(where, f"has other than {len(rows.fieldnames or ())} cells", "one for each column")
            else:
                yield _row({name: value for name, value in row.items() if value != ""}, number, where)
    except csv.Error as error:
        raise _refusal(f"{file}:{rows.line_num}", f"is not CSV ({error})", "quotes that close") from None


def _read_parquet(file: Path) -> Rows:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    with file.open("rb") as raw:
        try:
            parquet = pq.ParquetFile(raw)
            found = {name.strip().lower(): name for name in reversed(parquet.schema_arrow.names)}
            if not {"prompt", "messages"} & set(found):
                listed = ", ".join(parquet.schema_arrow.names) or "none"
                raise _refusal(str(file), f"has the columns {listed}", "a column 'prompt'")
            columns = [found[name] for name in _FIELDS if name in found]
            for batch in parquet.iter_batches(_PARQUET_ROWS, columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    lowered = {name.strip().lower(): value for name, value in row.items()}
                    yield _row(lowered, number, f"{file}, row {number}")
        except (pa.ArrowException, OSError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise _refusal(str(file), f"is damaged ({reason})", "Parquet") from error
        except UnicodeDecodeError:
            raise _refusal(str(file), f"has text that is not UTF-8 after row {number}", "UTF-8 text") from None


def _read_text(file: Path) -> Rows:
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


READERS: dict[str, Callable[[Path], Rows]] = {
    ".jsonl": _read_jsonl,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".parquet": _read_parquet,
    ".txt": _read_text,
}
"""Readers of files, by suffix. They raise MismatchError if the rest of a file cannot be read, and OSError."""


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield (byte offset, line) of every line, without a byte order mark."""
    offset = 0
    for line in file:
        mark = len(_BOM) if offset == 0 and line.startswith(_BOM) else 0
        yield offset + mark, line[mark:]
        offset += len(line)


def separator_of(header: str) -> str:
    """Return the separator of a table's header: comma, semicolon or tab."""
    return max((",", ";", "\t"), key=header.count)


def _has_line(file: BinaryIO, wanted: bytes) -> bool:
    """Return whether a line occurs near the beginning. Effects: rewinds the file."""
    found = any(line.rstrip() == wanted for line in file.read(_SNIFF_BYTES).split(b"\n"))
    file.seek(0)
    return found


def _decode(line: bytes, file: Path, offset: int) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _refusal(f"{file}, byte {offset + error.start}", "is not UTF-8", "UTF-8 text") from None


def _row(row: Mapping[str, Any], number: int, where: str) -> PromptRow | MismatchError:
    try:
        return plain(row, number, where)
    except MismatchError as error:
        return error


def plain(row: Mapping[str, Any], number: int, where: str) -> PromptRow:
    """Convert a row of a file, with `prompt` or `messages`, and optionally other `_FIELDS`.

    Raises:
        MismatchError: the row has no prompt, or one that is not text.
    """
    said: tuple[dict[str, Any], ...] = ()
    text, answer = row.get("prompt"), _optional(row, "answer", where)
    if row.get("messages") is not None and text is None:
        said, last = _chat(row["messages"], where)
        answer = answer or last
        text = "\n\n".join(message["content"] for message in said if message["content"])
    elif "prompt" not in row:
        raise _refusal(where, f"has {', '.join(map(repr, row)) or 'no fields'} and no 'prompt'")
    elif not isinstance(text, str):
        raise _refusal(where, f"has a prompt that is {'null' if text is None else type(text).__name__}")
    elif not text.strip():
        raise _refusal(where, "has a blank prompt", "text")
    require_text(text, where)
    return PromptRow(
        text=text,
        messages=said,
        answer=answer,
        task=_optional(row, "task", where) or None,
        prompt_id=_optional(row, "id", where) or str(number),
        label=_optional(row, "label", where) or "",
        pair=_optional(row, "pair", where) or "",
        where=where,
    )


def _chat(messages: Any, where: str) -> tuple[tuple[dict[str, Any], ...], str | None]:
    """Return a chat up to its last answer, and that answer: the reference, unless the row has one.

    The shapes of messages are those that `moetool serve` accepts.
    """
    from pydantic import TypeAdapter, ValidationError

    from moetool.prompts.messages import ChatMessage, for_template

    if isinstance(messages, str):  # a cell of CSV
        try:
            messages = json.loads(messages)
        except (ValueError, RecursionError) as error:
            raise _refusal(where, f"has messages that are not JSON ({error})", _CHAT) from None
    if not isinstance(messages, list) or not messages:
        raise _refusal(where, "has messages that are not a list", _CHAT)
    try:
        read = TypeAdapter(list[ChatMessage]).validate_python(messages)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        message, *inner = first["loc"]
        field = f" (field {'.'.join(map(str, inner))})" if inner else ""
        why = first["msg"].removeprefix("Value error, ")
        raise _refusal(where, f"has an invalid message {int(message) + 1}{field}: {why}", _CHAT) from None
    answer = read.pop().content if read[-1].role == "assistant" else None
    if not any(message.content and message.content.strip() for message in read):
        raise _refusal(where, "has messages without text before the answer", _CHAT)
    return tuple(map(for_template, read)), answer


def require_text(text: str, where: str) -> None:
    """Raise MismatchError for half of a surrogate pair, which JSON can escape but UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _refusal(where, "has half of a surrogate pair in its prompt", "UTF-8 text") from None


def _optional(row: Mapping[str, Any], name: str, where: str) -> str | None:
    """Read an optional field; numbers become text, since data sets often number their rows."""
    value = row.get(name)
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _refusal(where, f"has a field {name!r} that is {type(value).__name__}", "a string")
    return str(value)


def _refusal(where: str, found: str, expected: str = 'an object like {"prompt": "…"}') -> MismatchError:
    return MismatchError(f"{where} {found}, expected {expected}; repair the file and try again")
