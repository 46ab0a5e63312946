"""The command `moetool bench paper`: what a paper claims, beside what is found of it in miniature."""

import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moetool import durable, tables
from moetool.cli.flags import Json
from moetool.errors import UsageError

if TYPE_CHECKING:
    from moetool.bench.paper.claims import Paper
    from moetool.bench.paper.paper_run import Tested


def paper(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME", help="Paper: prism, director, duoserve, finemoe or smoe, or your own recipe (.toml)."
        ),
    ] = None,
    only: Annotated[list[str], typer.Option(help='Table or figure, e.g. "Figure 8" (default: all). Repeatable.')] = [],  # noqa: B006 - Typer copies defaults
    quick: Annotated[
        bool, typer.Option("--quick", help="Smoke test: tiny sizes, about a minute, most verdicts undecided.")
    ] = False,
    trace: Annotated[
        list[str], typer.Option(help="NAME=DIR: trace to use in place of the embedded model's. Repeatable.")
    ] = [],  # noqa: B006
    out: Annotated[
        Path | None, typer.Option("--out", help="Output directory for figures (SVG, PNG) and verdicts.json.")
    ] = None,
    work: Annotated[
        Path | None, typer.Option(help="Working directory for traces and predictors (default: temporary).")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Overwrite an existing output directory.")] = False,
    as_json: Json = False,
) -> None:
    """Re-run a paper's experiments at this machine's scale and judge each claim."""
    from moetool.bench.paper.claims import choose, names, read_paper

    if name is None:
        raise UsageError(f"no paper named, expected one of: {', '.join(names())}; run: moetool bench paper NAME")
    chosen = read_paper(name)
    choose(chosen.claim, only)
    given = _given(trace)
    if work is not None and work.exists() and (not work.is_dir() or any(work.iterdir())):
        raise UsageError(f"{work} is not empty; name a new directory, or leave --work out")
    if out is None:
        tested = _run(chosen, only, quick, given, None, work)
    else:
        with durable.staged_directory(out, overwrite, "verdicts.json") as folder:
            tested = _run(chosen, only, quick, given, folder, work)
            text = json.dumps(_document(name, chosen, quick, tested), indent=1) + "\n"
            durable.write_text(folder / "verdicts.json", text)
    if as_json:
        tables.print_json(_document(name, chosen, quick, tested))
        return
    _print(chosen, tested, quick)
    if out is not None:
        pictures = {picture for one in tested for picture in one.pictures}
        print(f"{out}: verdicts.json, and {len(pictures) // 2} of the experiments drawn, as SVG and PNG")


def _given(traces: Sequence[str]) -> dict[str, Path]:
    given = {}
    for text in traces:
        server, equals, folder = text.partition("=")
        if not equals or not server or not folder:
            raise UsageError(f"--trace {text!r} names no trace; write NAME=DIR")
        if server in given:
            raise UsageError(f"--trace names {server!r} twice; give each name once")
        given[server] = Path(folder)
    return given


def _run(
    chosen: "Paper", only: Sequence[str], quick: bool, given: dict[str, Path], out: Path | None, work: Path | None
) -> list["Tested"]:
    from moetool.bench.paper.claims import choose
    from moetool.bench.paper.paper_run import run_paper

    scratch = Path(tempfile.mkdtemp(prefix="moetool-paper-")) if work is None else work
    scratch.mkdir(parents=True, exist_ok=True)
    try:
        with tables.progress(chosen.paper.title[:40], len(choose(chosen.claim, only))) as on_progress:
            return run_paper(chosen, scratch, only=only, quick=quick, given=given, out=out, on_progress=on_progress)
    finally:
        if work is None:
            shutil.rmtree(scratch, ignore_errors=True)


def _document(name: str, chosen: "Paper", quick: bool, tested: Sequence["Tested"]) -> dict[str, Any]:
    from dataclasses import asdict

    from moetool.machine import load_average, read_machine

    return {
        "paper": name,
        **asdict(chosen.paper),
        "quick": quick,
        "sizes": asdict(chosen.quick if quick else chosen.sizes),
        "machine_named": {"machine": chosen.machine.machine, "model": chosen.machine.model},
        "assumed_machine": asdict(chosen.machine.assumed()),
        "machine": asdict(read_machine()),
        "load_average": load_average(),
        "claims": [one.to_json() for one in tested],
    }


def _print(chosen: "Paper", tested: Sequence["Tested"], quick: bool) -> None:
    from moetool.bench.paper.verdict import ANSWERS

    print(f"{chosen.paper.title}. {chosen.paper.reference}")
    rows = [
        [
            one.claim.id,
            one.claim.says,
            one.claim.printed,
            "; ".join(_value(name, mean, half, one.verdict.unit[name]) for name, mean, half in one.verdict.shown)
            or "-",
            f"{one.verdict.answer}: {one.verdict.why}",
            one.verdict.size or "-",
        ]
        for one in tested
    ]
    title = "claims and results: mean ± 95 % interval over seeds"
    tables.print_table(title, ["", "the paper says", "printed", "found", "verdict", "size"], rows, num_text=6)
    for one in tested:
        if one.claim.here:
            print(f"{one.claim.id}, here: {one.claim.here}")
    for on in dict.fromkeys(one.found.on for one in tested if one.found is not None):
        print(f"measured on {on}")
    count = {answer: sum(one.verdict.answer == answer for one in tested) for answer in ANSWERS}
    print(", ".join(f"{number} {answer}" for answer, number in count.items() if number) + f" of {len(tested)}")
    if quick:
        print("sizes of --quick: too small for meaningful verdicts")


def _value(name: str, mean: float, half: float | None, unit: str) -> str:
    scale, sign = (100, " %") if unit == "%" else (1, f" {unit}" if unit else "")
    spread = "" if half is None else f" ± {_number(scale * half, 2)}"
    return f"{name} {_number(scale * mean, 3)}{spread}{sign}"


def _number(value: float, digits: int) -> str:
    """A number of so many digits that mean something, without an exponent where it is large."""
    return f"{float(f'{value:.{digits}g}'):,.0f}" if abs(value) >= 10**digits else f"{value:.{digits}g}"
