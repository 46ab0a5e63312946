"""Rows of a data set, streamed from the Hugging Face hub or from a copy on disk.

A copy is a folder as on the hub (`main/test-00000-of-00001.parquet`), one saved by `datasets`, or files named by their
split or task (`test.jsonl`, `arithmetic.jsonl`). Formats are Parquet, JSON, JSON lines, CSV and Arrow, as
`datasets.load_dataset` reads them. Only this module imports `datasets`.
"""

import glob
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moetool.base.errors import MismatchError, MoetoolError, UsageError, first_line, unknown_name
from moetool.prompts import dataset_recipe
from moetool.prompts.dataset_recipe import DatasetRecipe

_FORMATS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".csv": "csv", ".arrow": "arrow"}
# Files that describe a copy and hold no rows.
_NO_ROWS = frozenset({"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "metadata.json"})
_SPLITS = {"train": "train", "validation": "validation", "valid": "validation", "dev": "validation", "test": "test"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RowOptions:
    """Choice and order of rows.

    Attributes:
        folder: folder of the copy; None reads from the hub.
        split: split to read (default: the recipe's).
        seed: seed of the shuffle; None keeps the order.
        buffer: rows in the shuffle buffer. The order of the hub's files is shuffled too, but a set with more rows is
            not shuffled evenly.
    """

    folder: Path | None = None
    split: str | None = None
    seed: int | None = None
    buffer: int = 10_000

    def __post_init__(self) -> None:
        if self.buffer < 1:
            raise UsageError(f"data.buffer is {self.buffer} rows, expected at least 1 (1 keeps the order)")


def rows(name: str, recipe: DatasetRecipe, config: str | None, options: RowOptions) -> Iterator[dict[str, Any]]:
    """Yield the rows of one config.

    Args:
        name: name of the data set, for messages.

    Effects: imports `datasets`; without a folder, streams from the hub as far as rows are consumed.

    Raises:
        UsageError: the hub or the folder has no such data set, config or split, or refuses access.
        MismatchError: a file is damaged, or has no rows.
        MoetoolError: the hub cannot be reached.
    """
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # its errors repeat the exception
    where = recipe.hub if options.folder is None else str(options.folder)
    try:
        if options.folder is None:
            stream = _from_hub(recipe, config, options.split or recipe.split)
        else:
            stream = _from_folder(name, recipe, config, options.folder, options.split or recipe.split)
        if options.seed is not None and options.buffer > 1:
            stream = stream.shuffle(seed=options.seed, buffer_size=options.buffer)
        iterator = iter(stream)
    except Exception as error:  # the hub and the readers of files raise dozens of types
        raise _refusal(name, recipe, config, options, where, error) from error
    while True:
        try:
            row = next(iterator, None)
        except Exception as error:
            raise _refusal(name, recipe, config, options, where, error) from error
        if row is None:
            return
        yield row


def _from_hub(recipe: DatasetRecipe, config: str | None, split: str) -> Any:
    import datasets

    if recipe.files is None:
        return datasets.load_dataset(recipe.hub, config, split=split, streaming=True)
    if split != recipe.split and "{split}" not in recipe.files:
        raise UsageError(f"{recipe.hub} has the split {recipe.split} alone, expected {split}; leave out data.split")
    files = recipe.files.format(split=split)
    builder = _FORMATS[Path(files).suffix]
    return datasets.load_dataset(
        builder, data_files=f"hf://datasets/{recipe.hub}/{files}", split="train", streaming=True
    )


def _from_folder(name: str, recipe: DatasetRecipe, config: str | None, folder: Path, split: str) -> Any:
    import datasets

    if config is not None and Path(config).name != config:
        raise UsageError(f"{config!r} is not a task name, expected one without a path; 'moetool data' lists some")
    if not folder.is_dir():
        raise UsageError(f"no directory at {folder}, expected a copy of {recipe.hub}; give another --data-dir")
    root = next(
        (place for place in (folder / name / (config or ""), folder / name, folder / (config or "")) if place.is_dir()),
        folder,
    )
    others = sorted({place.name for place in folder.iterdir()} & set(dataset_recipe.names()))
    if root == folder and others:
        raise UsageError(f"{folder} has {', '.join(others)}, expected a directory {name} beside them; copy it there")
    if (root / "dataset_dict.json").is_file() or (root / "state.json").is_file():
        saved = datasets.load_from_disk(str(root))
        if isinstance(saved, dict):
            if split not in saved:
                raise _no_split(root, list(saved), split)
            saved = saved[split]
        return saved.to_iterable_dataset()
    files = _files(root, recipe, config, split)
    formats = sorted({_FORMATS[file.suffix.lower()] for file in files})
    if len(formats) > 1:
        raise UsageError(f"{root} has {split} rows as {' and as '.join(formats)}, expected one format; move the others")
    return datasets.load_dataset(
        formats[0], data_files=[glob.escape(str(file)) for file in files], split="train", streaming=True
    )


def _files(root: Path, recipe: DatasetRecipe, config: str | None, split: str) -> list[Path]:
    """Return the files under a folder that hold the rows."""
    found = sorted(
        file
        for file in root.rglob("*")
        if file.suffix.lower() in _FORMATS
        and file.name not in _NO_ROWS
        and not any(part.startswith(".") for part in file.relative_to(root).parts)
        and file.is_file()
    )
    if not found:
        raise UsageError(f"{root} has no file that ends in {', '.join(_FORMATS)}; put a copy of {recipe.hub} there")
    if recipe.files is not None and (
        listed := [file for file in found if file.match(recipe.files.format(split=split))]
    ):
        found = listed
    if config is not None:
        named = [file for file in found if config.lower() in _labels(file.relative_to(root))]
        # Without a match by name, files outside named folders count as a copy of this config alone.
        alone = [file for file in found if {*file.relative_to(root).parts[:-1]} <= {"data", *_SPLITS}]
        if not named and root.name != config and (config != recipe.config or recipe.tasks or not alone):
            known = {file.stem for file in alone} or {file.relative_to(root).parts[0] for file in found}
            raise unknown_name(f"task or config of {root}:", config, known)
        found = named or alone or found
    splits = {file: next((_SPLITS[s] for s in _SPLITS if s in _words(file.relative_to(root))), None) for file in found}
    wanted = [file for file in found if splits[file] == split] or [file for file in found if splits[file] is None]
    if not wanted:
        raise _no_split(root, sorted({found for found in splits.values() if found is not None}), split)
    if empty := next((file for file in wanted if not file.stat().st_size), None):
        raise MismatchError(f"{empty} is empty, expected rows of {recipe.hub}; copy it again")
    return wanted


def _labels(path: Path) -> set[str]:
    """Return possible configs of a file: its folders' names, and its own without split and number."""
    *folders, _ = path.parts
    stem = path.name[: -len(path.suffix)].lower()
    plain = re.sub(r"([-_.](\d[\d-]*(of[-_]\d+)?|of|" + "|".join(_SPLITS) + "))+$", "", stem)
    return {*(folder.lower() for folder in folders), stem, plain}


def _words(path: Path) -> set[str]:
    """Return the names of a path's folders and file, and the parts of the file's name."""
    *folders, _ = path.parts
    stem = path.name[: -len(path.suffix)].lower()
    return {*(folder.lower() for folder in folders), stem, *re.split(r"[^a-z]+", stem), re.sub(r"[-_.]\d.*$", "", stem)}


def _no_split(root: Path, found: list[str], split: str) -> UsageError:
    return UsageError(
        f"{root} has the split {' and '.join(found)}, expected {split}; give --set data.split={found[0]} to read that"
    )


def _refusal(
    name: str, recipe: DatasetRecipe, config: str | None, options: RowOptions, where: str, error: Exception
) -> MoetoolError:
    """Return the error to raise for an exception of the hub or of a file reader."""
    if isinstance(error, MoetoolError):
        return error
    reason = first_line(error)
    if options.folder is not None:
        return MismatchError(f"cannot read {name} in {where} ({reason}), expected rows of {recipe.hub}; copy it again")
    copy = f"give a copy with --data-dir DIR, made by: hf download {recipe.hub} --repo-type dataset --local-dir DIR"
    terms = f"accept its terms on https://huggingface.co/datasets/{recipe.hub}, then run: hf auth login"
    if "gated" in reason.lower() or (recipe.gated and re.search(r"\b40[13]\b|cannot be accessed", str(error))):
        return UsageError(
            f"{name} ({recipe.hub}) is gated, and the hub does not give it ({reason.rstrip('.')}): {terms}; or {copy}"
        )
    if isinstance(error, ValueError) and re.search(r"BuilderConfig|Config name|Bad split|Unknown split", str(error)):
        asked = f"config {config} and split {options.split or recipe.split}"
        return UsageError(f"{name} ({recipe.hub}) has no {asked} ({reason}); see --set data.task and data.split")
    if type(error).__name__ in ("DatasetNotFoundError", "RepositoryNotFoundError"):
        return UsageError(f"the hub has no {recipe.hub}, or hides it ({reason.rstrip('.')}); {copy}")
    if isinstance(error, OSError) or type(error).__module__.startswith(("httpx", "httpcore", "huggingface_hub")):
        offline = "OfflineModeIsEnabled" in reason or "offline mode" in reason.lower()
        why = "HF_HUB_OFFLINE is set" if offline else reason
        first = "".join([f"it is gated: {terms}; " if recipe.gated else "", "unset that, or " if offline else ""])
        return MoetoolError(f"cannot get {name} from the hub ({why}); {first}{copy}")
    return MismatchError(f"cannot read {name} ({recipe.hub}) from the hub ({reason}), expected rows; {copy}")
