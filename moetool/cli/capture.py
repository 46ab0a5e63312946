"""The command `moetool capture`."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moetool.base import tables
from moetool.base.config import MOST_THREADS, parse, parse_settings
from moetool.base.errors import MismatchError, UsageError
from moetool.cli.flags import (
    Json,
    Model,
    Out,
    Overwrite,
    Recipe,
    Revision,
    ServedDevice,
    ServedHostMemory,
    listed,
    memory_bytes,
    note,
    settable,
)
from moetool.models.files.hub import with_revision

if TYPE_CHECKING:
    from moetool.capture.run import Captured
    from moetool.prompts.gather import Prompt


def capture(
    model: Model,
    data: Annotated[
        list[str],
        typer.Option(
            help="Prompt sets: embedded or public names ('moetool data' lists them), 'all', or JSONL, CSV, "
            "Parquet or text files. Repeatable."
        ),
    ],
    out: Out,
    data_dir: Annotated[
        Path | None,
        typer.Option(help="Local copy of the public prompt sets (default: download from the Hugging Face hub)."),
    ] = None,
    max_prompts: Annotated[int | None, typer.Option(min=1, help="Prompts per source (default: all).")] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            min=0, help="Maximum tokens to decode per prompt; 0: prompts only (default: the public set's, else 32)."
        ),
    ] = None,
    answers: Annotated[
        bool, typer.Option("--answers", help="Forward the data's own answers with the prompts instead of decoding.")
    ] = False,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Prompts that run together (default: as many as memory allows).")
    ] = None,
    keep: Annotated[
        str,
        typer.Option(
            help="Columns to record, comma-separated: topk, logits, embeddings, hidden, ahead, resident, scores, "
            "logits32, norms, text (see 'moetool guide traces')."
        ),
    ] = "topk,logits",
    ahead: Annotated[int, typer.Option(min=1, help="Distance of column 'ahead', in layers.")] = 3,
    resident: Annotated[
        float, typer.Option(help="Share of a layer's experts assumed resident in column 'resident', 0 to 1.")
    ] = 0.5,
    dtype: Annotated[
        str | None, typer.Option(help="Compute dtype: float32, bfloat16 or float16 (default: the checkpoint's).")
    ] = None,
    threads: Annotated[int, typer.Option(min=0, max=MOST_THREADS, help="Compute threads (0: automatic).")] = 0,
    device_memory: Annotated[
        str | None, typer.Option(help="Memory for weights, KV cache and experts, e.g. 16GB (default: what is free).")
    ] = None,
    device: ServedDevice = None,
    host_memory: ServedHostMemory = None,
    io_threads: Annotated[
        int | None, typer.Option(min=1, max=MOST_THREADS, help="Threads that read experts (default: 2, 4 on a GPU).")
    ] = None,
    policy: Annotated[str | None, typer.Option(help="Cache policy (default: lru, equal slots per layer).")] = None,
    workers: Annotated[
        int, typer.Option(min=1, max=MOST_THREADS, help="Worker processes that share the batches, one thread each.")
    ] = 1,
    cluster: Annotated[
        str | None,
        typer.Option(
            help="HOST:PORT of a Ray head whose nodes share the batches; local:N is like --workers N "
            "(see 'moetool guide traces')."
        ),
    ] = None,
    settings: Annotated[
        list[str], settable("Further setting: data.task, data.split, data.seed, data.duplicates=keep, ...")
    ] = [],
    server: Annotated[
        str | None,
        typer.Option(help="URL of a running vLLM or SGLang server that returns routed experts, e.g. http://HOST:8000."),
    ] = None,
    server_key: Annotated[str | None, typer.Option(help="API key of --server.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume an interrupted capture.")] = False,
    overwrite: Overwrite = False,
    as_json: Json = False,
    revision: Revision = None,
    recipe: Recipe = None,
) -> None:
    """Run a model over prompts and record its gate logits, token by token."""
    from moetool.prompts import gather as prompts

    if answers and server is not None:
        raise UsageError("--answers forwards given answers, but --server decodes; leave one out")
    if workers > 1:
        if cluster is not None:
            raise UsageError(f"--workers {workers} and --cluster {cluster} both share the batches; give one of them")
        cluster = f"local:{workers}"
    if cluster is not None:
        shares = f"--workers {workers}" if workers > 1 else f"--cluster {cluster}"
        if server is not None:
            raise UsageError(f"{shares} shares the forwards of this tool's model, but --server forwards; leave one out")
    model = with_revision(model, revision)
    values = parse_settings(settings)
    wanted = values.pop("data", {})
    if data_dir is not None and isinstance(wanted, dict):
        wanted = {**wanted, "folder": data_dir}
    chosen = parse(prompts.DataOptions, wanted, "data")
    if values:
        raise UsageError(
            f"--set {next(iter(values))!r} is not an option of capture, expected data.NAME, as in data.seed=1"
        )
    gathered = prompts.gather(listed(data), max_prompts=max_prompts, options=chosen)
    texts = gathered.prompts
    if gathered.duplicates:
        tables.narrate(f"moetool: prompts left out, because they repeat others: {gathered.duplicates:,}")
    if gathered.refused:
        from moetool.capture.run import left_out

        for line in left_out(gathered.refused):
            note(line)
    if server is not None:
        if max_new_tokens == 0:
            raise UsageError("--max-new-tokens 0 is not possible with --server, whose answers have at least one token")
        _from_server(
            server, server_key, model, texts, out, max_new_tokens or prompts.NEW_TOKENS, batch_size or 1, overwrite
        )
        _report_refused(gathered.refused, out)
        return
    from moetool.capture.automatic import CaptureMemory
    from moetool.capture.run import CaptureOptions, RunSetup
    from moetool.capture.run import capture as run
    from moetool.models.loading import parse_device

    options = CaptureOptions(
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        keep=tuple(listed([keep])),
        ahead=ahead,
        resident=resident,
        answers=answers,
        device=device,
        dtype=dtype,
        threads=threads,
        data=tuple(gathered.origins),
    )
    if device is not None:
        parse_device(device)  # refuse here once, instead of in every worker
    memory = CaptureMemory(
        device_memory_bytes=memory_bytes("--device-memory", device_memory),
        host_memory_bytes=memory_bytes("--host-memory", host_memory),
        io_threads=io_threads,
        policy=policy,
    )
    setup = RunSetup(memory=memory, overwrite=overwrite, resume=resume, on_note=note)
    with tables.stages() as report:
        report(f"capturing {model}", 0, None)  # seconds until the first forward
        setup = replace(setup, on_progress=partial(report, f"capturing {model}"))
        if cluster is not None:
            from moetool.cluster.capture_shards import capture_on_cluster
            from moetool.cluster.launch import parse_where

            made = capture_on_cluster(model, texts, out, options, parse_where(cluster), setup)
        else:
            made = run(model, texts, out, options, setup)
    made = replace(made, refused=(*gathered.refused, *made.refused))
    if as_json:
        tables.print_json(made.to_json())
    else:
        _print_summary(made)
    _report_refused(made.refused, out)


def _report_refused(refused: Sequence[str], out: Path) -> None:
    """Raise MismatchError if prompts were left out."""
    if refused:
        raise MismatchError(
            f"{refused[0]} ({tables.numbered(len(refused), 'prompt')} left out in all; {out} has the others)"
        )


def _print_summary(made: "Captured") -> None:
    left_out = {"too long for the context": made.too_long, "empty": made.empty, "refused": len(made.refused)}
    listed_out = ", ".join(f"{number:,} {why}" for why, number in left_out.items() if number)
    skipped = f"; prompts left out: {listed_out}" if listed_out else ""
    tables.print_paragraph(
        f"{made.out}: {tables.numbered(made.requests, 'prompt')}, {tables.numbered(made.tokens, 'token')}, "
        f"{tables.count(made.bytes, 'B')} "
        f"({made.bytes / made.tokens:,.0f} bytes/token) in {made.seconds:,.1f} s{skipped}"
    )
    if made.reads is not None:
        tables.print_paragraph(f"  {made.reads.describe()}")


def _from_server(
    url: str,
    key: str | None,
    model: str,
    texts: "Sequence[Prompt]",
    out: Path,
    max_new_tokens: int,
    concurrency: int,
    overwrite: bool,
) -> None:
    from moetool.capture.remote import RemoteServer, capture_remote
    from moetool.models.shape import open_shape

    checkpoint = open_shape(model)
    with tables.progress(f"asking {url}", len(texts)) as on_progress:
        made = capture_remote(
            RemoteServer(url=url, api_key=key, concurrency=concurrency),
            checkpoint,
            texts,
            out,
            max_new_tokens=max_new_tokens,
            overwrite=overwrite,
            on_progress=on_progress,
        )
    tables.print_paragraph(
        f"{out}: {tables.numbered(made.requests, 'prompt')}, {tables.numbered(made.tokens, 'token')}"
    )
    for line in made.notes:
        tables.print_paragraph(f"  {line}")
