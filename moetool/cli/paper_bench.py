"""The command `moetool bench paper`: a paper's claims and their results in miniature."""

import json
import math
import multiprocessing
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moetool import durable, tables
from moetool.cli.flags import Json
from moetool.errors import UsageError

if TYPE_CHECKING:
    from moetool.bench.paper.claims import Paper
    from moetool.bench.paper.paper_run import Tested


_OWN = ".moetool-paper"
"""File that marks a directory of `--work`."""


def paper(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME", help="Paper: prism, director, duoserve, finemoe, smoe or all, or your own recipe (.toml)."
        ),
    ] = None,
    only: Annotated[list[str], typer.Option(help='Table or figure, e.g. "Figure 8" (default: all). Repeatable.')] = [],
    quick: Annotated[
        bool, typer.Option("--quick", help="Smoke test: tiny sizes, about a minute, most verdicts undecided.")
    ] = False,
    trace: Annotated[
        list[str], typer.Option(help="NAME=DIR: trace to use instead of the embedded model's. Repeatable.")
    ] = [],
    out: Annotated[
        Path | None, typer.Option("--out", help="Output directory for figures (SVG, PNG) and verdicts.json.")
    ] = None,
    work: Annotated[
        Path | None,
        typer.Option(help="Directory that keeps traces and predictors for later runs (default: temporary)."),
    ] = None,
    jobs: Annotated[
        int, typer.Option(min=1, help="Papers (and rates of --links) to run in parallel, one core each.")
    ] = 1,
    links: Annotated[
        list[float],
        typer.Option(help="Speed of all links relative to the machine's, e.g. 0.5, to judge claims again. Repeatable."),
    ] = [],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Overwrite an existing output directory.")] = False,
    as_json: Json = False,
) -> None:
    """Re-run the experiments of a paper, or of all, at this machine's scale and judge each claim."""
    from moetool.bench.paper.claims import choose, names, read_paper

    if name is None:
        raise UsageError(f"no paper named, expected one of: {', '.join(names())}, all; run: moetool bench paper NAME")
    if name == "all" and only:
        raise UsageError("--only names tables of one paper; name the paper instead of all")
    recipes = {one: read_paper(one) for one in (names() if name == "all" else (name,))}
    for chosen in recipes.values():
        choose(chosen.claim, only)
    tasks = _tasks(recipes, links, only)
    given = _given(trace)
    if work is not None:
        _require_own(work)
    if out is None:
        made = _run(tasks, only, quick, given, None, work, jobs)
    else:
        with durable.staged_directory(out, overwrite, "verdicts.json") as folder:
            made = _run(tasks, only, quick, given, folder, work, jobs)
            text = json.dumps(_documents(recipes, quick, made), indent=1) + "\n"
            durable.write_text(folder / "verdicts.json", text)
    if as_json:
        tables.print_json(_documents(recipes, quick, made))
        return
    found = {one: made[one, 1.0] for one in recipes}
    for one, tested in found.items():
        _print(recipes[one], tested, quick)
        _print_links(tested, _by_links(one, made))
    if len(found) > 1:
        _print_counts(found)
    if out is not None:
        pictures = {(one, picture) for one, tested in found.items() for each in tested for picture in each.pictures}
        print(f"{out}: verdicts.json, and figures of {len(pictures) // 2} experiments as SVG and PNG")


def _require_own(work: Path) -> None:
    """Use a folder for traces and predictors: a new or empty one, or one of an earlier run."""
    if work.exists() and (not work.is_dir() or (any(work.iterdir()) and not (work / _OWN).exists())):
        raise UsageError(f"{work} is not empty and not from a bench; name a new directory, or leave --work out")
    work.mkdir(parents=True, exist_ok=True)
    (work / _OWN).touch()


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


def _tasks(
    recipes: "Mapping[str, Paper]", links: Sequence[float], only: Sequence[str]
) -> "dict[tuple[str, float], Paper]":
    """Return what to run by paper and rate of links: each paper as it is, then its claims that links can change."""
    from moetool.bench.paper.paper_run import with_links

    tasks = {(name, 1.0): chosen for name, chosen in recipes.items()}
    for rate in links:
        if not 0 < rate < float("inf"):
            raise UsageError(f"--links is {rate:g}, expected a number above 0")
        varied = {(name, rate): with_links(chosen, rate, only) for name, chosen in recipes.items()}
        tasks |= {task: chosen for task, chosen in varied.items() if chosen.claim and task not in tasks}
    return tasks


def _run(
    tasks: "Mapping[tuple[str, float], Paper]",
    only: Sequence[str],
    quick: bool,
    given: dict[str, Path],
    out: Path | None,
    work: Path | None,
    jobs: int,
) -> "dict[tuple[str, float], list[Tested]]":
    """Return the judged claims of each task; with several papers, each has its own folder of figures."""
    from functools import partial

    from moetool.bench.paper.claims import choose
    from moetool.bench.paper.paper_run import run_paper

    scratch = Path(tempfile.mkdtemp(prefix="moetool-paper-")) if work is None else work
    run = partial(run_paper, work=scratch, quick=quick, given=given)
    try:
        if len(tasks) == 1:
            ((task, chosen),) = tasks.items()
            with tables.progress(chosen.paper.title[:40], len(choose(chosen.claim, only))) as on_progress:
                return {task: run(chosen, only=only, out=out, on_progress=on_progress)}
        several = len({name for name, _ in tasks}) > 1
        with tables.progress("all papers" if several else "all rates of links", len(tasks)) as on_progress:
            calls = {}
            for (name, rate), chosen in tasks.items():
                folder = None if out is None or rate != 1.0 else out / name if several else out
                if folder is not None:
                    folder.mkdir(exist_ok=True)
                named = only if rate == 1.0 else ()  # the others hold only what was named
                calls[name, rate] = partial(run, chosen, only=named, out=folder)
            return _called(calls, jobs, on_progress)
    finally:
        if work is None:
            shutil.rmtree(scratch, ignore_errors=True)


def _called(
    calls: "Mapping[tuple[str, float], Callable[[], list[Tested]]]", jobs: int, on_progress: Callable[[int], None]
) -> "dict[tuple[str, float], list[Tested]]":
    """Return the results of calls, made in turn or by as many processes as there are jobs."""
    found = {}
    if jobs == 1:
        for task, call in calls.items():
            found[task] = call()
            on_progress(len(found))
        return found
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        coming = {task: pool.submit(call) for task, call in calls.items()}
        for done, _ in enumerate(as_completed(coming.values())):
            on_progress(done + 1)
        return {task: one.result() for task, one in coming.items()}


def _by_links(name: str, made: "Mapping[tuple[str, float], list[Tested]]") -> "dict[float, list[Tested]]":
    """Return a paper's claims at other rates of links, by rate."""
    return {rate: made[one, rate] for one, rate in sorted(made) if one == name and rate != 1.0}


def _documents(
    recipes: "Mapping[str, Paper]", quick: bool, made: "Mapping[tuple[str, float], list[Tested]]"
) -> dict[str, Any]:
    documents = [_document(one, recipes[one], quick, made[one, 1.0], _by_links(one, made)) for one in recipes]
    return documents[0] if len(documents) == 1 else {"papers": documents}


def _document(
    name: str,
    chosen: "Paper",
    quick: bool,
    tested: Sequence["Tested"],
    varied: "Mapping[float, Sequence[Tested]]",
) -> dict[str, Any]:
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
        "links": [{"links": rate, "claims": [one.to_json() for one in again]} for rate, again in varied.items()],
        "left_out": [asdict(one) for one in chosen.left_out],
    }


def _print(chosen: "Paper", tested: Sequence["Tested"], quick: bool) -> None:
    from moetool.bench.paper.verdict import ANSWERS

    tables.print_paragraph(f"{chosen.paper.title}. {chosen.paper.reference}")
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
            tables.print_paragraph(f"{one.claim.id}, here: {one.claim.here}")
    for left in chosen.left_out:
        tables.print_paragraph(f"not repeated: {', '.join(left.ids)}: {left.why}")
    for on in dict.fromkeys(one.found.on for one in tested if one.found is not None):
        tables.print_paragraph(f"measured on {on}")
    count = {answer: sum(one.verdict.answer == answer for one in tested) for answer in ANSWERS}
    print(", ".join(f"{number} {answer}" for answer, number in count.items() if number) + f" of {len(tested)}")
    if quick:
        print("sizes of --quick: too small for meaningful verdicts")


def _print_links(tested: Sequence["Tested"], varied: "Mapping[float, Sequence[Tested]]") -> None:
    """Print the verdicts at each rate of links, of the claims that it can change."""
    if not varied:
        return
    rates = {1.0: tested, **varied}
    answers: dict[tuple[str, str], dict[float, str]] = {}
    for rate, again in rates.items():
        for one in again:
            answers.setdefault((one.claim.id, one.claim.says), {})[rate] = one.verdict.answer
    rows = [
        [*claim, *(by_rate[rate] for rate in sorted(rates))]
        for claim, by_rate in answers.items()
        if len(by_rate) == len(rates)
    ]
    title = "verdicts by the rate of all links, x the machine's"
    tables.print_table(
        title, ["", "the paper says", *(f"{rate:g} x" for rate in sorted(rates))], rows, num_text=len(rates) + 2
    )
    same = sum(len(set(by_rate.values())) == 1 for by_rate in answers.values() if len(by_rate) == len(rates))
    print(f"{same} of {len(rows)} claims have the same verdict at every rate; links change no other claim")


def _print_counts(found: "Mapping[str, Sequence[Tested]]") -> None:
    from moetool.bench.paper.verdict import ANSWERS

    rows = []
    for name, tested in found.items():
        counts = [str(sum(one.verdict.answer == answer for one in tested)) for answer in ANSWERS]
        rows.append([name, *counts, f"{sum(one.seconds for one in tested) / 60:.1f}"])
    tables.print_table("claims by verdict", ["paper", *ANSWERS, "minutes"], rows)


def _value(name: str, mean: float, half: float | None, unit: str) -> str:
    """Format a mean with its interval, without digits of the mean that the interval leaves open."""
    scale, sign = (100, " %") if unit == "%" else (1, f" {unit}" if unit else "")
    mean, half = scale * mean, None if half is None else scale * half
    if half and math.isfinite(half):
        mean = round(mean, 1 - math.floor(math.log10(half))) + 0.0  # not -0
    return f"{name} {_number(mean, 3)}{'' if half is None else f' ± {_number(half, 2)}'}{sign}"


def _number(value: float, digits: int) -> str:
    """Format a number by significant digits, without an exponent for large ones."""
    return f"{float(f'{value:.{digits}g}'):,.0f}" if abs(value) >= 10**digits else f"{value:.{digits}g}"
