"""A paper from its recipe to its verdicts."""

import multiprocessing
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from moetool import config, durable, plugins
from moetool.bench.bench_result import BenchResult, Row, recorded
from moetool.bench.found_figure import Found
from moetool.bench.paper.claims import Claim, Paper, choose, names, read_paper
from moetool.bench.paper.verdict import CannotTestError, Verdict, judge
from moetool.bench.paper.workbench import Workbench
from moetool.config import POSITIVE, require_within
from moetool.errors import CapacityError, MismatchError, UsageError
from moetool.tables import progress

_MISSING = (CannotTestError, MismatchError, CapacityError)
"""Errors that make a claim untestable: model, trace or machine lack a requirement of its experiment."""


def run_paper(
    paper: Paper,
    work: Path,
    *,
    only: Sequence[str] = (),
    quick: bool = False,
    given: Mapping[str, Path] | None = None,
    out: Path | None = None,
    on_progress: Callable[[int], None] = lambda done: None,
) -> list[Row]:
    """Run the experiments of a paper and judge its claims.

    A row is a claim with its verdict; `values`, `traces`, `exact` and `on` are those of `Found`, and missing if it
    cannot be tested here. `seconds` is the run time of the experiment, 0 if another claim ran it; `pictures` are the
    names of its figure files.

    Args:
        work: folder that keeps traces and predictors (`moetool.bench.paper.workbench.Workbench`).
        only: tables and figures to test (`moetool.bench.paper.claims.choose`).
        quick: use the recipe's small sizes.
        given: traces by name, instead of the embedded model's.
        out: folder for a figure of each experiment, as SVG and PNG.
        on_progress: called with the number of judged claims.

    Raises:
        UsageError: no claim has a name, or a claim refers to an unmeasured value.
    """
    claims = choose(paper.claim, only)
    bench = Workbench(
        sizes=paper.quick if quick else paper.sizes,
        machine=paper.machine.assumed(),
        work=work,
        given=given or {},
    )
    try:
        return _judged(bench, claims, out, on_progress)
    finally:
        shutil.rmtree(bench.scratch, ignore_errors=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperOptions:
    """Options of `moetool bench paper`.

    Attributes:
        names: papers or recipes; `all`: every shipped one.
        only: tables and figures of one paper.
        quick: whether to use the recipes' small sizes.
        links: further rates of all links, as multiples of the machine's.
        jobs: papers, and rates of links, that run in parallel.
    """

    names: tuple[str, ...]
    only: tuple[str, ...] = ()
    quick: bool = False
    links: tuple[float, ...] = ()
    jobs: int = 1

    def __post_init__(self) -> None:
        require_within(self, "--", links=POSITIVE)
        if self.names == ("all",) and self.only:
            raise UsageError("--only names tables of one paper; name the paper instead of all")


def run_papers(
    options: PaperOptions, given: Mapping[str, Path], work: Path | None = None, out: Path | None = None
) -> BenchResult:
    """Run papers, and again at each further rate of links the claims that it can change.

    A row is a claim of a paper at a rate of links, as of `run_paper`.

    Args:
        given, work: as in `run_paper`; without `work` a temporary folder.
        out: folder for figures, with a folder for each of several papers, and for `verdicts.json`.
    """
    recipes = {one: read_paper(one) for one in (names() if options.names == ("all",) else options.names)}
    tasks: dict[tuple[str, float], Paper] = {}
    for name, chosen in recipes.items():
        choose(chosen.claim, options.only)
        tasks[name, 1.0] = chosen
        for rate in options.links:
            if (varied := with_links(chosen, rate, options.only)).claim:
                tasks.setdefault((name, rate), varied)
    with ExitStack() as stack:
        scratch = work or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moetool-paper-")))
        made = stack.enter_context(recorded("paper", options, out and out / "verdicts.json"))
        calls: dict[tuple[str, float], Callable[..., list[Row]]] = {}
        for (name, rate), chosen in tasks.items():
            folder = None if out is None or rate != 1.0 else out / name if len(recipes) > 1 else out
            if folder is not None:
                folder.mkdir(exist_ok=True)
            only = options.only if rate == 1.0 else ()  # the others hold only what was named
            calls[name, rate] = partial(
                run_paper, chosen, scratch, only=only, quick=options.quick, given=given, out=folder
            )
        for (name, rate), tested in _called(calls, options, recipes).items():
            made.rows += [{"paper": name, "links": rate, **one} for one in tested]
        made.facts["papers"] = {name: _facts(chosen, options.quick) for name, chosen in recipes.items()}
    return made


def _called(
    calls: Mapping[tuple[str, float], Callable[..., list[Row]]],
    options: PaperOptions,
    recipes: Mapping[str, Paper],
) -> dict[tuple[str, float], list[Row]]:
    """Return the results of calls, made in turn or by as many processes as there are jobs."""
    if len(calls) == 1:
        ((task, call),) = calls.items()
        chosen = recipes[task[0]]
        with progress(chosen.paper.title[:40], len(choose(chosen.claim, options.only))) as on_progress:
            return {task: call(on_progress=on_progress)}
    found = {}
    with ExitStack() as stack:
        on_progress = stack.enter_context(
            progress("all papers" if len(recipes) > 1 else "all rates of links", len(calls))
        )
        if options.jobs == 1:
            for task, call in calls.items():
                found[task] = call()
                on_progress(len(found))
            return found
        pool = stack.enter_context(ProcessPoolExecutor(options.jobs, mp_context=multiprocessing.get_context("spawn")))
        coming = {task: pool.submit(call) for task, call in calls.items()}
        for done, _ in enumerate(as_completed(coming.values())):
            on_progress(done + 1)
        return {task: one.result() for task, one in coming.items()}


def _facts(chosen: Paper, quick: bool) -> Row:
    return {
        **asdict(chosen.paper),
        "sizes": asdict(chosen.quick if quick else chosen.sizes),
        "machine_named": {"machine": chosen.machine.machine, "model": chosen.machine.model},
        "assumed_machine": asdict(chosen.machine.assumed()),
        "left_out": [asdict(one) for one in chosen.left_out],
    }


def with_links(paper: Paper, links: float, only: Sequence[str] = ()) -> Paper:
    """Return the paper with a factor on the rates of all links, and only the claims that links can change.

    The same factor on compute costs would give the same ratios.
    """
    claims = [
        one for one in choose(paper.claim, only) if getattr(plugins.load("experiment", one.experiment), "LINKS", False)
    ]
    return replace(paper, claim=tuple(claims), machine=replace(paper.machine, links=links * paper.machine.links))


def _judged(
    bench: Workbench, claims: Sequence[Claim], out: Path | None, on_progress: Callable[[int], None]
) -> list[Row]:
    known: dict[str, tuple[Found | Verdict, list[str]]] = {}
    rows = []
    for number, claim in enumerate(claims):
        key, began = repr((claim.experiment, claim.options)), time.perf_counter()
        if fresh := key not in known:
            made = _measure(bench, claim)
            known[key] = made, [] if out is None or isinstance(made, Verdict) else _draw(out, claim, made)
        found, pictures = known[key]
        seconds = time.perf_counter() - began if fresh else 0.0
        # A ceiling is 1 + the compute time that loads can hide, relative to the load time.
        ceiling = {name: 1 + (most - 1) * bench.machine.links for name, most in claim.ceiling.items()}
        if isinstance(found, Verdict):
            row = _row(claim, found)
        else:
            row = _row(claim, judge(claim.check, found, claim.derive, size=claim.size, ceiling=ceiling))
            row |= {name: getattr(found, name) for name in ("values", "traces", "exact", "on")}
        rows.append({**row, "seconds": seconds, "pictures": pictures})
        on_progress(number + 1)
    return rows


def _row(claim: Claim, verdict: Verdict) -> Row:
    return {
        **{name: getattr(claim, name) for name in ("id", "says", "printed", "here", "experiment", "options")},
        "check": {name: value for name, value in asdict(claim.check).items() if value},
        "verdict": verdict.answer,
        "why": verdict.why,
        "size": verdict.size,
        "found": [{"name": n, "mean": m, "half_95": h, "unit": verdict.unit[n]} for n, m, h in verdict.shown],
    }


def _measure(bench: Workbench, claim: Claim) -> Found | Verdict:
    """Run the claim's experiment; a verdict if it cannot run here."""
    module = plugins.load("experiment", claim.experiment)
    options = config.parse(module.Options, claim.options, f"{claim.id}, {claim.experiment}")
    try:
        found: Found = module.run(bench, options)
    except _MISSING as error:
        return Verdict(answer="cannot be tested here", why=str(error))
    return found


def _draw(out: Path, claim: Claim, found: Found) -> list[str]:
    from moetool.bench.found_figure import draw

    stem = "".join(c if c.isalnum() else "-" for c in claim.id.lower()).strip("-")
    paths = []
    for suffix in (".svg", ".png"):
        name, number = f"{stem}{suffix}", 2
        while (out / name).exists():
            name, number = f"{stem}-{number}{suffix}", number + 1
        durable.require_writable(out / name)
        draw(out / name, claim.id, found)
        paths.append(name)
    return paths
