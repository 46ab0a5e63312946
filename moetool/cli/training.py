"""The predictor commands: `moetool train` and `evaluate`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from moetool.base import tables
from moetool.base.config import MOST_SEED, parse, parse_settings
from moetool.base.errors import UsageError
from moetool.cli.flags import Json, Out, Overwrite, Recipe, TraceDir, listed, note, settable


def train(
    predictor: Annotated[str, typer.Argument(metavar="PREDICTOR", help="Predictor name, e.g. expert_mlp.")],
    out: Out,
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="Model to quantize (awq_replica only).")] = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Trace directory (all predictors but awq_replica).")
    ] = None,
    data: Annotated[list[str], typer.Option(help="Calibration text, as for capture (awq_replica only).")] = [],
    bits: Annotated[int | None, typer.Option(help="Bits per weight: 2, 4 or 8 (awq_replica only; default: 4).")] = None,
    group: Annotated[
        int | None, typer.Option(help="Weights per scale: 32, 64 or 128 (awq_replica only; default: 64).")
    ] = None,
    symmetric: Annotated[
        bool | None,
        typer.Option(
            "--symmetric/--asymmetric",
            help="Symmetric or asymmetric quantization (awq_replica only; default: symmetric).",
        ),
    ] = None,
    settings: Annotated[
        list[str],
        settable(
            "Option of the predictor or of training: fit.max_epochs, fit.checkpoint=DIR, fit.logger=tensorboard, "
            "fit.trainer.precision=bf16-mixed, ..."
        ),
    ] = [],
    seed: Annotated[
        int, typer.Option(min=0, max=MOST_SEED, help="Seed for the split, initial weights and sample order.")
    ] = 0,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the checkpoint in fit.checkpoint, if there is one.")
    ] = False,
    overwrite: Overwrite = False,
    as_json: Json = False,
    recipe: Recipe = None,
) -> None:
    """Train an expert predictor, or build a quantized replica that predicts."""
    from moetool.base import plugins

    options = parse_settings(settings)
    plugins.allow("predictor", predictor)
    module = plugins.load("predictor", predictor)
    rounding = {"bits": bits, "group": group, "symmetric": symmetric}
    if module.Predictor.made_of == "model":
        if model is None or not data or trace is not None or resume:
            raise UsageError(
                f"{predictor} is made from a model and text: moetool train {predictor} MODEL --data all --out {out}"
            )
        options = {**{name: value for name, value in rounding.items() if value is not None}, **options}
        with tables.steps(f"rounding {model}") as on_progress:
            reports = {"on_progress": on_progress, "on_note": note}
            card = module.make(model, listed(data), out, options, seed=seed, overwrite=overwrite, **reports)
    else:
        from moetool.training.fit_options import FitOptions
        from moetool.training.training import train as run

        if trace is None or model is not None or data or set(rounding.values()) != {None}:
            raise UsageError(f"{predictor} is trained on a trace: moetool train {predictor} --trace DIR --out {out}")
        fit = parse(FitOptions, options.pop("fit", {}), "fit")
        card = run(predictor, trace, out, options=options, fit=fit, seed=seed, overwrite=overwrite, resume=resume)
    if as_json:
        tables.print_json(card)
    elif "quantization" in card:
        _print_replica(out, card)
    else:
        tables.print_paragraph(f"{out}: {summarize_card(card)}")


def summarize_card(card: dict[str, Any]) -> str:
    """Return one line about a trained predictor."""
    return (
        f"{card['predictor']}, {tables.count(card['parameters'])} parameters, trained on "
        f"{tables.numbered(card['tokens']['train'], 'token')} of "
        f"{tables.numbered(len(card['requests']['train']), 'prompt')} in {card['seconds']:,.1f} s"
    )


def evaluate(
    predictors: Annotated[list[Path], typer.Argument(metavar="DIR", help="Directories of trained predictors.")],
    trace: TraceDir,
    unseen_task: Annotated[
        Path | None, typer.Option("--unseen-task", help="Trace directory of a task that no predictor was trained on.")
    ] = None,
    settings: Annotated[list[str], settable("Option of one predictor, e.g. awq_replica.activation_bits=8.")] = [],
    profile: Annotated[
        Path | None,
        typer.Option(help="Machine costs from 'moetool profile', to print times as shares of a decode step."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Score predictors on held-out requests, with popularity and affinity as baselines."""
    from moetool.costing.costs import CostProfile

    costs = CostProfile.load(profile) if profile is not None else None
    from moetool.training.evaluate import evaluate as run
    from moetool.training.match_tables import print_evaluations

    with tables.stages() as on_progress:
        rows = run(predictors, trace, unseen_task, costs, parse_settings(settings), on_progress)
    if as_json:
        tables.print_json([row.to_json() for row in rows])
    else:
        print_evaluations(rows)


def _print_replica(out: Any, card: Any) -> None:
    """Print a replica's size, accuracy, and experts with too few tokens."""
    how, judged, weights = card["quantization"], card["judged"], card["weights"]
    tables.print_paragraph(
        f"{out}: {how['bits']} bits in groups of {how['group']}, {tables.count(weights['bytes'], 'B')} instead of "
        f"{tables.count(weights['of_bytes'], 'B')}, made on {card['tokens']['train']:,} tokens in "
        f"{card['seconds']:,.1f} s; loaded again by {card['reloaded_by']}"
    )
    tables.print_paragraph(
        f"on {judged['tokens']:,} tokens of other prompts: KL divergence {judged['kl']:.5f}, same next token "
        f"{judged['top1']:.3f}, experts matched {judged['match']:.4f}"
    )
    for layer, experts in card["few_tokens"].items():
        named = ", ".join(map(str, experts))
        tables.print_paragraph(
            f"  layer {layer}: fewer than {how['min_tokens']} tokens for experts {named}; their columns kept as is"
        )
