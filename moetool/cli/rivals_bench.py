"""The command `moetool bench rivals`."""

from pathlib import Path
from typing import Annotated

import typer

from moetool.cli.bench_results import command_line, hand_over, results_file
from moetool.cli.flags import Json, Model, listed
from moetool.config import parse, parse_settings
from moetool.errors import unknown_name


def register(app: typer.Typer) -> None:
    """Add the command to `moetool bench`."""
    app.command("rivals")(rivals)


def rivals(
    model: Model,
    gguf: Annotated[Path | None, typer.Option(help="The same weights as a GGUF file, for llama.cpp.")] = None,
    llama_server: Annotated[
        Path | None, typer.Option(help="llama.cpp's llama-server (default: the one on the PATH).")
    ] = None,
    engine: Annotated[list[str], typer.Option(help="Engines; repeat, or separate by commas (default: all).")] = [],  # noqa: B006
    settings: Annotated[
        list[str], typer.Option("--set", help="prompt_tokens, new_tokens, rounds, shares, threads, dtype. Repeatable.")
    ] = [],  # noqa: B006
    as_json: Json = False,
    out: Annotated[Path | None, typer.Option("--out", help="Folder for a JSON file a cell and rivals.json.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier rivals.json.")] = False,
) -> None:
    """Time moetool beside llama.cpp and transformers, in memory and with memory limited to shares of the model."""
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
