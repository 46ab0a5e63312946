"""The command `moetool report`: the page of a trace, of a placement or of a cache plan."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from moetool.base import durable, tables
from moetool.base.config import parse, parse_settings
from moetool.base.errors import MismatchError, UsageError
from moetool.cli.flags import Overwrite, Recipe, listed, open_trace, require_policies, settable


def report(
    trace: Annotated[Path, typer.Argument(metavar="PATH", help="Trace directory or plan file.")],
    out: Annotated[Path, typer.Option("--out", help="HTML file to write, self-contained.")],
    policy: Annotated[
        list[str],
        typer.Option(help="Cache policies to compare with belady, comma-separated or repeated (default: lru,lfu)."),
    ] = [],
    budget: Annotated[
        list[str],
        typer.Option(help="Expert memory: bytes or shares of all experts (default: 6.25%,12.5%,25%,50%,75%)."),
    ] = [],
    settings: Annotated[
        list[str],
        settable(
            "Setting of the report or option of a policy: report.choices, report.uses, "
            "report.tokenizer=MODEL, report.by=label, ..., POLICY.OPTION."
        ),
    ] = [],
    served: Annotated[
        list[str],
        typer.Option("--trace", help="SERVER=DIR: trace of a server's requests (placement plans only). Repeatable."),
    ] = [],
    before: Annotated[Path | None, typer.Option(help="Earlier plan to compare with (placement plans only).")] = None,
    overwrite: Overwrite = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the page's data as JSON.")] = False,
    recipe: Recipe = None,
) -> None:
    """Render a trace, placement or cache plan as one HTML page.

    A trace: popularity, skew, entropy, affinity, reuse distance, hit rates and advice. A placement: experts per
    GPU, load and traffic. A cache plan: latency against memory.
    """
    from moetool.report.sample import ReportOptions
    from moetool.report.trace_measures import POLICIES, measure
    from moetool.tuning.advice import advise

    durable.require_new_file(out, overwrite)
    if out.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"--out {out}: the page is HTML; give a name that ends in .html")
    if trace.is_file():
        if policy or budget or settings:
            raise UsageError(
                f"{trace} is not a trace directory, and --policy, --budget and --set apply to traces only; "
                "leave them out"
            )
        report_plan(trace, out, served, before, as_json)
        return
    if trace.suffix == ".json" and not trace.exists():
        raise UsageError(f"no plan at {trace}; make one with: moetool plan cache, or moetool plan placement")
    if served or before is not None:
        raise UsageError(f"--trace and --before are for the page of a placement plan, expected its file, not {trace}")
    source, options = open_trace(trace), parse_settings(settings)
    chosen = parse(ReportOptions, options.pop("report", {}), "report")
    policies = listed(policy) if policy else list(POLICIES)
    require_policies(policies, options)
    with tables.progress(f"measuring {trace} (%)", 100) as on_progress:
        made = measure(
            source,
            policies=policies,
            budgets=listed(budget) if budget else (),
            policy_options=options,
            options=chosen,
            on_progress=on_progress,
        )
    from moetool.report.advice_page import answers
    from moetool.report.atlas import draw_atlas
    from moetool.report.trace_page import caveat, render

    with tables.stages() as on_stage:
        advice = advise(source, on_progress=on_stage)
    spelled = None
    if chosen.tokenizer is not None:
        from moetool.models.checkpoint import Checkpoint

        spelled = Checkpoint.open(chosen.tokenizer, weights=False).tokenizer
    atlas = draw_atlas(source, made.routes, spelled)
    page = render(made, advice, atlas)
    durable.write_text(out, page)
    if as_json:
        tables.print_json(
            {
                **made.to_json(),
                "advice": {**advice.to_json(), "answers": [one.to_json() for one in answers(advice)]},
                "atlas": atlas.to_json(),
                "caveat": caveat(made),
            }
        )
        return
    tables.print_paragraph(f"{out}: {source.spec.name}, {tables.count(len(page.encode()), 'B')}")
    if warning := caveat(made):
        tables.print_paragraph(f"  {warning}")
    for one in answers(advice):
        tables.print_paragraph(f"  {one.question} {one.answer}")


def report_plan(path: Path, out: Path, traces: Sequence[str], before: Path | None, as_json: bool) -> None:
    """Write the page of a plan, by its kind.

    Raises:
        UsageError: the file is not a plan, or an option has no effect on its kind.
        MismatchError: the plan is damaged, or its model or cluster differs from the other inputs.
    """
    kind = _kind(path)
    if kind == "placement_plan":
        _placement(path, out, traces, before, as_json)
    elif kind == "cache_plan":
        if traces or before is not None:
            raise UsageError(f"{path} is a cache plan, whose page needs no other input; leave out --trace and --before")
        _cache(path, out, as_json)
    else:
        raise UsageError(
            f"{path} holds {kind}, expected a trace's directory, a placement plan or a cache plan; counts are for "
            "'moetool advise', and simulated runs are drawn by: moetool simulate --report FILE"
        )


def _kind(path: Path) -> str:
    from moetool.base.json_files import read_json

    try:
        return str(read_json(path, advice="").get("kind", "something else"))
    except MismatchError:
        return "something else"


def _placement(path: Path, out: Path, traces: Sequence[str], before: Path | None, as_json: bool) -> None:
    from moetool.placement.plan import PlacementPlan
    from moetool.placement.planning import open_traces
    from moetool.report.placement_page import measure, page, to_json

    plan = PlacementPlan.load(path)
    other = None if before is None else PlacementPlan.load(before)
    made, tokens_LE = measure(plan, open_traces(traces), other)
    facts = [
        ("plan", str(path)),
        *([("before", f"{before}, by {other.planner}")] if other else []),
        ("planner", f"{plan.planner}, seed {plan.seed}, {_options(plan.options)}"),
        (
            "made from",
            ", ".join(
                f"{one.server or 'all servers'}: {one.path} ({tables.numbered(one.requests, 'request')})"
                for one in plan.traces
            )
            or "-",
        ),
        ("costs", plan.costs),
        ("objective", f"{plan.objective}: {tables.significant(plan.value)} on the traces it was planned from"),
        *([("shown on", ", ".join(traces))] if traces else []),
    ]
    durable.write_text(out, page(made, tokens_LE, facts))
    if as_json:
        tables.print_json(to_json(made))
        return
    tables.print_paragraph(
        f"{out}: {plan.spec.name}, {len(plan.cluster.gpus)} GPUs, {' and '.join(one.name for one in made)}"
    )
    for one in made:
        if one.row is not None:
            known = [sent for _, _, sent in one.row.score.link_bytes if sent is not None]
            tables.print_paragraph(
                f"  {one.label}: {tables.percent(one.row.score.local)} of the calls local"
                + (f", {tables.count(sum(known), 'B')} between servers" if known else "")
                + f", T_comp + T_comm {tables.significant(one.row.score.latency)} {one.row.score.unit}"
            )


def _cache(path: Path, out: Path, as_json: bool) -> None:
    from moetool.caching.plan import CachePlan
    from moetool.report.cache_page import page

    plan = CachePlan.load(path)
    facts = [
        ("plan", str(path)),
        ("policy", f"{plan.policy}, {_options(plan.options)}"),
        ("slots", f"{plan.slots:,} of {plan.spec.total_experts:,}"),
        ("prefetch", f"distance {plan.prefetch_distance}" if plan.prefetch_distance else "nothing"),
        *([("predictor", f"{plan.predictor.name} ({plan.predictor.sha256[:12]})")] if plan.predictor else []),
        ("trace", plan.trace_sha256),
        ("profile", plan.profile_sha256 or "none (bytes moved instead of time)"),
        *([("to reach", f"{plan.target_tpot_s * 1e3:,.4g} ms per token")] if plan.target_tpot_s else []),
    ]
    durable.write_text(out, page(plan, facts))
    if as_json:
        tables.print_json(list(plan.frontier))
        return
    tables.print_paragraph(f"{out}: {plan.spec.name}, {plan.policy} with {plan.slots:,} slots")


def _options(options: dict[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in options.items()) or "no options"
