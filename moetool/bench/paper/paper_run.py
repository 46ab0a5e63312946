"""A paper from its recipe to its verdicts."""

import multiprocessing
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from moetool.base import config, plugins
from moetool.base.child_process import end_with_parent
from moetool.base.config import POSITIVE, require_within
from moetool.base.errors import CapacityError, MismatchError, UsageError
from moetool.base.tables import count, progress
from moetool.bench.bench_result import BenchResult, Row, recorded
from moetool.bench.experiment_figure import ExperimentResult
from moetool.bench.paper.claims import Claim, Paper, choose, names, read_paper
from moetool.bench.paper.verdict import FACTOR, CannotTestError, Verdict, judge
from moetool.bench.paper.workbench import Workbench
from moetool.costing.machines import NamedModel, read_named_model, recipe_names
from moetool.models.libraries import read_machine
from moetool.trace.reader import Trace

_MISSING = (CannotTestError, MismatchError, CapacityError)
"""Errors that make a claim untestable: model, trace or machine lack a requirement of its experiment."""


def run_paper(
    paper: Paper, work: Path, *, quick: bool = False, given: Mapping[str, Path] | None = None
) -> Iterator[Row]:
    """Run the experiments of a paper and judge its claims, one after the other.

    A row is a claim with its verdict, the models and machines whose `costs` it has, and the fields of
    `ExperimentResult`, which are missing if it cannot be tested here. `seconds` is the run time of the experiment; if
    another claim ran it, 0, and `curves` is missing.

    Args:
        work: folder that keeps traces and predictors (`moetool.bench.paper.workbench.Workbench`).
        quick: use the recipe's small sizes.
        given: traces by name, instead of the embedded model's.

    Raises:
        UsageError: a claim refers to an unmeasured value.
    """
    model = read_named_model(paper.machine.model) if paper.machine.model else None
    paper = priced(paper, given or {})
    bench = Workbench(
        sizes=paper.quick if quick else paper.sizes, machine=paper.machine.assumed(), work=work, given=given or {}
    )
    known: dict[str, ExperimentResult | Verdict] = {}
    try:
        for claim in paper.claim:
            key, began = repr((claim.experiment, claim.options)), time.perf_counter()
            if fresh := key not in known:
                known[key] = _measure(bench, claim)
            found, seconds = known[key], time.perf_counter() - began
            if isinstance(found, Verdict):
                row = _row(claim, found)
            else:
                cannot = decided_elsewhere(claim, found, model)
                verdict = judge(claim.check, found, claim.derive, size=claim.size, ruled_out=cannot)
                row = _row(claim, verdict)
                row |= {name: value for name, value in asdict(found).items() if fresh or name != "curves"}
            yield {**row, "costs": costs_of(claim, paper), "seconds": seconds if fresh else 0.0}
    finally:
        shutil.rmtree(bench.scratch, ignore_errors=True)


def costs_of(claim: Claim, paper: Paper) -> list[str]:
    """Return the models and machines whose costs a claim's values have; empty if they have none."""
    module = plugins.load("experiment", claim.experiment)
    if not getattr(module, "LINKS", False) or getattr(module, "DESCRIBES_COSTS", False):
        return []

    def named(options: Any) -> Iterator[str]:
        if isinstance(options, Mapping):
            if isinstance(machine := options.get("machine"), str) and "model" in options:
                yield f"{options['model']} on {machine}"
            for value in options.values():
                yield from named(value)

    own = f"{paper.machine.model} on {paper.machine.machine}" if paper.machine.model else "an assumed machine"
    found, lines = dict.fromkeys(named(claim.options)), claim.options.get("lines", {}).values()
    inherits = "machine" not in claim.options and any("machine" not in line for line in lines)
    return list(dict.fromkeys([own, *found] if inherits or not found else found))


def decided_elsewhere(claim: Claim, found: ExperimentResult, model: NamedModel | None) -> str:
    """Return why the measured values say nothing about the paper's model or machine, if so.

    A policy that moves whole layers loses by experts per layer over experts per token, so a bound on the gain over it
    needs the paper's. So do shares of a token's experts. What is measured in bytes or seconds of a model needs one of
    its size, or a GPU (`Claim.needs`).
    """
    if model is None:
        return ""
    bounds = (claim.derive.get(name, {}) for name in (*claim.check.at_least, *claim.check.at_most))
    compared = {name for how in bounds for pair in how.values() for name in pair}
    experts, used = found.experts
    if compared & set(found.whole_layers) and not _alike(experts / used, model.experts / model.top_k):
        return (
            f"a layer here has {experts} experts, of which {used} are used, and the claim's {model.experts} and "
            f"{model.top_k}: whole layers cost in proportion"
        )
    if "top_k" in claim.needs and not _alike(used, model.top_k):
        return f"a token uses {used} experts here and {model.top_k} in {model.name}, which decides their shares"
    size = model.layers * model.experts * model.expert_bytes
    if "size" in claim.needs and not _alike(found.expert_bytes, size):
        here, there = (count(one, "B") for one in (found.expert_bytes, size))
        return f"the measured model's experts have {here}, those of {model.name} {there}"
    if "gpu" in claim.needs and not torch.cuda.is_available():
        return f"measured on {read_machine().cpu}, not beside the model on a GPU"
    return ""


def priced(paper: Paper, given: Mapping[str, Path]) -> Paper:
    """Return the paper with the costs of the model that made the given traces, wherever it names machine and model.

    That is the first of `recipes/models` with the traces' layers, experts and top-k. Without one, or where claims fix
    an expert's bytes (`simulation`, as Prism's), costs stay as they are.
    """
    if not given or not paper.machine.model or any("simulation" in claim.options for claim in paper.claim):
        return paper
    spec = Trace(next(iter(given.values()))).spec
    routed = (spec.num_layers, spec.num_experts, max(spec.top_k_L))
    known = {name: read_named_model(name) for name in recipe_names("models")}
    name = next((name for name, one in known.items() if (one.layers, one.experts, one.top_k) == routed), "")
    if not name:
        return paper

    def renamed(options: Any) -> Any:
        if not isinstance(options, Mapping):
            return options
        own = {"model": name} if {"machine", "model"} <= options.keys() else {}
        return {key: renamed(value) for key, value in options.items()} | own

    claims = tuple(replace(claim, options=renamed(claim.options)) for claim in paper.claim)
    return replace(paper, claim=claims, machine=replace(paper.machine, model=name))


def _alike(one: float, other: float) -> bool:
    return min(one, other) * FACTOR >= max(one, other)


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
    options: PaperOptions, given: Mapping[str, Path], work: Path | None = None, file: Path | None = None
) -> BenchResult:
    """Run papers, and again at each further rate of links the claims that it can change.

    A row is a claim of a paper at a rate of links, as of `run_paper`.

    Args:
        given, work: as in `run_paper`; without `work` a temporary folder.
        file: see `BenchResult`.

    Raises:
        UsageError: no claim has a name of `only`, or a claim refers to an unmeasured value.
    """
    papers: dict[str, Paper] = {}
    for name in names() if options.names == ("all",) else options.names:
        recipe = read_paper(name)
        papers[name] = replace(recipe, claim=tuple(choose(recipe.claim, options.only)))
    tasks = {
        (name, rate): one if rate == 1.0 else with_links(one, rate)
        for name, one in papers.items()
        for rate in (1.0, *options.links)
    }
    claims = sum(len(one.claim) for one in tasks.values())
    title = "all papers" if len(papers) > 1 else next(iter(papers.values())).paper.title[:40]
    with ExitStack() as stack:
        scratch = work or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moetool-paper-")))
        on_progress = stack.enter_context(progress(title, claims))
        made = stack.enter_context(recorded("paper", options, file))
        made.facts["papers"] = {name: _facts(priced(one, given), options.quick) for name, one in papers.items()}
        calls = {
            task: partial(run_paper, one, scratch, quick=options.quick, given=given) for task, one in tasks.items()
        }
        for done, ((name, rate), row) in enumerate(_rows(calls, options.jobs), start=1):
            made.add(paper=name, links=rate, **row)
            on_progress(done)
    return made


Task = tuple[str, float]
"""A paper and a rate of links."""


def _rows(calls: Mapping[Task, Callable[[], Iterator[Row]]], jobs: int) -> Iterator[tuple[Task, Row]]:
    """Yield the rows of the calls as they are made, in turn or by as many processes as there are jobs."""
    if jobs == 1 or len(calls) == 1:
        for task, call in calls.items():
            yield from ((task, row) for row in call())
        return
    context = multiprocessing.get_context("spawn")
    with (
        context.Manager() as manager,
        ProcessPoolExecutor(jobs, mp_context=context, initializer=end_with_parent) as pool,
    ):
        rows = manager.Queue()
        running = [pool.submit(_send, task, call, rows) for task, call in calls.items()]
        for one in running:
            one.add_done_callback(lambda _: rows.put(None))  # a killed process sends nothing itself
        for _ in running:
            yield from iter(rows.get, None)
        for one in running:
            one.result()


def _send(task: Task, call: Callable[[], Iterator[Row]], rows: Any) -> None:
    for row in call():
        rows.put((task, row))


def _facts(chosen: Paper, quick: bool) -> Row:
    return {
        **asdict(chosen.paper),
        "sizes": asdict(chosen.quick if quick else chosen.sizes),
        "assumed_machine": asdict(chosen.machine.assumed()),
        "left_out": [asdict(one) for one in chosen.left_out],
    }


def with_links(paper: Paper, links: float) -> Paper:
    """Return the paper with a factor on the rates of all links, and only the claims that links can change.

    The same factor on compute costs would give the same ratios.
    """
    claims = [one for one in paper.claim if getattr(plugins.load("experiment", one.experiment), "LINKS", False)]
    return replace(paper, claim=tuple(claims), machine=replace(paper.machine, links=links * paper.machine.links))


def _row(claim: Claim, verdict: Verdict) -> Row:
    return {
        **{
            name: getattr(claim, name)
            for name in ("id", "says", "printed", "here", "ours", "reason", "experiment", "options")
        },
        "check": {name: value for name, value in asdict(claim.check).items() if value},
        "verdict": verdict.answer,
        "why": verdict.why,
        "size": verdict.size,
        "found": [{"name": n, "mean": m, "half_95": h, "unit": verdict.unit[n]} for n, m, h in verdict.shown],
    }


def _measure(bench: Workbench, claim: Claim) -> ExperimentResult | Verdict:
    """Run the claim's experiment; a verdict if it cannot run here."""
    module = plugins.load("experiment", claim.experiment)
    options = config.parse(module.Options, claim.options, f"{claim.id}, {claim.experiment}")
    try:
        found: ExperimentResult = module.run(bench, options)
    except _MISSING as error:
        return Verdict(answer="cannot be tested here", why=str(error))
    return found
