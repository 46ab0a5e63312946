"""The command `moetool bench serve`."""

from pathlib import Path
from typing import Annotated

import typer

from moetool import durable, tables
from moetool.cli.bench_results import command_line, hand_over
from moetool.cli.flags import Json, Recipe, listed, require_policies
from moetool.config import parse, parse_settings


def register(app: typer.Typer) -> None:
    """Add the command to `moetool bench`."""
    app.command("serve")(bench_serve)


def bench_serve(
    policy: Annotated[list[str], typer.Option(help="Cache policies; repeat, or separate by commas.")],
    budget: Annotated[list[str], typer.Option(help="For experts: bytes (64MB) or a share of all experts (25%).")],
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="'reference', a folder in Hugging Face format, or a hub name.")
    ] = None,
    shape: Annotated[
        str | None, typer.Option(help="Instead of MODEL a config alone, such as deepseek-v2-lite: random weights.")
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="MoE layers of the shape; all, if not given.")] = None,
    routes: Annotated[Path | None, typer.Option(help="Folder of a trace whose routing the model follows.")] = None,
    beside: Annotated[
        str | None,
        typer.Option(help="Folder of a packed replica of MODEL (of a shape: int4), served in the same memory."),
    ] = None,
    data: Annotated[
        list[str], typer.Option(help="Prompts of a MODEL that routes by itself: embedded sets, or files.")
    ] = [],  # noqa: B006
    predictor: Annotated[Path | None, typer.Option(help="Folder of a trained predictor.")] = None,
    work: Annotated[Path, typer.Option(help="Where random weights are kept for the next time.")] = Path(
        "moetool-bench"
    ),
    settings: Annotated[
        list[str], typer.Option("--set", help="bench.rounds, bench.requests, ..., and POLICY.OPTION. Repeatable.")
    ] = [],  # noqa: B006
    as_json: Json = False,
    out: Annotated[Path | None, typer.Option("--out", help="The results with their raw values, a JSON file.")] = None,
    recipe: Recipe = None,
) -> None:
    """Time policies and budgets against each other in a live engine, beside their bounds."""
    if out is not None:
        durable.require_writable(out)
    names, options = listed(policy), parse_settings(settings)
    values = options.pop("bench", {})
    require_policies(names, options)
    if beside is not None:
        from moetool.cli.forms_bench import bench_beside

        bench_beside(
            model,
            beside,
            shape=shape,
            layers=layers,
            routes=routes,
            data=listed(data) if data else (),
            work=work,
            predictor=predictor,
            policies=names,
            budgets=listed(budget),
            bench=values,
            policy_options=options,
            as_json=as_json,
            out=out,
        )
        return
    from moetool.bench.results import print_serve_bench
    from moetool.bench.serve import bench_serve as run
    from moetool.bench.stage import BenchOptions, Subject

    subject = Subject(
        model=model,
        shape=shape,
        layers=layers,
        routes=routes,
        data=tuple(listed(data)) if data else (),
        predictor=predictor,
        work=work,
    )
    with tables.progress(f"benching {model or shape}", 100) as on_progress:
        made = run(
            subject,
            policies=names,
            budgets=listed(budget),
            options=parse(BenchOptions, values, "bench"),
            policy_options=options,
            command=command_line(),
            on_progress=on_progress,
        )
    hand_over(made, out, print_serve_bench, as_json=as_json)
