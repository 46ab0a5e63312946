"""Prompts to capture: the embedded sets, or a JSONL, Parquet or text file of one's own.

    data/prompts/*.jsonl    one object a line: id, prompt, answer (string or null), task; the file's name is the set's

A reader stops as soon as it has the prompts that were asked for, so a large file costs no more than its beginning.
"""

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from moetool import assets
from moetool.errors import MismatchError, MoetoolError, UsageError, unknown_name

ALL = "all"
DOCUMENT_END = "<|endoftext|>"
_BOM = b"\xef\xbb\xbf"
_SNIFF_BYTES = 1 << 24
_PARQUET_ROWS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt of a data set.

    Attributes:
        dataset: the embedded set's name, or the file's without its suffix.
        task: what kind of text it is; the data set's name where the source does not say.
        prompt_id: the source's own id, or the number of its line, row or document, counted from 1.
        text: what the model reads; never blank.
        answer: the reference answer, where there is one.
    """

    dataset: str
    task: str
    prompt_id: str
    text: str
    answer: str | None = None


def names() -> list[str]:
    """The embedded sets, sorted."""
    return sorted(file.stem for file in assets.path("data", "prompts").glob("*.jsonl"))


def load(sources: Sequence[str], *, max_prompts: int | None = None) -> list[Prompt]:
    """The prompts of the sources, in their order; a source that is named twice counts once.

    Args:
        sources: names of embedded sets (`all` is every one of them) or paths of files: `.jsonl` with `prompt` and
            perhaps `answer`, `task` and `id`; `.parquet` with the same columns; `.txt` with documents that end at a
            line `<|endoftext|>` or, where its first 16 MiB have no such line, at blank lines. An embedded name goes
            before a file of that name: write `./code` for the file.
        max_prompts: take the first so many of each source (of each set, for `all`); None takes every one.

    Raises:
        UsageError: there is no such set or file, its format is not one of these, or a number makes no sense.
        MismatchError: a file does not hold what it should: it is empty, damaged, not UTF-8, or lacks prompts.
        MoetoolError: a file cannot be read.
    """
    if not sources:
        raise UsageError(f"no data was named, expected a prompt set or a file; try --data {ALL}")
    if max_prompts is not None and max_prompts < 1:
        raise UsageError(f"{max_prompts} prompts make no capture, expected at least 1; leave --max-prompts out for all")
    embedded = names()
    expanded = [name for source in sources for name in (embedded if source == ALL else [source])]
    prompts: list[Prompt] = []
    for source in dict.fromkeys(expanded):
        file = assets.path("data", "prompts", f"{source}.jsonl") if source in embedded else _file(source, embedded)
        prompts += _read(file, max_prompts)
    return prompts


def _file(source: str, embedded: list[str]) -> Path:
    """The file that a source means, refused here if it cannot be one."""
    file = Path(source).expanduser()
    if not file.exists():
        if file.suffix or file.name != source:
            raise UsageError(f"no file at {source}, expected prompts as {_FORMATS}; or use --data {ALL}")
        raise unknown_name("dataset", source, [ALL, *embedded])
    if not file.is_file() or file.suffix.lower() not in _READERS:
        found = "a folder" if file.is_dir() else f"of format {file.suffix or 'unknown'!r}"
        raise UsageError(f"{source} is {found}, expected a file that ends in {_FORMATS}; convert it and try again")
    return file


def _read(file: Path, max_prompts: int | None) -> list[Prompt]:
    reader = _READERS[file.suffix.lower()]
    try:
        prompts = list(itertools.islice(reader(file), max_prompts))
    except OSError as error:
        raise MoetoolError(f"cannot read {file}: {error.strerror or error}; choose another --data") from error
    if not prompts:
        raise MismatchError(f"{file} holds no prompt, expected at least one; choose another --data")
    return prompts


def _read_jsonl(file: Path) -> Iterator[Prompt]:
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
            yield _prompt(row, file, number, where)


def _read_parquet(file: Path) -> Iterator[Prompt]:
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
                    yield _prompt(row, file, number, f"{file}, row {number}")
        except (pa.ArrowException, OSError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise _refusal(str(file), f"is damaged ({reason})", "Parquet") from error
        except UnicodeDecodeError:
            raise _refusal(str(file), f"has text that is not UTF-8 after row {number}", "UTF-8 text") from None


def _read_text(file: Path) -> Iterator[Prompt]:
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
                yield _prompt({"prompt": whole}, file, number, f"{file}, document {number}")
                document = []


_READERS: dict[str, Callable[[Path], Iterator[Prompt]]] = {
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
    ".txt": _read_text,
}
_FORMATS = ", ".join(_READERS)


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


def _prompt(row: Mapping[str, Any], file: Path, number: int, where: str) -> Prompt:
    if "prompt" not in row:
        raise _refusal(where, f"has {', '.join(map(repr, row)) or 'no fields'} and no 'prompt'")
    text = row["prompt"]
    if not isinstance(text, str):
        raise _refusal(where, f"has a prompt that is {'null' if text is None else type(text).__name__}")
    if not text.strip():
        raise _refusal(where, "has a blank prompt", "text")
    try:
        text.encode()
    except UnicodeEncodeError:  # JSON can escape what no UTF-8 file and no tokenizer can hold
        raise _refusal(where, "has half of a surrogate pair in its prompt", "UTF-8 text") from None
    return Prompt(
        dataset=file.stem,
        task=_optional(row, "task", where) or file.stem,
        prompt_id=_optional(row, "id", where) or str(number),
        text=text,
        answer=_optional(row, "answer", where),
    )


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
