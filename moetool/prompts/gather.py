"""Prompts to capture: the embedded sets, public data sets, or a user's JSONL, CSV, Parquet or text file.

    data/prompts/*.jsonl      one object per line: id, prompt, answer (string or null), task; the set has its name
    recipes/datasets/*.toml   public data sets, see `moetool.prompts.dataset_recipe`

A reader stops at the requested number of prompts, so only the beginning of a large file is read. Prompts that repeat an
earlier one, exactly or nearly, are dropped here. So no split has copies in both the training and the held-out part.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from moetool.base import assets
from moetool.base.bounded_read import require_itself
from moetool.base.errors import MismatchError, MoetoolError, UsageError, first_line, unknown_name
from moetool.base.validation import outside_vocabulary
from moetool.prompts import dataset_recipe
from moetool.prompts.dataset_recipe import DatasetRecipe
from moetool.prompts.dataset_rows import RowOptions, rows
from moetool.prompts.files import READERS, plain, require_text
from moetool.prompts.near_duplicates import SIMILARITY, NearDuplicates

ALL = "all"
NEW_TOKENS = 32
_FORMATS = ", ".join(READERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt of a data set.

    Attributes:
        dataset: the embedded set's name, or the file's without its suffix.
        task: kind of text (default: the data set's name).
        prompt_id: the source's id, or the number of its line, row or document, counted from 1. For a public data set:
            split, task, and the row's id or a checksum of the text.
        text: the model's input, never blank; for a chat, the contents of its messages.
        messages: those of a chat, the input of the model's chat template (`moetool.prompts.messages.for_template`).
        answer: the reference answer, if any.
        label: label of the row; empty where the file has none.
        pair: id shared by prompts that are compared with each other; empty where there is none.
        output: tokens to decode by its data set: `answer` (as many as the answer has), a number, or None.
        input_tokens: maximum length by its data set; None leaves the prompt whole.
        where: its place in its file, for messages; empty if it is of no file.
    """

    dataset: str
    task: str
    prompt_id: str
    text: str
    messages: tuple[dict[str, Any], ...] = ()
    answer: str | None = None
    label: str = ""
    pair: str = ""
    output: Literal["answer"] | int | None = None
    input_tokens: int | None = None
    where: str = field(default="", compare=False)

    def token_ids(self, tokenizer: Any, vocab_size: int, most: int | None = None) -> list[int]:
        """Return the tokens of the prompt for a model. Without a chat template, a chat is read as plain text.

        Args:
            vocab_size: number of tokens that the model embeds.
            most: maximum number of tokens; the rest is cut off.

        Raises:
            MismatchError: the chat template refuses the messages, or the model does not embed a token.
        """
        ids = self._encoded(tokenizer)[:most]
        self.require_embedded(ids, vocab_size)
        return ids

    def require_embedded(self, ids: Sequence[int], vocab_size: int) -> None:
        """Raise MismatchError, with the prompt's place, if the model does not embed a token."""
        if why := outside_vocabulary(ids, vocab_size):
            at = f" ({self.where})" if self.where else ""
            raise MismatchError(
                f"prompt {self.prompt_id} of {self.dataset}{at}: {why}; leave it out, or use the model's own tokenizer"
            )

    def _encoded(self, tokenizer: Any) -> list[int]:
        if not self.messages or not tokenizer.chat_template:
            ids: list[int] = tokenizer(self.text)["input_ids"]
            return ids
        from moetool.prompts.messages import fit_template

        try:
            messages = fit_template(self.messages, tokenizer.get_chat_template())
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template may raise anything on unexpected input
            raise MismatchError(
                f"the model's chat template refuses prompt {self.prompt_id} of {self.dataset}: {first_line(error)}"
            ) from error
        # the template writes the special tokens
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


@dataclass(frozen=True, slots=True, kw_only=True)
class DataOptions:
    """Choice of prompts from the sources.

    Attributes:
        folder: copy of the public data sets; None reads from the hub.
        task: config of a public data set, as in `NAME:TASK`.
        split: split of the public data sets (default: their recipes').
        seed: seed of the choice among a public data set's rows, if not all are used.
        buffer: rows in the shuffle buffer; 1 takes the first rows.
        duplicates: `drop` prompts that repeat an earlier one of any source, or `keep` them.
        similarity: least Jaccard similarity of near duplicates; see `moetool.prompts.near_duplicates`.
    """

    folder: Path | None = None
    task: str | None = None
    split: str | None = None
    seed: int = 0
    buffer: int = 10_000
    duplicates: Literal["drop", "keep"] = "drop"
    similarity: float = SIMILARITY


@dataclass(frozen=True, slots=True, kw_only=True)
class GatheredPrompts:
    """Prompts and their origins.

    Attributes:
        refused: for each malformed row of a file, its place and what is wrong.
        origins: entries for a trace's manifest, one per source (each task of a public data set is a source): numbers of
            prompts, duplicates (exact and near) and malformed rows, and the settings that reproduce them.
    """

    prompts: list[Prompt]
    origins: list[dict[str, Any]]
    refused: list[str]

    @property
    def duplicates(self) -> int:
        """Return the number of dropped duplicates."""
        return sum(origin["exact_duplicates"] + origin["near_duplicates"] for origin in self.origins)


def names() -> list[str]:
    """Return the names of the embedded sets, sorted."""
    return sorted(file.stem for file in assets.path("data", "prompts").glob("*.jsonl"))


def describe() -> list[dict[str, Any]]:
    """Describe all sets: the embedded ones (`hub` is None), then the public ones with their recipes."""
    embedded = [{"name": name, "hub": None} for name in names()]
    return [*embedded, *({"name": name, **dataset_recipe.load(name).to_json()} for name in dataset_recipe.names())]


def load(sources: Sequence[str], *, max_prompts: int | None = None) -> list[Prompt]:
    """Return the prompts of the sources; see `gather`. Raises: MismatchError: a row is malformed."""
    gathered = gather(sources, max_prompts=max_prompts)
    if gathered.refused:
        raise MismatchError(gathered.refused[0])
    return gathered.prompts


def gather(
    sources: Sequence[str], *, max_prompts: int | None = None, options: DataOptions | None = None
) -> GatheredPrompts:
    """Collect the prompts of the sources, in their order; a source named twice counts once.

    Args:
        sources: names of embedded sets (`all` for all of them); names of public data sets, as `NAME` or `NAME:TASK`, or
            paths of recipes that end in `.toml`; paths of files: `.jsonl` with `prompt` and optionally `answer`, `task`
            and `id`; `.parquet` with the same columns; `.txt` with documents that end at a line `<|endoftext|>` or, if
            the first 16 MiB have no such line, at blank lines. A set's name takes precedence over a file's: write
            `./code` for the file.
        max_prompts: maximum prompts per source (per set with `all`, per task of a public data set): the first ones, or
            a choice by `options.seed` from a public data set. None takes all in order.

    Effects: public data sets are read from the hub unless `options.folder` is given.

    Raises:
        UsageError: there is no such set or file, its format is unknown, a number is invalid, or the hub refuses access
            to the data set.
        MismatchError: a file is empty or damaged, or has no well-formed row; other malformed rows are `refused`.
        MoetoolError: a file cannot be read, or the hub cannot be reached.
    """
    options = options or DataOptions()
    if not sources:
        raise UsageError(f"no data was named, expected a prompt set or a file; try --data {ALL}")
    if max_prompts is not None and max_prompts < 1:
        raise UsageError(f"--max-prompts is {max_prompts}, expected at least 1; leave it out for all prompts")
    embedded, public = names(), dataset_recipe.names()
    expanded = dict.fromkeys(name for source in sources for name in (embedded if source == ALL else [source]))
    seen = NearDuplicates(options.similarity) if options.duplicates == "drop" else None
    parts: list[_Source] = []
    for source in expanded:
        name, _, task = source.partition(":")
        if source in embedded:
            parts.append(_of_file(assets.path("data", "prompts", f"{source}.jsonl")))
        elif name in public or (name.endswith(".toml") and Path(name).expanduser().is_file()):
            parts += _of_dataset(name, task or options.task, max_prompts, options)
        else:
            parts.append(_of_file(_file(source, [*embedded, *public])))
    if (options.folder or options.task or options.split) and all("hub" not in part.origin for part in parts):
        raise UsageError(
            f"--data-dir, data.task and data.split are for public data sets, expected one of {', '.join(public)}"
        )
    if options.task and len({part.origin["source"] for part in parts if "hub" in part.origin}) > 1:
        raise UsageError(
            "data.task is for one public data set, and several are named; write NAME:TASK for each instead"
        )
    gathered = GatheredPrompts(prompts=[], origins=[], refused=[])
    for part in parts:
        _take(part, max_prompts, seen, gathered)
    return gathered


def tokens_to_decode(prompt: Prompt, tokenizer: Any, limit: int | None) -> int:
    """Return the token limit of a prompt's answer: its data set's, at most `limit`.

    Args:
        tokenizer: counts the tokens of the reference answer, where the data set uses its length.
        limit: the caller's limit (default: the data set's, else 32).
    """
    wanted = prompt.output
    if isinstance(wanted, str):
        wanted = len(tokenizer(prompt.answer or "", add_special_tokens=False)["input_ids"]) or None
    if wanted is None:
        wanted = NEW_TOKENS if limit is None else limit
    return wanted if limit is None else min(wanted, limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """A source of prompts.

    Attributes:
        prompts: prompts, each with the text for the comparison of duplicates: its own, or the values of its template;
            in place of a malformed row its error.
        origin: entry for the manifest; its counts grow as prompts are read.
        name: name for messages.
    """

    prompts: Iterator[tuple[Prompt, str] | MismatchError]
    origin: dict[str, Any]
    name: str


def _take(source: _Source, max_prompts: int | None, seen: NearDuplicates | None, gathered: GatheredPrompts) -> None:
    """Move the prompts of a source that are not duplicates to `gathered`."""
    before = (seen.num_exact, seen.num_near) if seen else (0, 0)
    taken: list[Prompt] = []
    refused: list[str] = []
    try:
        for row in source.prompts:
            if isinstance(row, MismatchError):
                refused.append(str(row))
                continue
            prompt, compared = row
            if seen is None or not seen.repeats(compared):
                taken.append(prompt)
                if len(taken) == max_prompts:
                    break
    except OSError as error:
        raise MoetoolError(f"cannot read {source.name}: {error.strerror or error}; choose another --data") from error
    exact, near = (seen.num_exact - before[0], seen.num_near - before[1]) if seen else (0, 0)
    if not taken and refused:
        raise MismatchError(refused[0])
    if not taken and exact + near:
        raise MismatchError(
            f"all {exact + near} prompts of {source.name} repeat earlier ones, expected new ones; leave it out, "
            "or give --set data.duplicates=keep"
        )
    if not taken:
        left_out = source.origin.get("incomplete", 0)
        why = f": {left_out} rows lack a field's value or are too short" if left_out else ""
        raise MismatchError(f"{source.name} holds no prompt{why}, expected at least one; choose another --data")
    gathered.prompts.extend(taken)
    gathered.refused.extend(refused)
    similarity = seen.similarity if seen else None
    gathered.origins.append(
        {
            **source.origin,
            "prompts": len(taken),
            "exact_duplicates": exact,
            "near_duplicates": near,
            "malformed": len(refused),
            "similarity": similarity,
        }
    )


def _of_dataset(name: str, task: str | None, max_prompts: int | None, options: DataOptions) -> list[_Source]:
    """Return the sources of a public data set: each of its tasks, or the named one."""
    recipe = dataset_recipe.load(name)
    dataset = Path(name).stem
    chosen = RowOptions(
        folder=options.folder,
        split=options.split,
        seed=options.seed if max_prompts is not None else None,
        buffer=options.buffer,
    )
    sources = []
    for config in (task,) if task else recipe.configs:
        origin = {
            "source": dataset,
            "hub": recipe.hub,
            "config": config,
            "split": chosen.split or recipe.split,
            "folder": str(options.folder) if options.folder else None,
            "licence": recipe.licence,
            "seed": chosen.seed,
            "buffer": chosen.buffer if chosen.seed is not None else None,
            "rows": 0,
            "incomplete": 0,
        }
        found = _read_dataset(dataset, recipe, config, chosen, origin)
        sources.append(_Source(prompts=found, origin=origin, name=f"{dataset}:{config}" if config else dataset))
    return sources


def _read_dataset(
    dataset: str, recipe: DatasetRecipe, config: str | None, options: RowOptions, origin: dict[str, Any]
) -> Iterator[tuple[Prompt, str]]:
    """Yield the prompts of the complete rows; `origin` counts the others."""
    split = options.split or recipe.split
    within = f"{config}/{split}" if recipe.tasks else split
    for number, row in enumerate(rows(dataset, recipe, config, options), start=1):
        origin["rows"] = number
        where = f"{dataset}, row {number}"
        if "prompt" in row and recipe.fields != ("prompt",) and not any(field in row for field in recipe.fields):
            found = plain(row, number, where)
            text, compared, answer, task = found.text, found.text, found.answer, found.task
            own_id = None if row.get("id") is None else found.prompt_id
        else:
            try:
                text, compared = dataset_recipe.fill(recipe.prompt, row, where)
            except dataset_recipe.Incomplete:
                origin["incomplete"] += 1
                continue
            answer, task, own_id = (_maybe(part, row, where) for part in (recipe.answer, recipe.task, recipe.id))
        if len(text.strip()) < recipe.min_chars:
            origin["incomplete"] += 1
            continue
        require_text(text, where)
        # Row numbers identify nothing in a shuffled order.
        prompt_id = own_id or hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        prompt = Prompt(
            dataset=dataset,
            task=task or (config if recipe.tasks and config else dataset),
            prompt_id=f"{within}/{prompt_id}",
            text=text,
            answer=answer,
            output=recipe.output,
            input_tokens=recipe.input_tokens,
        )
        yield prompt, compared


def _maybe(template: str | None, row: Mapping[str, Any], where: str) -> str | None:
    """Return the filled template; None where there is none or the row is incomplete."""
    if template is None:
        return None
    try:
        return dataset_recipe.fill(template, row, where)[0]
    except dataset_recipe.Incomplete:
        return None


def _of_file(file: Path) -> _Source:
    def read() -> Iterator[tuple[Prompt, str] | MismatchError]:
        for row in READERS[file.suffix.lower()](file):
            if isinstance(row, MismatchError):
                yield row
            else:
                yield Prompt(dataset=file.stem, **{**row._asdict(), "task": row.task or file.stem}), row.text

    return _Source(prompts=read(), origin={"source": file.stem}, name=str(file))


def _file(source: str, known: Sequence[str]) -> Path:
    file = Path(source).expanduser()
    if not file.exists():
        if file.suffix or file.name != source:
            raise UsageError(f"no file at {source}, expected prompts as {_FORMATS}; or use --data {ALL}")
        raise unknown_name("dataset", source, [ALL, *known])
    if not file.is_file() or file.suffix.lower() not in READERS:
        found = "a directory" if file.is_dir() else f"of format {file.suffix or 'unknown'!r}"
        raise UsageError(f"{source} is {found}, expected a file that ends in {_FORMATS}; convert it and try again")
    require_itself(file)
    return file
