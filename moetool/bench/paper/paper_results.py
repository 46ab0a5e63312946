"""Tables of papers' claims: what the paper says, what was found, the verdict, and verdicts by the rate of links."""

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import fields
from functools import partial
from typing import Any

from moetool.base.tables import numbered
from moetool.bench.bench_result import BenchResult, Columns, Row, table
from moetool.bench.experiment_figure import ExperimentResult
from moetool.bench.paper.verdict import ANSWERS, SPREAD

_ROUNDING = 1e-9
"""Interval of equal values, as a share of their mean."""


def tables(made: BenchResult) -> Iterator[Any]:
    """The tables of each paper, and of the numbers of verdicts if there are several papers."""
    for name, paper in made.facts["papers"].items():
        yield from _claims(made, paper, made.of(paper=name, links=1.0))
        yield from _by_links(made.of(paper=name))
    if made.options["quick"]:
        yield "sizes of --quick: too small for meaningful verdicts"
    if len(made.facts["papers"]) > 1:
        rows = [_counts(name, made.of(paper=name, links=1.0)) for name in made.facts["papers"]]
        columns: Columns = {"paper": ("paper", "s"), **{answer: (answer, "d") for answer in ANSWERS}}
        yield table("claims by verdict", rows, {**columns, "minutes": ("minutes", ".1f")})


def figures(made: BenchResult) -> dict[str, ExperimentResult]:
    """Values and curves of each experiment, named after its first claim."""
    founds: dict[str, ExperimentResult] = {}
    for row in made.of(links=1.0):
        if "curves" in row:
            words = f"{row['paper']} {row['id']}" if len(made.facts["papers"]) > 1 else row["id"]
            stem = re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")
            name = next(one for number in itertools.count(2) for one in (stem, f"{stem}-{number}") if one not in founds)
            known = {field.name: row[field.name] for field in fields(ExperimentResult) if field.name in row}
            founds[name] = ExperimentResult(**known)
    return founds


def _claims(made: BenchResult, paper: Row, rows: list[Row]) -> Iterator[Any]:
    yield f"{paper['title']}. {paper['reference']}"
    found: Columns = {"found": (lambda row: "; ".join(map(_value, row["found"])) or None, "s")}
    runs = {conditions: f"{number}" for number, conditions in enumerate(dict.fromkeys(map(_conditions, rows)), start=1)}
    verdict: Columns = {
        "verdict": (lambda row: f"{row['verdict']}: {row['why']}", "s"),
        "run": (lambda row: runs[_conditions(row)], "s"),
    }
    size: Columns = {"size": (lambda row: row["size"] or None, "s")}
    says: Columns = {"": ("id", "s"), "the paper says": ("says", "s"), "printed": ("printed", "s")}
    claims, own = ([row for row in rows if row.get("ours", False) == ours] for ours in (False, True))
    if claims:
        columns = {**says, **found, **verdict, **size}
        yield table("claims and results: mean ± 95 % interval over seeds", claims, columns, num_text=7)
    if own:
        columns = {"": ("id", "s"), "question": ("says", "s"), **found, **verdict}
        yield table("questions of moetool's that the paper does not answer", own, columns, num_text=5)
    yield from (f"{row['id']}, here: {row['here']}" for row in rows if row["here"])
    unlike = [
        row for row in rows if row["verdict"] == "differs" or (row["verdict"] == "undecided" and row.get("reason"))
    ]
    yield from dict.fromkeys(
        f"{row['id']}, {row['verdict']}: {row.get('reason') or 'no reason known'}" for row in unlike
    )
    if any(row["verdict"] == "undecided" and not row.get("reason") and SPREAD in row["why"] for row in rows):
        yield f"undecided {SPREAD}: more seeds would narrow the intervals"
    yield from (f"not repeated: {', '.join(left['ids'])}: {left['why']}" for left in paper["left_out"])
    yield from (f"run {number}: {conditions}" for conditions, number in runs.items())
    counts = _counts("", rows)
    if claims:
        yield ", ".join(f"{counts[answer]} {answer}" for answer in ANSWERS if counts[answer]) + f" of {len(claims)}"


def _conditions(row: Row) -> str:
    """The routes, number of seeds, and models and machines of a row's values."""
    values = next(iter(row.get("values", {}).values()), ())
    seeds = numbered(len(values), "prompt set" if row.get("experiment") == "live" else "seed")
    costs = ", ".join(row.get("costs", ()))
    parts = (row.get("on"), values and seeds, costs and f"costs of {costs}")
    return "; ".join(part for part in parts if part) or "not run"


def _by_links(rows: list[Row]) -> Iterator[Any]:
    """The verdicts at each rate of links, of the claims that it can change."""
    rates = sorted({row["links"] for row in rows})
    if len(rates) < 2:
        return
    answers: dict[tuple[str, str], Row] = {}
    for row in rows:
        mine = answers.setdefault((row["id"], row["says"]), {"id": row["id"], "says": row["says"], "verdicts": {}})
        mine["verdicts"][row["links"]] = row["verdict"]
    varied = [mine for mine in answers.values() if len(mine["verdicts"]) == len(rates)]
    yield table(
        "verdicts by the rate of all links, x the machine's",
        varied,
        {
            "": ("id", "s"),
            "the paper says": ("says", "s"),
            **{f"{rate:g} x": (partial(lambda row, rate: row["verdicts"][rate], rate=rate), "s") for rate in rates},
        },
        num_text=len(rates) + 2,
    )
    same = sum(len(set(mine["verdicts"].values())) == 1 for mine in varied)
    yield f"{same} of {len(varied)} claims have the same verdict at every rate; links change no other claim"


def _counts(paper: str, rows: list[Row]) -> Row:
    claims = [row for row in rows if not row.get("ours", False)]
    counts: Row = {answer: sum(row["verdict"] == answer for row in claims) for answer in ANSWERS}
    return {"paper": paper, **counts, "minutes": sum(row["seconds"] for row in rows) / 60}


def _value(found: Row) -> str:
    """Format a mean with its interval, without digits of the mean that the interval leaves open.

    Counted values and equal ones, which differ by rounding alone, have no interval.
    """
    unit = found["unit"]
    scale, sign = (100, " %") if unit == "%" else (1, f" {unit}" if unit else "")
    mean, half = scale * found["mean"], None if found["half_95"] is None else scale * found["half_95"]
    if half is not None and half <= _ROUNDING * abs(mean):
        half = None
    if half and math.isfinite(half):
        mean = round(mean, 1 - math.floor(math.log10(half))) + 0.0  # not -0
    return f"{found['name']} {_number(mean, 3)}{'' if half is None else f' ± {_number(half, 2)}'}{sign}"


def _number(value: float, digits: int) -> str:
    """Format a number by significant digits, without an exponent for large ones."""
    return f"{float(f'{value:.{digits}g}'):,.0f}" if abs(value) >= 10**digits else f"{value:.{digits}g}"
