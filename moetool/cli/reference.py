"""The command `moetool reference train`."""

from pathlib import Path
from typing import Annotated

import typer

from moetool import assets, durable, tables
from moetool.cli.flags import Json, Out, Overwrite
from moetool.config import parse_settings


def register(app: typer.Typer) -> None:
    """Add the command to `moetool reference`."""
    app.command("train")(reference_train)


def reference_train(
    data: Annotated[Path, typer.Option(help="Folder of .txt files, one a domain, documents ended by <|endoftext|>.")],
    out: Out,
    recipe: Annotated[
        Path | None,
        typer.Option(help="TOML file: seed, data, model, fit, sources; that of the embedded model if not given."),
    ] = None,
    start: Annotated[
        str | None, typer.Option("--from", help="Continue from this model; 'reference' is the embedded one.")
    ] = None,
    settings: Annotated[
        list[str], typer.Option("--set", help="A value of the recipe, as in --set fit.max_steps=500. Repeatable.")
    ] = [],  # noqa: B006
    resume: Annotated[bool, typer.Option("--resume", help="Go on where a run that was killed had come to.")] = False,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Train a small Mixture-of-Experts model on a folder of text."""
    from moetool.reference.training_recipe import read_recipe

    chosen = read_recipe(recipe or assets.path("recipes", "reference", "model.toml"), parse_settings(settings))
    durable.require_absent(out, overwrite, "training.json")
    from moetool.reference.train import train as run

    try:
        with tables.stages() as on_progress:
            facts = run(chosen, data, out, start=start, resume=resume, overwrite=overwrite, on_progress=on_progress)
    except KeyboardInterrupt:
        tables.narrate("moetool: stopped; the same command with --resume goes on from the last saved step, if any")
        raise
    if as_json:
        tables.print_json(facts)
    else:
        tables.print_reference(out, facts)
