"""The command `moetool fit`, and its first lines before a download."""

from typing import TYPE_CHECKING, Annotated

import typer

from moetool.base import tables
from moetool.base.config import parse_bytes, parse_rate
from moetool.base.errors import CapacityError, Problems
from moetool.cli.flags import Json, Revision

if TYPE_CHECKING:
    from moetool.measuring.fit import Fit, MemorySpeed
    from moetool.models.config_model import ConfigModel

CAPTURED_TOKENS, CAPTURED_ANSWER = 256, 32
"""Tokens of a prompt, and new ones, in the estimate of a capture."""


def fit(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="'reference', a directory with a config.json, a .gguf file, a hub name or a shape (qwen3-30b-a3b).",
        ),
    ],
    memory: Annotated[str | None, typer.Option(help="Host memory for the process, e.g. 32GB (default: free).")] = None,
    gpu_memory: Annotated[
        str | None, typer.Option(help="GPU memory, e.g. 24GB (default: the GPU's, if there is one).")
    ] = None,
    disk_speed: Annotated[str | None, typer.Option(help="Disk reads, e.g. 3GB/s (default: measured).")] = None,
    machine: Annotated[
        str | None,
        typer.Option(help="Another machine: a name (e.g. pc-rtx-4090-ddr5) or a TOML file (default: this one)."),
    ] = None,
    capture: Annotated[
        int | None,
        typer.Option(
            min=1, max=10_000_000, help="Prompts of a capture to estimate too, of 256 tokens with 32 new ones."
        ),
    ] = None,
    as_json: Json = False,
    revision: Revision = None,
) -> None:
    """Estimate whether a model runs here or on another machine, how fast, and with which settings.

    Reads the config or a GGUF header only; downloads no weights.
    """
    from moetool.costing.machines import read_named_machine
    from moetool.measuring.fit import FitOptions, with_weights
    from moetool.measuring.fit import fit as estimate
    from moetool.measuring.fit_machine import fit_machine
    from moetool.models.config_model import ConfigModel
    from moetool.models.files.hub import with_revision
    from moetool.models.shape import open_shape

    with Problems() as problems:
        sizes: list[int | None] = []
        for flag, text in (("memory", memory), ("gpu-memory", gpu_memory), ("disk-speed", disk_speed)):
            with problems.of(f"--{flag}: "):
                parsed = parse_rate if flag == "disk-speed" else parse_bytes
                sizes.append(None if text is None else parsed(text))
        if machine is not None:
            with problems.of():
                read_named_machine(machine)
        with problems.of():
            opened = open_shape(with_revision(model, revision))
    options = FitOptions(machine=machine, host_bytes=sizes[0], gpu_bytes=sizes[1], disk_bytes_s=sizes[2])
    if isinstance(opened, ConfigModel):
        _print_shape(opened, as_json)
        return
    opened = with_weights(opened)
    on = fit_machine(options, opened)
    found, cost, problem = estimate(opened, on), None, ""
    if capture is not None:
        from moetool.capture.automatic import cost_on

        try:
            cost = cost_on(opened, on, [(CAPTURED_TOKENS, CAPTURED_TOKENS + CAPTURED_ANSWER)] * capture)
        except CapacityError as error:
            problem = str(error)
    if as_json:
        more = {} if capture is None else {"capture": None if cost is None else cost.to_json()}
        tables.print_json(found.to_json() | more)
        return
    _print(found)
    if capture is not None:
        print()
        said = f"not possible: {problem}" if cost is None else cost.describe()
        tables.print_paragraph(f"capture of {tables.numbered(capture, 'prompt')}: {said}")


def headline(found: "Fit") -> str:
    """Model, machine and verdict."""
    billions, active = found.parameters / 1e9, found.active_parameters / 1e9
    size = f"{billions:.1f} B parameters, {active:.1f} B active, {tables.count(found.model_bytes, 'B')}"
    return f"{found.model} ({size}) on {found.machine}: {found.verdict}"


def _print_shape(model: "ConfigModel", as_json: bool) -> None:
    """Print the shape of a model that cannot run."""

    spec = model.spec
    if as_json:
        tables.print_json({"fits": False, "problem": model.problem, "spec": spec.to_json()})
        return
    tables.print_paragraph(f"{model.name} does not run: {model.problem}. Its routing can be traced.")
    known = spec.sized
    tables.print_lines(
        [
            ("MoE layers", str(spec.num_layers), f"of {model.num_hidden_layers} layers"),
            ("experts", str(spec.num_experts), f"in each of them; a token uses {max(spec.top_k_L)}"),
            ("an expert", tables.count(spec.slot_bytes, "B") if known else "unknown", model.origin),
            ("all experts", tables.count(spec.all_experts_bytes, "B") if known else "unknown", ""),
        ]
    )


def _print(found: "Fit") -> None:
    from moetool.measuring.fit import memory_parts

    tables.print_paragraph(headline(found))
    print()
    if found.budget is not None and found.token is not None:
        token, (least, most) = found.token, found.tokens_s_range
        tables.print_lines([(name, tables.count(size, "B"), why) for name, size, why in memory_parts(found.budget)])
        print()
        span = f"{tables.significant(least, 2)} to {tables.significant(most, 2)}"
        others = f", {span} with the misses of other published routes" if least < most else ""
        tables.print_paragraph(
            f"{tables.significant(found.tokens_s, 2)} tokens/s{others}; {token.limit} takes most of the "
            f"{token.seconds * 1e3:,.0f} ms of a token:"
        )
        tiers = [
            ("read in memory", token.memory_bytes, token.memory_s),
            ("loaded over the link", token.link_bytes, token.link_s),
            ("loaded from disk", token.disk_bytes, token.disk_s),
        ]
        rows = [
            (f"  {name}", tables.count(num_bytes, "B"), f"{tables.milliseconds(seconds)} ms")
            for name, num_bytes, seconds in tiers
            if num_bytes
        ]
        tables.print_lines([*rows, ("  fixed time of layers", "", f"{tables.milliseconds(token.fixed_s)} ms")])
    if found.sizes:
        _print_speeds("speed by GPU memory" if found.has_gpu else "speed by memory", found.sizes)
        worth = found.worth
        gain = "no larger memory makes it 1.2 times as fast"
        if worth is not None:
            times = f", {worth.tokens_s / found.tokens_s:.1f} times as fast" if found.tokens_s else ""
            gain = f"{worth.name} gains most per byte: {tables.significant(worth.tokens_s, 2)} tokens/s{times}"
        tables.print_paragraph(f"  worth buying: {gain}")
    if found.forms:
        _print_speeds("the same model in other formats, same memory", found.forms)
    if found.token is not None:
        tables.print_paragraph(found.command)
        print()
    tables.print_lines([(what, value, origin) for what, value, origin in found.facts])


def _print_speeds(title: str, rows: "tuple[MemorySpeed, ...]") -> None:
    sized = len({row.model_bytes for row in rows}) > 1
    columns = ["memory" if not sized else "format", *(["weights"] if sized else []), "experts in slots", "tokens/s"]
    cells = [
        [
            row.name,
            *([tables.count(row.model_bytes, "B")] if sized else []),
            tables.percent(row.share, ".0f"),
            tables.significant(row.tokens_s, 2) if row.tokens_s else "does not fit",
        ]
        for row in rows
    ]
    tables.print_table(title, columns, cells)
