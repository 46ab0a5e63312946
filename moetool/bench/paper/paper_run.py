"""A paper from its recipe to its verdicts."""

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from moetool import config, durable, plugins
from moetool.bench.paper.claims import Claim, Paper, choose
from moetool.bench.paper.verdict import CannotTestError, Found, Verdict, judge
from moetool.bench.paper.workbench import Workbench
from moetool.errors import CapacityError, MismatchError

_MISSING = (CannotTestError, MismatchError, CapacityError)
"""Errors that make a claim untestable: model, trace or machine lack a requirement of its experiment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tested:
    """A claim with its verdict.

    Attributes:
        found: measured values; None if untestable.
        seconds: run time of the experiment; 0 if another claim ran it.
        pictures: names of its figure files.
    """

    claim: Claim
    verdict: Verdict
    found: Found | None
    seconds: float
    pictures: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """A JSON object."""
        claim, verdict = self.claim, self.verdict
        return {
            "id": claim.id,
            "says": claim.says,
            "printed": claim.printed,
            "here": claim.here,
            "experiment": claim.experiment,
            "options": dict(claim.options),
            "check": {name: value for name, value in asdict(claim.check).items() if value},
            "verdict": verdict.answer,
            "why": verdict.why,
            "size": verdict.size,
            "found": [{"name": n, "mean": m, "half_95": h, "unit": verdict.unit[n]} for n, m, h in verdict.shown],
            "values": {} if self.found is None else {name: list(v) for name, v in self.found.values.items()},
            "traces": 0 if self.found is None else self.found.traces,
            "exact": self.found is not None and self.found.exact,
            "on": "" if self.found is None else self.found.on,
            "seconds": self.seconds,
            "pictures": list(self.pictures),
        }


def run_paper(
    paper: Paper,
    work: Path,
    *,
    only: Sequence[str] = (),
    quick: bool = False,
    given: Mapping[str, Path] | None = None,
    out: Path | None = None,
    on_progress: Callable[[int], None] = lambda done: None,
) -> list[Tested]:
    """Run the experiments of a paper and judge its claims.

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


def with_links(paper: Paper, links: float, only: Sequence[str] = ()) -> Paper:
    """Return the paper with a factor on the rates of all links, and only the claims that links can change.

    The same factor on compute costs would give the same ratios.
    """
    claims = [
        one for one in choose(paper.claim, only) if getattr(plugins.load("experiment", one.experiment), "LINKS", False)
    ]
    return replace(paper, claim=tuple(claims), machine=replace(paper.machine, links=links * paper.machine.links))


def _judged(
    bench: Workbench,
    claims: Sequence[Claim],
    out: Path | None,
    on_progress: Callable[[int], None],
) -> list[Tested]:
    known: dict[str, Found | Verdict] = {}
    drawn: dict[str, tuple[str, ...]] = {}
    tested = []
    for number, claim in enumerate(claims):
        key = repr((claim.experiment, claim.options))
        began = time.perf_counter()
        fresh = key not in known
        if fresh:
            known[key] = _measure(bench, claim)
        found = known[key]
        if isinstance(found, Verdict):
            tested.append(Tested(claim=claim, verdict=found, found=None, seconds=time.perf_counter() - began))
        else:
            if out is not None and fresh:
                drawn[key] = _draw(out, claim, found)
            seconds = time.perf_counter() - began if fresh else 0.0
            # A ceiling is 1 + the compute time that loads can hide, relative to the load time.
            ceiling = {name: 1 + (most - 1) * bench.machine.links for name, most in claim.ceiling.items()}
            verdict = judge(claim.check, found, claim.derive, size=claim.size, ceiling=ceiling)
            pictures = drawn.get(key, ())
            tested.append(Tested(claim=claim, verdict=verdict, found=found, seconds=seconds, pictures=pictures))
        on_progress(number + 1)
    return tested


def _measure(bench: Workbench, claim: Claim) -> Found | Verdict:
    """Run the claim's experiment; a verdict if it cannot run here."""
    module = plugins.load("experiment", claim.experiment)
    options = config.parse(module.Options, claim.options, f"{claim.id}, {claim.experiment}")
    try:
        found: Found = module.run(bench, options)
    except _MISSING as error:
        return Verdict(answer="cannot be tested here", why=str(error))
    return found


def _draw(out: Path, claim: Claim, found: Found) -> tuple[str, ...]:
    from moetool.bench.paper.found_figure import draw

    stem = "".join(c if c.isalnum() else "-" for c in claim.id.lower()).strip("-")
    paths = []
    for suffix in (".svg", ".png"):
        name, number = f"{stem}{suffix}", 2
        while (out / name).exists():
            name, number = f"{stem}-{number}{suffix}", number + 1
        durable.require_writable(out / name)
        draw(out / name, claim.id, found)
        paths.append(name)
    return tuple(paths)
