"""The commands that look at what there is: `moetool profile`, `doctor`, `models` and `data`."""

import contextlib
import textwrap
from pathlib import Path
from typing import Annotated

import typer

from moetool import durable, tables
from moetool.cli.flags import Json, Revision
from moetool.errors import UsageError
from moetool.models.hub import with_revision


def register(app: typer.Typer) -> None:
    """Add the commands to `moetool`."""
    for command in (profile, doctor, models, data):
        app.command()(command)


def profile(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="'reference', a folder in Hugging Face format, or a hub name; with --config-only also a shape "
            "(deepseek-v2-lite, qwen3-30b-a3b) or a config.json.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="The profile, a JSON file; printed only, if not given.")
    ] = None,
    config_only: Annotated[
        bool, typer.Option("--config-only", help="Without the weights: a folder, config.json, shape or hub name.")
    ] = False,
    dtype: Annotated[str | None, typer.Option(help="Compute dtype: float32 or bfloat16 (default: both).")] = None,
    seconds: Annotated[float, typer.Option(min=0, help="Seconds to measure after one full pass.")] = 120.0,
    threads: Annotated[int, typer.Option(min=0, help="Compute threads (0: automatic).")] = 0,
    predictor: Annotated[Path | None, typer.Option(help="Folder of a trained predictor to time.")] = None,
    peer: Annotated[
        str | None, typer.Option(help="HOST:PORT of a 'moetool profile --listen' to time the way to.")
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(help="Be such a peer at PORT of this machine, or HOST:PORT; on trusted networks only: no login."),
    ] = None,
    revision: Revision = None,
    as_json: Json = False,
) -> None:
    """Measure what a model costs on this machine: experts, attention, loads from disk, link."""
    if listen is not None:
        from moetool.tuning.probes.link import serve

        with contextlib.suppress(KeyboardInterrupt):
            serve(listen, on_ready=lambda address: tables.narrate(f"moetool: answering on {address}; Ctrl-C ends it"))
        return
    if model is None:
        raise UsageError("no model given: moetool profile MODEL --out profile.json")
    model = with_revision(model, revision)
    from moetool.tuning.profile import ProfileOptions
    from moetool.tuning.profile import profile as run

    if out is not None:
        durable.require_writable(out)
    with tables.progress(f"profiling {model}", 100) as on_progress:
        made = run(
            model,
            ProfileOptions(
                config_only=config_only,
                dtype=dtype,
                seconds=seconds,
                threads=threads,
                predictor=predictor,
                peer=peer,
                scratch=Path() if out is None else out.parent,
            ),
            on_progress,
        )
    if out is not None:
        made.save(out)
    if as_json:
        tables.print_json(made.to_json())
    else:
        tables.print_profile(made)
        if out is not None:
            print(f"{out}: for --profile of replay, plan, simulate and evaluate")


def doctor(as_json: Json = False) -> None:
    """Check this machine: GPUs, memory, disk speed (of the current folder), libraries."""
    from moetool.tuning.doctor import doctor as run

    findings = run()
    if as_json:
        tables.print_json([finding.to_json() for finding in findings])
    else:
        tables.print_lines([(finding.name, finding.value, finding.meaning) for finding in findings])


def models(as_json: Json = False) -> None:
    """List the model families and weight formats that moetool knows, and what it can do with each."""
    from moetool.models.families import FAMILIES, unlisted
    from moetool.models.tested_formats import FORMATS, UNLISTED, format_table

    families = [*FAMILIES.values(), *map(unlisted, UNLISTED)]
    tested = format_table()
    words = {True: "tested", False: "not tested"}
    rows = []
    for family in families:
        formats = {format: words[done] for format, done in tested[family.name].items()}
        rows.append({**family.to_json(), "formats": formats})
    if as_json:
        tables.print_json(rows)
        return
    columns = ["family", "captured", "served", "substitution", "weights"]
    yes = {True: "yes", False: "no"}
    table = [
        [r["family"], yes[r["captured"]], r["served"], yes[r["substitution"]], r["weights"]]
        for r in rows
        if r["known"] == "listed"
    ]
    tables.print_table(f"{len(table)} families of mixture-of-experts models", columns, table, num_text=len(columns))
    for row in rows:
        if row["known"] == "listed" and row["remarks"]:
            print(textwrap.fill(f"{row['family']}: {row['remarks']}", 78, subsequent_indent="  "))
    print("\ninferred when a model is opened, by trying its router:")
    print(f"{', '.join(UNLISTED)}, and others that transformers calls through its experts interface")
    title = "weight formats tested with each family (others are read too)"
    cells = [[r["family"], *r["formats"].values()] for r in rows if "tested" in r["formats"].values()]
    tables.print_table(title, ["family", *FORMATS], cells, num_text=1 + len(FORMATS))


def data(as_json: Json = False) -> None:
    """List the prompt sets that --data takes by name: the embedded ones, and public ones on the Hugging Face hub."""
    from moetool.prompts.gather import describe

    rows = describe()
    if as_json:
        tables.print_json(rows)
    else:
        tables.print_prompt_sets(rows)
