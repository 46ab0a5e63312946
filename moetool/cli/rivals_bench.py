"""The command `moetool bench rivals`."""

from pathlib import Path
from typing import Annotated

import typer

from moetool.cli.bench_results import command_line, hand_over, results_file
from moetool.cli.flags import Json, Model, listed, settable
from moetool.config import parse, parse_settings
from moetool.errors import unknown_name


def rivals(
    model: Model,
    gguf: Annotated[Path | None, typer.Option(help="GGUF file of the same weights, for llama.cpp.")] = None,
    llama_server: Annotated[Path | None, typer.Option(help="Path of llama-server (default: found on PATH).")] = None,
    engine: Annotated[list[str], typer.Option(help="Engines, comma-separated or repeated (default: all).")] = [],
    settings: Annotated[
        list[str], settable("Setting: prompt_tokens, new_tokens, rounds, shares, threads, dtype.")
    ] = [],
    as_json: Json = False,
    out: Annotated[
        Path | None, typer.Option("--out", help="Output directory: one JSON file per cell, and rivals.json.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Overwrite an existing rivals.json.")] = False,
) -> None:
    """Compare moetool with llama.cpp and transformers, in memory and under memory limits."""
    from moetool.bench.rivals import ENGINES, RivalOptions, bench_rivals, print_rivals

    file = results_file(out, "rivals.json", overwrite)
    engines = listed(engine) if engine else list(ENGINES)
    for name in engines:
        if name not in ENGINES:
            raise unknown_name("engine", name, ENGINES)
    made = bench_rivals(
        model,
        gguf=gguf,
        llama_server=None if llama_server is None else str(llama_server),
        engines=engines,
        options=parse(RivalOptions, parse_settings(settings), "rivals"),
        folder=out,
        command=command_line(),
    )
    hand_over(made, file, print_rivals, as_json=as_json)
