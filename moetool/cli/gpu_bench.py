"""The command `moetool bench gpu`."""

from pathlib import Path
from typing import Annotated

import typer

from moetool.cli.bench_results import command_line, hand_over, results_file
from moetool.cli.flags import Json, listed
from moetool.config import parse, parse_settings


def register(app: typer.Typer) -> None:
    """Add the command to `moetool bench`."""
    app.command("gpu")(gpu)


def gpu(
    routes: Annotated[Path, typer.Option(help="Folder with a trace for each shape, of the shape's name.")],
    out: Annotated[Path, typer.Option("--out", help="Folder for a JSON file a cell and gpu.json.")],
    shape: Annotated[
        str, typer.Option(help="Configs alone, separated by commas; their weights are random.")
    ] = "deepseek-v2-lite,qwen3-30b-a3b",
    device: Annotated[str, typer.Option(help="cuda, or cpu for a dry run.")] = "cuda",
    settings: Annotated[
        list[str], typer.Option("--set", help="layers, shares, policies, new_tokens, limit_s, plain. Repeatable.")
    ] = [],  # noqa: B006
    as_json: Json = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier gpu.json.")] = False,
) -> None:
    """Time cache policies on a GPU over published routes, beside the bound of its host link."""
    from moetool.bench.gpu import GpuBenchOptions, bench_gpu, print_gpu

    file = results_file(out, "gpu.json", overwrite)
    made = bench_gpu(
        listed([shape]),
        routes,
        device=device,
        options=parse(GpuBenchOptions, parse_settings(settings), "gpu"),
        folder=out,
        command=command_line(),
    )
    hand_over(made, file, print_gpu, as_json=as_json)
