"""The command `moetool bench serve`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from moetool import durable, tables
from moetool.cli.bench_results import command_line, hand_over
from moetool.cli.flags import Json, Overwrite, PredictorDir, Recipe, listed, require_policies, settable
from moetool.config import parse, parse_settings
from moetool.errors import UsageError


def bench_serve(
    policy: Annotated[list[str], typer.Option(help="Cache policies, comma-separated or repeated.")],
    budget: Annotated[
        list[str], typer.Option(help="Expert memory: bytes, e.g. 64MB, or a share of all experts, e.g. 25%.")
    ],
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="'reference', a Hugging Face directory or a hub name.")
    ] = None,
    shape: Annotated[
        str | None, typer.Option(help="Shape of random weights to use instead of MODEL, e.g. deepseek-v2-lite.")
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="MoE layers of the shape (default: all).")] = None,
    routes: Annotated[Path | None, typer.Option(help="Trace directory whose routing the model follows.")] = None,
    beside: Annotated[
        str | None,
        typer.Option(help="Directory of a quantized replica of MODEL (for a shape: int4), served in the same memory."),
    ] = None,
    data: Annotated[
        list[str], typer.Option(help="Prompts for a MODEL with its own routing: embedded sets or files. Repeatable.")
    ] = [],
    predictor: PredictorDir = None,
    work: Annotated[Path, typer.Option(help="Directory that keeps random weights for the next run.")] = Path(
        "moetool-bench"
    ),
    settings: Annotated[
        list[str],
        settable("Setting of the bench or option of a policy: bench.rounds, bench.requests, ..., POLICY.OPTION."),
    ] = [],
    overwrite: Overwrite = False,
    as_json: Json = False,
    out: Annotated[Path | None, typer.Option("--out", help="JSON file for results and raw values.")] = None,
    recipe: Recipe = None,
) -> None:
    """Time cache policies and memory sizes in a live engine, with their bounds."""
    if out is not None:
        durable.require_new_file(out, overwrite)
    names, options = listed(policy), parse_settings(settings)
    values = options.pop("bench", {})
    require_policies(names, options)
    texts = tuple(listed(data)) if data else ()
    if beside is not None:
        others = {"--layers": layers, "--routes": routes, "--predictor": predictor}
        _require_together(model, beside, others, shape, texts)
    from moetool.bench.forms import FormsBench, bench_forms, print_forms
    from moetool.bench.serve import bench_serve as run
    from moetool.bench.serving_results import print_serve_bench
    from moetool.bench.serving_setup import ServingBenchOptions, Subject

    subject = Subject(
        model=model,
        shape=shape,
        layers=layers,
        routes=routes,
        data=texts,
        predictor=predictor,
        work=work,
    )
    title = f"benchmarking {model or shape}" + (f" beside {beside}" if beside is not None else "")
    with tables.progress(title, 100) as on_progress:
        how: dict[str, Any] = {
            "policies": names,
            "budgets": listed(budget),
            "options": parse(ServingBenchOptions, values, "bench"),
            "policy_options": options,
            "command": command_line(),
            "on_progress": on_progress,
        }
        made = run(subject, **how) if beside is None else bench_forms(subject, beside, **how)
    if isinstance(made, FormsBench):
        hand_over(made, out, print_forms, as_json=as_json)
    else:
        hand_over(made, out, print_serve_bench, as_json=as_json)


def _require_together(
    model: str | None, beside: str, others: Mapping[str, object], shape: str | None, data: Sequence[str]
) -> None:
    """Raises: UsageError unless --beside comes with a model and text, or with a shape, routes and int4."""
    if others["--predictor"] is not None:
        raise UsageError("--beside compares two forms of a model, and a predictor fits one: leave out --predictor")
    if shape is not None:
        found = "a MODEL too" if model is not None else "--data" if data else f"--beside {beside}"
        if model is not None or data or beside != "int4":
            raise UsageError(
                f"a --shape has random weights, so --beside takes int4, which is made from them; found {found}: "
                f"moetool bench serve --shape {shape} --layers 2 --routes DIR --beside int4 --policy lru --budget 25%"
            )
        return
    given = [name for name, value in others.items() if value is not None]
    if given or model is None or not data:
        found = f"{', '.join(given)} too" if given else "no MODEL" if model is None else "no --data"
        raise UsageError(
            f"--beside needs a MODEL and --data, and both forms use their own routing; found {found}: moetool bench "
            f"serve MODEL --beside {beside} --data chat --policy lru --budget 25%"
        )
