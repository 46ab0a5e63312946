"""A placement as a page: who holds what, and with traces the work and the traffic, beside another placement's."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moetool import tables
from moetool.errors import MismatchError
from moetool.placement._comparing import Workload, score_plan
from moetool.placement._demand import read_demand
from moetool.placement._latency import flows
from moetool.placement._placement_plan import PlacementPlan
from moetool.report.figures.placement import Placed, sketches
from moetool.report.sheet import PageTable, Section, render_sheet
from moetool.report.trace_page import shape_of
from moetool.tables import significant


def measure(
    plan: PlacementPlan, traces: Mapping[str, Workload], before: PlacementPlan | None = None
) -> tuple[list[Placed], np.ndarray | None]:
    """Score a plan, and the one before it, on traces; with how often each expert is wanted [L, E], if there are any.

    Tokens start as the plan was made for, on both.

    Raises:
        MismatchError: the two are of different models or clusters, or a trace is of another model.
        UsageError: an unknown server, or no token.
    """
    named = [("after" if before else plan.planner, plan)]
    if before is not None:
        plan.spec.require_same(before.spec, "the plan", "the plan before it")
        if plan.cluster != before.cluster:
            raise MismatchError(
                "the plan before is for another cluster, so its traffic is on other links; plan for this one with: "
                "moetool plan placement"
            )
        named.insert(0, ("before", before))
    if not traces:
        return [Placed(name=name, plan=one) for name, one in named], None
    demand = read_demand(traces, plan.cluster, starts=plan.starts, seed=plan.seed)
    plan.spec.require_same(demand.spec, "the plan", "the trace")
    placed = []
    for name, one in named:
        placed_GLE = one.placed_GLE
        flow_LGG = np.stack(
            [flows(one.cluster, demand.tokens_GLE[:, i], placed_GLE[:, i]) for i in range(one.spec.num_layers)]
        )
        placed.append(Placed(name=name, plan=one, row=score_plan(one, traces), flow_LGG=flow_LGG))
    return placed, demand.tokens_LE


def page(plans: Sequence[Placed], tokens_LE: np.ndarray | None, facts: Sequence[tuple[str, str]]) -> str:
    """The page as HTML.

    Args:
        plans: the one before, if there is one, and the plan.
        facts: where they are from, as terms and texts.
    """
    plan = plans[-1].plan
    drawn = {name: [sketch.on(name) for sketch in made] for name, made in sketches(plans, tokens_LE).items()}
    made = {
        "Who holds what": [_held_table(plans), *([_changes_table(plans)] if len(plans) > 1 else [])],
        "Work": _score_tables(plans),
        "Traffic between servers": _link_tables(plans),
    }
    notes = {"Work": [] if tokens_LE is not None else ["Give --trace SERVER=DIR for work and traffic."]}
    return render_sheet(
        title=f"Placement of {plan.spec.name}",
        heading=f"Expert placement of {plan.spec.name}",
        shape=f"{shape_of(plan.spec)}; {len(plan.cluster.gpus)} GPUs in {len(plan.cluster.servers)} servers",
        facts=facts,
        sections=[
            Section(name=name, notes=notes.get(name, []), pictures=drawn[name], tables=made[name]) for name in drawn
        ],
    )


def to_json(plans: Sequence[Placed]) -> list[dict[str, Any]]:
    """The scores that the page shows, by plan; none without traces."""
    return [{"plan": placed.name, **({} if placed.row is None else placed.row.to_json())} for placed in plans]


def _held_table(plans: Sequence[Placed]) -> PageTable:
    cluster, spec = plans[-1].plan.cluster, plans[-1].plan.spec
    slots_G = cluster.slots_G(spec.slot_bytes)
    held = [placed.plan.placed_GLE.sum(axis=(1, 2)).tolist() for placed in plans]
    return PageTable(
        caption="Experts held in all layers",
        columns=("GPU", *(placed.name for placed in plans), "room for"),
        rows=tuple(
            (
                f"{cluster.servers[n].name}, GPU {g}",
                *(f"{of_G[g]:,}" for of_G in held),
                f"{min(slots_G[g], spec.total_experts):,}",
            )
            for g, n in enumerate(cluster.server_G)
        ),
    )


def _changes_table(plans: Sequence[Placed]) -> PageTable:
    """Experts that each GPU gets and gives up; `moetool plan migrate` orders the moves."""
    before_GLE, after_GLE = plans[0].plan.placed_GLE, plans[-1].plan.placed_GLE
    cluster, spec = plans[-1].plan.cluster, plans[-1].plan.spec
    size_L = np.array(spec.expert_bytes_L)
    gets_GL, gives_GL = (after_GLE & ~before_GLE).sum(axis=2), (before_GLE & ~after_GLE).sum(axis=2)
    return PageTable(
        caption="From before to after",
        columns=("GPU", "gets", "gives up", "bytes that come"),
        rows=tuple(
            (
                f"{cluster.servers[n].name}, GPU {g}",
                f"{gets_GL[g].sum():,}",
                f"{gives_GL[g].sum():,}",
                tables.count(float(gets_GL[g] @ size_L), "B"),
            )
            for g, n in enumerate(cluster.server_G)
        ),
    )


def _score_tables(plans: Sequence[Placed]) -> list[PageTable]:
    scored = [(placed, placed.row) for placed in plans if placed.row is not None]
    if not scored:
        return []
    return [
        PageTable(
            caption=f"On these requests; T in {scored[0][1].score.unit}, its gap to a bound; balance as SGLang has it",
            columns=(
                *("plan", "planner", "requests", "local", "remote", "at least", "T_comp", "T_comm", "gap", "balance"),
                "copies",
            ),
            rows=tuple(
                (
                    placed.name,
                    row.planner,
                    row.requests,
                    f"{row.score.local:.1%}",
                    f"{row.score.remote_calls:,.0f}",
                    "-" if row.score.remote_bound is None else f"{row.score.remote_bound:,.0f}",
                    significant(row.score.comp),
                    significant(row.score.comm),
                    "-" if row.score.latency_gap is None else f"{row.score.latency_gap:.2%}",
                    f"{row.score.balancedness['sglang']:.3f}",
                    f"{row.score.copies:.2f}",
                )
                for placed, row in scored
            ),
        )
    ]


def _link_tables(plans: Sequence[Placed]) -> list[PageTable]:
    """Bytes by link, in the order of the most of the last plan; the fifty with most."""
    scored = [(placed, placed.row.score) for placed in plans if placed.row is not None]
    if not scored or not scored[-1][1].link_bytes or scored[-1][1].link_bytes[0][2] is None:
        return []
    order = sorted(range(len(scored[-1][1].link_bytes)), key=lambda i: -(scored[-1][1].link_bytes[i][2] or 0.0))[:50]
    rows = []
    for i in order:
        a, b, _ = scored[-1][1].link_bytes[i]
        sent = [found.link_bytes[i][2] or 0.0 for _, found in scored]
        change = (f"{sent[-1] / sent[0] - 1:+.1%}" if sent[0] else "-",) if len(sent) > 1 else ()
        rows.append((f"{a} -> {b}", *(tables.count(each, "B") for each in sent), *change))
    return [
        PageTable(
            caption="Bytes by link, dispatch and combine",
            columns=("link", *(placed.name for placed, _ in scored), *(("change",) if len(scored) > 1 else ())),
            rows=tuple(rows),
        )
    ]
