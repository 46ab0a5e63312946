"""Import of foreign files of routes or counts into a trace, or a folder of counts."""

import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from moetool import __version__
from moetool.base import config, durable, plugins
from moetool.base.bounded_read import require_itself
from moetool.base.errors import MismatchError, Problems, UsageError, unknown_name
from moetool.base.tables import numbered
from moetool.base.types import ModelSpec, Phase
from moetool.trace import expert_counts
from moetool.trace.expert_counts import Counted
from moetool.trace.foreign.detection import guess
from moetool.trace.foreign.import_settings import FindModel, Settings, no_model
from moetool.trace.foreign.remote_files import downloaded, is_address
from moetool.trace.foreign.routes import Routes, RouteSequence
from moetool.trace.reader import MANIFEST
from moetool.trace.rows import TokenBatch
from moetool.trace.writer import TraceWriter

DATASET = "routes"
TOKENS_AS = ("decode", "prefill", "answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """Result of an import.

    Attributes:
        out: folder of the trace or the counts.
        kind: `trace` or `counts`.
        model: name and revision of its spec.
        tasks: one per file, or those in the files.
        requests: number of requests; for counts, of passes.
        bytes: size of the folder.
        format: the format that was read.
        guessed: reason for the detected format; empty where it was given.
        notes: missing data, and values that differ from those in the files.
    """

    out: Path
    kind: str
    format: str
    guessed: str | None
    model: str
    revision: str
    tasks: list[str]
    requests: int
    tokens: int
    bytes: int
    notes: list[str]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "out": str(self.out)}


def formats_with(*functions: str) -> list[str]:
    """Return the formats whose modules have one of these functions (`moetool.trace.foreign.routes` lists them)."""
    return [name for name in plugins.names("format") if _has(plugins.load("format", name), functions)]


def _has(module: ModuleType, functions: Sequence[str]) -> bool:
    return any(hasattr(module, function) for function in functions)


def import_trace(
    files: Sequence[Path | str],
    format: str | None,
    out: Path,
    *,
    tokens_as: str | None = None,
    settings: Mapping[str, Any] | None = None,
    mapping: Mapping[str, str] | None = None,
    find_model: FindModel = no_model,
    overwrite: bool = False,
) -> Imported:
    """Write the routes of one or more files of one model as a trace, or their counts as a folder of counts.

    Args:
        files: one file per task; for counts, the files of one recording. Addresses such as `hf://datasets/org/name`
            are downloaded (`moetool.trace.foreign.remote_files`).
        format: one of `formats_with("read_routes", "read_counts")`, or the dotted name of such a module; None detects
            it.
        tokens_as: phase of sequences without a marked prompt: `decode` (the first token is the prompt, each later one
            an iteration; the default), `prefill` (all tokens are the prompt) or `answer` (all are new tokens; the
            prompt was not recorded).
        settings: facts about the model, by the names of `Settings`.
        mapping: column of each field, for formats with `TAKES_MAP`.
        find_model: finds the model that `settings` names (`moetool.models.shape.shape_of`).

    Raises:
        UsageError: a file or address does not exist, or the format is unknown or cannot be detected; a sequence of a
            task occurs twice; `out` exists; a fact about the model is neither in the file nor given; or `tokens_as` is
            given for files with marked prompts.
        MoetoolError: an address cannot be read.
        MismatchError: a file is damaged or of another format, or the files are of different models.
    """
    durable.require_absent(out, overwrite, MANIFEST)
    if not files:
        raise UsageError("nothing to import; give the path of a file of routes or counts")
    given = dict(settings or {})
    if isinstance(size := given.get("expert_bytes"), str):
        with Problems() as problems, problems.of("--set expert_bytes: "):
            given["expert_bytes"] = config.parse_bytes(size)
    said = config.parse(Settings, given, "--set")
    if tokens_as not in (None, *TOKENS_AS):
        raise unknown_name("--as", tokens_as, TOKENS_AS)
    addresses = [str(file) for file in files if is_address(file)]
    with downloaded(files) as local:
        reader, format, guessed = _reader(local, format, mapping)
        provenance = {
            "imported": {
                "format": format,
                **({"guessed": guessed} if guessed else {}),
                **({"addresses": addresses} if addresses else {}),
                "settings": {name: value for name, value in asdict(said).items() if value not in (None, False)},
            },
            "versions": {"moetool": __version__},
        }
        more = {"mapping": mapping} if getattr(reader, "TAKES_MAP", False) else {}
        facts = said.facts(find_model)
        if hasattr(reader, "read_counts"):
            if tokens_as or said.task:
                raise UsageError(f"{format} holds counts without tokens; leave out --as and --set task")
            with _naming(format, guessed):
                counts = reader.read_counts(local, facts, **more)
            return _write_counts(counts, local, out, provenance, overwrite)
        with _naming(format, guessed):
            sources = [(file, _sha256(file), reader.read_routes(file, facts, **more)) for file in local]
        _check_sources(sources, said.task, tokens_as)
        return _write_routes(sources, said, tokens_as, out, provenance, overwrite)


@contextmanager
def _naming(format: str, guessed: str | None) -> Iterator[None]:
    """Add a detected format to the error of its reader, since another format may be the right one."""
    try:
        yield
    except MismatchError as error:
        if guessed is None:
            raise
        raise MismatchError(f"{error} (read as {format}: {guessed}; --format chooses another)") from None


def _reader(
    files: Sequence[Path], format: str | None, mapping: Mapping[str, str] | None
) -> tuple[ModuleType, str, str | None]:
    """Return the module that reads these files, its name, and the reason for it if it was detected."""
    for file in files:
        for part in _files_in(file):
            require_itself(part)
    guessed = None
    if format is None and mapping:
        format = "column_counts" if "count" in mapping else "columns"
    elif format is None:
        format, guessed = _guess(files)
    reader = plugins.load("format", format)
    if not _has(reader, ("read_routes", "read_counts")):
        raise unknown_name("format of routes", format, formats_with("read_routes", "read_counts"))
    folders = getattr(reader, "READS_FOLDERS", False)
    for file in files:
        if not (file.is_dir() if folders else file.is_file()):
            if file.is_dir():
                raise UsageError(f"{file} is a directory, but {format} needs files: give them, as in {file}/*")
            raise UsageError(f"no {'directory' if folders else 'file'} at {file}; give the path of a {format} file")
    if mapping and not getattr(reader, "TAKES_MAP", False):
        raise UsageError(f"{format} has fixed columns; leave out --map, or use --format columns")
    return reader, format, guessed


def _guess(files: Sequence[Path]) -> tuple[str, str]:
    """Return the format of all files, and the reason for the first."""
    found = {file: guess(file) for file in files}
    first = found[files[0]]
    for file, other in found.items():
        if other.format != first.format:
            raise UsageError(
                f"{files[0]} looks like {first.format} ({first.reason}) and {file} like {other.format} "
                f"({other.reason}); import them one by one"
            )
    return first.format, first.reason


def _sha256(path: Path) -> str | dict[str, str]:
    """Return the digest of a file, or of each file in a folder."""
    if path.is_file():
        return durable.sha256_file(path)
    return {file.relative_to(path).as_posix(): durable.sha256_file(file) for file in _files_in(path)}


def _files_in(path: Path) -> list[Path]:
    return [file for file in (path, *sorted(path.rglob("*"))) if file.is_file()]


_Source = tuple[Path, Any, Routes]


def _check_sources(sources: Sequence[_Source], task: str | None, tokens_as: str | None) -> None:
    first, _, routes = sources[0]
    names: dict[tuple[str, str], int] = {}
    for i, (file, _, other) in enumerate(sources):
        routes.spec.require_same(other.spec, str(first), str(file))
        if not other.sequences:
            raise MismatchError(f"{file} has no request, expected some; record again")
        if tokens_as and any(sequence.prompt_tokens is not None for sequence in other.sequences):
            raise UsageError(f"{file} marks prompts and new tokens itself; leave out --as")
        for sequence in other.sequences:
            key = (sequence.task or task or other.task, sequence.name)
            if key in names:
                twin = sources[names[key]][0]
                raise UsageError(
                    f"{file} and {twin} both have the sequence {key[1]!r} of the task {key[0]!r}; give each file once, "
                    f"and import files of one task one by one"
                )
            names[key] = i


def _unknown_size(spec: ModelSpec) -> list[str]:
    if spec.sized:
        return []
    return ["the size of an expert is unknown: memory is a share of the experts, such as 25%; --set expert_bytes tells"]


def _twins(sources: Sequence[_Source]) -> list[str]:
    """Return warnings of files with equal routes, such as those of the ranks of one tensor-parallel group."""
    seen: dict[bytes, Path] = {}
    found = []
    for file, _, routes in sources:
        content = hashlib.sha256()
        for sequence in routes.sequences:
            content.update(sequence.experts_TS.tobytes())
        if (twin := seen.setdefault(content.digest(), file)) is not file:
            found.append(f"{file.name} holds the same routes as {twin.name}: if they are ranks of one group, give one")
    return found


def _write_routes(
    sources: Sequence[_Source],
    said: Settings,
    tokens_as: str | None,
    out: Path,
    provenance: dict[str, Any],
    overwrite: bool,
) -> Imported:
    spec = sources[0][2].spec
    every = [sequence for _, _, routes in sources for sequence in routes.sequences]
    weights = all(sequence.weights_TS is not None for sequence in every)
    logits = all(sequence.logits_TF is not None for sequence in every)
    notes = list(dict.fromkeys(note for _, _, routes in sources for note in routes.notes)) + _twins(sources)
    if any(sequence.new_tokens is None for sequence in every):
        notes.append(
            "new tokens are counted by their rows; the last token of an answer is never forwarded and has none"
        )
    notes += _unknown_size(spec)
    unrecorded = sum(_prompt_tokens(sequence, tokens_as) == 0 for sequence in every)
    if unrecorded:
        notes.append(f"prompt not recorded of {numbered(unrecorded, 'request')}: the file holds new tokens only")
    tasks: list[str] = []
    with durable.staged_directory(out, overwrite, MANIFEST) as folder:
        with TraceWriter(folder, spec, ["topk", *(["logits"] if logits else [])], weights=weights) as writer:
            requests = forwards = tokens = 0
            for _, _, routes in sources:
                batches = []
                for sequence in routes.sequences:
                    prompt, num_tokens = _prompt_tokens(sequence, tokens_as), len(sequence.experts_TS)
                    about = sequence.task or said.task or routes.task
                    tasks += [] if about in tasks else [about]
                    new_tokens = sequence.new_tokens
                    writer.add_request(
                        requests,
                        dataset=DATASET,
                        task=about,
                        prompt_id=f"{about}/{sequence.name}",
                        prompt_tokens=prompt,
                        new_tokens=num_tokens - prompt if new_tokens is None else new_tokens,
                    )
                    batches.append(_rows(sequence, requests, forwards, prompt))
                    if said.drop_tokens:
                        batches[-1].token_id_T = np.full(num_tokens, -1, np.int32)
                    if sequence.forward_T is None:
                        forwards = int(batches[-1].forward_T[-1]) + 1
                    requests, tokens = requests + 1, tokens + num_tokens
                for batch in _by_forward(batches):
                    writer.append(batch)
                    forwards = max(forwards, int(batch.forward_T[-1]) + 1)
            as_ran = any(sequence.forward_T is not None for sequence in every)
            told = all(sequence.prompt_tokens is not None for sequence in every)
            imported = {
                **provenance["imported"],
                "as": None if told else tokens_as or TOKENS_AS[0],
                "files": [
                    {"name": file.name, "sha256": sha256, "task": routes.task, "sequences": len(routes.sequences)}
                    for file, sha256, routes in sources
                ],
                "notes": notes,
            }
            writer.finish(
                composition={"kind": "log" if as_ran else "sequential"},
                provenance={"model": spec.name, **provenance, "imported": imported},
            )
        return _imported(out, folder, spec, imported, tasks=tasks, requests=requests, tokens=tokens)


def _write_counts(
    counted: Counted, files: Sequence[Path], out: Path, provenance: dict[str, Any], overwrite: bool
) -> Imported:
    only = "counts only: enough to plan and score a placement, not for replay"
    notes = [*counted.notes, *_unknown_size(counted.spec), only]
    imported = {
        **provenance["imported"],
        "files": [{"name": file.name, "sha256": _sha256(file)} for file in files],
        "notes": notes,
    }
    spec = counted.spec
    with durable.staged_directory(out, overwrite, MANIFEST) as folder:
        expert_counts.write_counts(folder, counted, {"model": spec.name, **provenance, "imported": imported})
        tokens = int(counted.counts_WLE.sum()) // sum(spec.top_k_L)
        return _imported(out, folder, spec, imported, tasks=None, requests=len(counted.counts_WLE), tokens=tokens)


def _imported(
    out: Path,
    folder: Path,
    spec: ModelSpec,
    provenance: Mapping[str, Any],
    *,
    tasks: list[str] | None,
    requests: int,
    tokens: int,
) -> Imported:
    """Return the result of writing a staged folder: a trace, or counts where `tasks` is None."""
    return Imported(
        out=out,
        kind="counts" if tasks is None else "trace",
        format=provenance["format"],
        guessed=provenance.get("guessed"),
        model=spec.name,
        revision=spec.revision,
        tasks=tasks or [],
        requests=requests,
        tokens=tokens,
        bytes=sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()),
        notes=provenance["notes"],
    )


def _prompt_tokens(sequence: RouteSequence, tokens_as: str | None) -> int:
    if sequence.prompt_tokens is not None:
        return sequence.prompt_tokens
    return {"prefill": len(sequence.experts_TS), "answer": 0}.get(tokens_as or "", 1)


def _rows(sequence: RouteSequence, request: int, first_forward: int, prompt_tokens: int) -> TokenBatch:
    """Return rows with the prompt in one forward and each new token in its own, unless the file has forwards."""
    num_tokens = len(sequence.experts_TS)
    place_T = np.arange(num_tokens, dtype=np.int32)
    iteration_T = np.maximum(place_T - (prompt_tokens - 1), 0).astype(np.int32)
    told = {name: getattr(sequence, name) for name in ("position_T", "token_id_T", "forward_T")}
    return TokenBatch(
        request_T=np.full(num_tokens, request, np.int32),
        forward_T=first_forward + (iteration_T if told["forward_T"] is None else told["forward_T"]),
        phase_T=np.where(iteration_T == 0, Phase.PREFILL, Phase.DECODE).astype(np.uint8),
        iteration_T=iteration_T,
        position_T=place_T if told["position_T"] is None else told["position_T"].astype(np.int32),
        token_id_T=np.full(num_tokens, -1, np.int32) if told["token_id_T"] is None else told["token_id_T"],
        experts_TS=sequence.experts_TS,
        weights_TS=sequence.weights_TS,
        logits_TF=sequence.logits_TF,
    )


def _by_forward(batches: Sequence[TokenBatch]) -> Iterator[TokenBatch]:
    """Yield the rows of sequences in the order of their forwards."""
    starts = [int(batch.forward_T[0]) for batch in batches]
    ends = [int(batch.forward_T[-1]) for batch in batches]
    if all(end < start for end, start in zip(ends, starts[1:], strict=False)):
        yield from batches
        return
    rows = TokenBatch.concatenate(batches)
    rows = rows.select(np.argsort(rows.forward_T, kind="stable"))
    cuts = [0, *(np.flatnonzero(np.diff(rows.forward_T)) + 1).tolist(), len(rows)]
    for start, end in itertools.pairwise(cuts):
        yield rows.select(slice(start, end))
