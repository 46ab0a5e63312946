"""Foreign files of routes -> Trace."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moetool import __version__, durable, plugins
from moetool.errors import UsageError, unknown_name
from moetool.routes import Routes, RouteSequence
from moetool.trace import MANIFEST, TokenBatch
from moetool.trace_writer import TraceWriter
from moetool.types import Phase

DATASET = "routes"
TOKENS_AS = ("decode", "prefill")


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """What an import wrote.

    Attributes:
        out: folder of the trace.
        model: name and revision that the trace's spec has.
        tasks: one a file.
        bytes: size of the folder.
        notes: what the files lack, and what is not as in the files.
    """

    out: Path
    model: str
    revision: str
    tasks: list[str]
    requests: int
    tokens: int
    bytes: int
    notes: list[str]

    def to_json(self) -> dict[str, Any]:
        """A JSON object."""
        return {**asdict(self), "out": str(self.out)}


def route_formats() -> list[str]:
    """The formats that hold routes; others of `moetool.formats` hold plans."""
    return [name for name in plugins.names("format") if hasattr(plugins.load("format", name), "read_routes")]


def import_trace(
    files: Sequence[Path], format: str, out: Path, *, tokens_as: str | None = None, overwrite: bool = False
) -> Imported:
    """Write the routes of one or more files of one model as a trace.

    Args:
        files: a task each.
        format: one of `route_formats`, or the dotted name of a module with `read_routes`.
        tokens_as: of sequences whose prompt the file does not tell: `decode` (the first token is the prompt, each
            later one an iteration; the default) or `prefill` (all tokens are the prompt).

    Raises:
        UsageError: a file is not there, an unknown format, two files of one task, `out` exists, or `tokens_as` is
            given for files that tell the prompt.
        MismatchError: a file is damaged or of another format, or the files are of different models.
    """
    durable.require_absent(out, overwrite, MANIFEST)
    reader = plugins.load("format", format)
    if not hasattr(reader, "read_routes"):
        raise unknown_name("format of routes", format, route_formats())
    if tokens_as not in (None, *TOKENS_AS):
        raise unknown_name("--as", tokens_as, TOKENS_AS)
    sources: list[tuple[Path, str, Routes]] = []
    for file in files:
        if not file.is_file():
            raise UsageError(f"no file at {file}; give the path of a {format} file")
        sources.append((file, durable.sha256_file(file), reader.read_routes(file)))
    if not sources:
        raise UsageError(f"nothing to import; give the path of a {format} file")
    spec = sources[0][2].spec
    for i, (file, _, routes) in enumerate(sources):
        spec.require_same(routes.spec, str(files[0]), str(file))
        if twin := next((other for other, _, r in sources[:i] if r.task == routes.task), None):
            raise UsageError(f"{file} and {twin} are both of the task {routes.task!r}; import them one by one")
        if tokens_as and any(sequence.prompt_tokens is not None for sequence in routes.sequences):
            raise UsageError(f"{file} tells the prompt from new tokens itself; leave out --as")
    notes = list(dict.fromkeys(note for _, _, routes in sources for note in routes.notes))
    with durable.staged_directory(out, overwrite, MANIFEST) as folder:
        writer = TraceWriter(folder, spec, ["topk"])
        try:
            requests = forwards = tokens = 0
            for _, _, routes in sources:
                for sequence in routes.sequences:
                    prompt = _prompt_tokens(sequence, tokens_as)
                    num_tokens = len(sequence.experts_TS)
                    writer.add_request(
                        requests,
                        dataset=DATASET,
                        task=routes.task,
                        prompt_id=f"{routes.task}/{sequence.name}",
                        prompt_tokens=prompt,
                        new_tokens=num_tokens - prompt,
                    )
                    batch = _rows(sequence, requests, forwards, prompt)
                    writer.append(batch)
                    requests, forwards = requests + 1, int(batch.forward_T[-1]) + 1
                    tokens += num_tokens
            provenance = {
                "model": spec.name,
                "imported": {
                    "format": format,
                    "as": None if _told(sources) else tokens_as or TOKENS_AS[0],
                    "files": [
                        {"name": file.name, "sha256": sha256, "task": routes.task, "sequences": len(routes.sequences)}
                        for file, sha256, routes in sources
                    ],
                    "notes": notes,
                },
                "versions": {"moetool": __version__},
            }
            writer.finish(composition={"kind": "sequential"}, provenance=provenance)
        except BaseException:
            writer.abort()
            raise
        num_bytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return Imported(
        out=out,
        model=spec.name,
        revision=spec.revision,
        tasks=[routes.task for _, _, routes in sources],
        requests=requests,
        tokens=tokens,
        bytes=num_bytes,
        notes=notes,
    )


def _told(sources: Sequence[tuple[Path, str, Routes]]) -> bool:
    """Whether the files tell each prompt themselves."""
    return all(sequence.prompt_tokens is not None for _, _, routes in sources for sequence in routes.sequences)


def _prompt_tokens(sequence: RouteSequence, tokens_as: str | None) -> int:
    if sequence.prompt_tokens is not None:
        return sequence.prompt_tokens
    return len(sequence.experts_TS) if tokens_as == "prefill" else 1


def _rows(sequence: RouteSequence, request: int, first_forward: int, prompt_tokens: int) -> TokenBatch:
    """The prompt in one forward, then a forward for each new token."""
    num_tokens = len(sequence.experts_TS)
    position_T = np.arange(num_tokens, dtype=np.int32)
    iteration_T = np.maximum(position_T - (prompt_tokens - 1), 0).astype(np.int32)
    return TokenBatch(
        request_T=np.full(num_tokens, request, np.int32),
        forward_T=first_forward + iteration_T,
        phase_T=np.where(iteration_T == 0, Phase.PREFILL, Phase.DECODE).astype(np.uint8),
        iteration_T=iteration_T,
        position_T=position_T,
        token_id_T=np.full(num_tokens, -1, np.int32),
        experts_TS=sequence.experts_TS,
        weights_TS=sequence.weights_TS,
    )
