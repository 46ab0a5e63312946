"""The commands that make and judge predictors: `moetool train` and `evaluate`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from moetool import durable, tables
from moetool.cli.flags import Json, Out, Overwrite, Recipe, TraceDir, listed
from moetool.config import parse, parse_settings
from moetool.errors import UsageError


def register(app: typer.Typer) -> None:
    """Add the commands to `moetool`."""
    app.command()(train)
    app.command()(evaluate)


def train(
    predictor: Annotated[str, typer.Argument(metavar="PREDICTOR", help="Name of a predictor, such as expert_mlp.")],
    out: Out,
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="For awq_replica: the model that it is a replica of.")
    ] = None,
    trace: Annotated[Path | None, typer.Option("--trace", help="Folder of a trace, for all but awq_replica.")] = None,
    data: Annotated[list[str], typer.Option(help="For awq_replica: text to choose scales on, as for capture.")] = [],  # noqa: B006 - Typer copies defaults
    bits: Annotated[int | None, typer.Option(help="For awq_replica: bits of a weight: 2, 4 (default) or 8.")] = None,
    group: Annotated[
        int | None, typer.Option(help="For awq_replica: weights that share a scale: 32, 64 (default) or 128.")
    ] = None,
    symmetric: Annotated[
        bool | None,
        typer.Option(
            "--symmetric/--asymmetric",
            help="For awq_replica: whether experts' zero points are 0; others are refused, with the reason.",
        ),
    ] = None,
    settings: Annotated[
        list[str],
        typer.Option(
            "--set", help="The predictor's options, and fit.max_epochs, fit.max_tokens, fit.held_out, ... Repeatable."
        ),
    ] = [],  # noqa: B006
    seed: Annotated[int, typer.Option(help="Seed of the split, the weights and the order of the samples.")] = 0,
    overwrite: Overwrite = False,
    as_json: Json = False,
    recipe: Recipe = None,
) -> None:
    """Train an expert predictor, or build a quantized replica that predicts."""
    from moetool import plugins

    options = parse_settings(settings)
    module = plugins.load("predictor", predictor)
    rounding = {"bits": bits, "group": group, "symmetric": symmetric}
    if module.Predictor.made_of == "model":
        if model is None or not data or trace is not None:
            raise UsageError(
                f"{predictor} is made from a model and text: moetool train {predictor} MODEL --data all --out {out}"
            )
        options = {**{name: value for name, value in rounding.items() if value is not None}, **options}
        with tables.steps(f"rounding {model}") as on_progress:
            card = module.make(
                model, listed(data), out, options, seed=seed, overwrite=overwrite, on_progress=on_progress
            )
    else:
        from moetool.learning.fit_options import FitOptions
        from moetool.learning.training import train as run

        if trace is None or model is not None or data or set(rounding.values()) != {None}:
            raise UsageError(f"{predictor} is trained on a trace: moetool train {predictor} --trace DIR --out {out}")
        fit = parse(FitOptions, options.pop("fit", {}), "fit")
        card = run(predictor, trace, out, options=options, fit=fit, seed=seed, overwrite=overwrite)
    if as_json:
        tables.print_json(card)
    elif "quantization" in card:
        tables.print_replica(out, card)
    else:
        print(f"{out}: {summarize_card(card)}")


def summarize_card(card: dict[str, Any]) -> str:
    """One line about a trained predictor."""
    return (
        f"{card['predictor']}, {tables.count(card['parameters'])} parameters, trained on "
        f"{tables.numbered(card['tokens']['train'], 'token')} of "
        f"{tables.numbered(len(card['requests']['train']), 'prompt')} in {card['seconds']:,.1f} s"
    )


def evaluate(
    predictors: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Folders of trained predictors.")],
    trace: TraceDir,
    unseen_task: Annotated[
        Path | None, typer.Option("--unseen-task", help="Folder of a trace of a task that they were not trained on.")
    ] = None,
    settings: Annotated[
        list[str], typer.Option("--set", help="Another option of one, as in --set awq_replica.activation_bits=8.")
    ] = [],  # noqa: B006
    profile: Annotated[
        Path | None, typer.Option(help="By 'moetool profile': gives times as shares of a decode step.")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="The tables as a page as well, an HTML file.")] = None,
    as_json: Json = False,
) -> None:
    """Score predictors on requests that they were not trained on, beside popularity and affinity."""
    from moetool.costing.costs import CostProfile

    if report is not None:
        durable.require_writable(report)
    costs = CostProfile.load(profile) if profile is not None else None
    from moetool.evaluation.evaluate import evaluate as run
    from moetool.evaluation.match_tables import print_evaluations
    from moetool.report.predictor_page import write_page

    rows = run(predictors, trace, unseen_task, costs, parse_settings(settings))
    if report is not None:
        write_page(report, rows)
    if as_json:
        tables.print_json([row.to_json() for row in rows])
    else:
        print_evaluations(rows)
