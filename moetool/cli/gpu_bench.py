"""The command `moetool bench gpu`."""

from pathlib import Path
from typing import Annotated

import typer

from moetool.cli.bench_results import command_line, hand_over, results_file
from moetool.cli.flags import Json, listed, settable
from moetool.config import parse, parse_settings


def gpu(
    routes: Annotated[Path, typer.Option(help="Directory with one trace per shape, named after the shape.")],
    out: Annotated[Path, typer.Option("--out", help="Output directory: one JSON file per cell, and gpu.json.")],
    shape: Annotated[
        str, typer.Option(help="Model shapes with random weights, comma-separated.")
    ] = "deepseek-v2-lite,qwen3-30b-a3b",
    device: Annotated[str, typer.Option(help="Device: cuda, or cpu for a dry run.")] = "cuda",
    settings: Annotated[
        list[str], settable("Setting: layers, shares, policies, new_tokens, limit_s, plain, io_threads.")
    ] = [],
    as_json: Json = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Overwrite an existing gpu.json.")] = False,
) -> None:
    """Time cache policies on a GPU with published routes, with the bound of its host link."""
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
