"""The command `moetool reference train`."""

from pathlib import Path
from typing import Annotated

import typer

from moetool import assets, durable, tables
from moetool.cli.flags import Json, Out, Overwrite, settable
from moetool.config import parse_settings


def reference_train(
    data: Annotated[
        Path, typer.Option(help="Directory of .txt files, one per domain; documents end with <|endoftext|>.")
    ],
    out: Out,
    recipe: Annotated[
        Path | None,
        typer.Option(help="TOML recipe: seed, data, model, fit, sources (default: the embedded model's)."),
    ] = None,
    start: Annotated[
        str | None,
        typer.Option("--from", help="Model to continue from: a directory, or 'reference' (default: random weights)."),
    ] = None,
    settings: Annotated[list[str], settable("Recipe value, e.g. fit.max_steps=500.")] = [],
    resume: Annotated[bool, typer.Option("--resume", help="Resume an interrupted run.")] = False,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Train a small MoE model on a directory of text files."""
    from moetool.reference.training_recipe import read_recipe

    chosen = read_recipe(recipe or assets.path("recipes", "reference", "model.toml"), parse_settings(settings))
    durable.require_absent(out, overwrite, "training.json")
    from moetool.reference.train import train as run

    try:
        with tables.stages() as on_progress:
            facts = run(chosen, data, out, start=start, resume=resume, overwrite=overwrite, on_progress=on_progress)
    except KeyboardInterrupt:
        tables.narrate("moetool: stopped; continue from the last saved step with --resume")
        raise
    if as_json:
        tables.print_json(facts)
    else:
        tables.print_reference(out, facts)
