"""A placement as a page: experts of each GPU, and with traces load and traffic, compared with an earlier plan."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from moetool.base import tables
from moetool.base.tables import TextTable, significant
from moetool.base.types import Cluster
from moetool.placement.demand import read_demand
from moetool.placement.engine_slots import BALANCE
from moetool.placement.latency import flows
from moetool.placement.plan import PlacementPlan
from moetool.placement.planning import PlannerRow, Workload, score_plan
from moetool.placement.scoring import FORWARD_TOKENS
from moetool.report.figures.placement import Placed, plots
from moetool.report.html_page import Section, render_page
from moetool.report.trace_page import shape_of

ENGINE_NAMES = {"sglang": "SGLang", "vllm": "vLLM", "tensorrt_llm": "TensorRT-LLM"}
"""Engines by their definition of balancedness."""
_MOST_SERVERS = 8
"""Servers up to which a table has a column for each."""


def measure(
    plan: PlacementPlan, traces: Mapping[str, Workload], before: PlacementPlan | None = None
) -> tuple[list[Placed], np.ndarray | None]:
    """Score a plan and an earlier one on traces; return also the uses of each expert [L, E], if there are traces.

    Tokens start at the servers of the new plan in both scores.

    Raises:
        MismatchError: the two are of different models or clusters, or a trace is of another model.
        UsageError: a server is unknown, or has no tokens.
    """
    named = [("after" if before else plan.planner, plan)]
    if before is not None:
        plan.spec.require_same(before.spec, "the plan", "the earlier plan")
        before.require_cluster(plan.cluster, "the earlier plan")
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
    """Return the page as HTML.

    Args:
        plans: the earlier plan, if given, and the plan.
        facts: origins of the plans, as terms and texts.
    """
    plan = plans[-1].plan
    drawn = plots(plans, tokens_LE)
    names = [one.label for one in plans]
    scored = [(name, one.row) for name, one in zip(names, plans, strict=True) if one.row is not None]
    costs = f"in {scored[0][1].score.unit}" if scored else ""
    made = {
        "Placement": [_held_table(plans), *([_changes_table(plans)] if len(plans) > 1 else [])],
        "Load": score_tables(scored, plan.cluster, costs) if scored else [],
        "Traffic between servers": _link_tables(plans),
    }
    notes = {"Load": [] if tokens_LE is not None else ["Give --trace SERVER=DIR for load and traffic."]}
    return render_page(
        title=f"Placement of {plan.spec.name}",
        heading=f"Expert placement of {plan.spec.name}",
        shape=f"{shape_of(plan.spec)}; {len(plan.cluster.gpus)} GPUs in {len(plan.cluster.servers)} servers",
        facts=facts,
        sections=[
            Section(name=name, notes=notes.get(name, []), plots=drawn[name], tables=made[name]) for name in drawn
        ],
    )


def to_json(plans: Sequence[Placed]) -> list[dict[str, Any]]:
    """Return the scores on the page, by plan; none without traces."""
    return [{"plan": placed.name, **({} if placed.row is None else placed.row.to_json())} for placed in plans]


def _held_table(plans: Sequence[Placed]) -> TextTable:
    cluster, spec = plans[-1].plan.cluster, plans[-1].plan.spec
    slots_G = cluster.slots_G(spec.slot_bytes)
    held = [placed.plan.placed_GLE.sum(axis=(1, 2)).tolist() for placed in plans]
    return TextTable(
        title="Experts held, sum over layers",
        columns=("GPU", *(placed.name for placed in plans), "capacity"),
        rows=tuple(
            (
                f"{cluster.servers[n].name}, GPU {g}",
                *(f"{of_G[g]:,}" for of_G in held),
                f"{min(slots_G[g], spec.total_experts):,}",
            )
            for g, n in enumerate(cluster.server_G)
        ),
    )


def _changes_table(plans: Sequence[Placed]) -> TextTable:
    """Return a table of experts that each GPU receives and drops; `moetool plan migrate` orders the moves."""
    before_GLE, after_GLE = plans[0].plan.placed_GLE, plans[-1].plan.placed_GLE
    cluster, spec = plans[-1].plan.cluster, plans[-1].plan.spec
    size_L = np.array(spec.expert_bytes_L)
    gets_GL, gives_GL = (after_GLE & ~before_GLE).sum(axis=2), (before_GLE & ~after_GLE).sum(axis=2)
    columns: dict[str, Callable[[int], str]] = {
        "GPU": lambda g: f"{cluster.servers[cluster.server_G[g]].name}, GPU {g}",
        "received": lambda g: f"{gets_GL[g].sum():,}",
        "dropped": lambda g: f"{gives_GL[g].sum():,}",
        "bytes received": lambda g: tables.count(float(gets_GL[g] @ size_L), "B"),
    }
    return tables.table_of("Changes from before to after", range(len(cluster.gpus)), columns)


def score_tables(
    rows: Sequence[tuple[str, PlannerRow]], cluster: Cluster, costs: str, engine: str | None = None
) -> list[TextTable]:
    """Return tables that compare the scores of placements.

    Args:
        rows: name and score of each placement.
        costs: the costs in DIRECTOR's equations, in words.
        engine: engine whose balance to print (None: that of each).
    """
    scores = [((name, row.requests), row.score, row.planning_s) for name, row in rows]
    servers = cluster.servers if len(cluster.servers) <= _MOST_SERVERS else ()
    balances = ENGINE_NAMES if engine is None else {BALANCE[engine]: ENGINE_NAMES[BALANCE[engine]]}
    local = TextTable(
        title="Local compute share by server, and remote expert calls",
        columns=(
            *("planner", "requests", *(server.name for server in servers)),
            *("mean", "total", "remote calls", "bound", "messages", "copies", "sent", "planning s"),
        ),
        rows=[
            [
                *of,
                *("-" if share is None else tables.percent(share) for share in found.local_N[: len(servers)]),
                *(tables.percent(found.local_mean), tables.percent(found.local), f"{found.remote_calls:,.0f}"),
                "-" if found.remote_bound is None else f"{found.remote_bound:,.0f}",
                *(f"{found.messages:.2f}", f"{found.copies:.2f}"),
                *(summed_bytes([sent for _, _, sent in found.link_bytes]), f"{planning_s:,.2f}"),
            ]
            for of, found, planning_s in scores
        ],
        num_text=2,
        notes=(
            "mean: over servers; total: of all calls; remote calls: Prism's Eq. 2; bound: the least in the same slots",
            f"messages: other servers that a forward of {FORWARD_TOKENS} tokens calls in each layer (expected mean)",
            "copies: mean number of GPUs that hold an expert; sent: bytes between servers, a row per call both ways",
        ),
    )
    latency = TextTable(
        title=f"Latency by DIRECTOR's Eqs. 2 and 4, and load balance ({costs})",
        columns=(*("planner", "requests", "T_comp", "T_comm", "sum", "gap"), *balances.values()),
        rows=[
            [
                *of,
                *(significant(value) for value in (found.comp, found.comm, found.latency)),
                "-" if found.latency_gap is None else tables.percent(found.latency_gap),
                *(f"{found.balancedness[name]:.3f}" for name in balances),
            ]
            for of, found, _ in scores
        ],
        num_text=2,
        notes=(
            "gap: of the sum to a bound of all placements in this memory: perfect balance, and the traffic that memory "
            "cannot avoid; where no plan has replicas, of any with one copy per expert",
            f"{', '.join(balances.values())}: balance as that engine defines it; {_best(balances)}",
        ),
    )
    return [local, latency]


def _best(balances: Mapping[str, str]) -> str:
    """Return the best value of these definitions of balance."""
    if len(balances) > 1:
        return "1 is best, for TensorRT-LLM 0"
    return "0 is best" if "tensorrt_llm" in balances else "1 is best"


def summed_bytes(sent: Sequence[float | None]) -> str:
    """Format the sum of bytes; `-` where unknown."""
    known = [each for each in sent if each is not None]
    return "-" if len(known) < len(sent) else tables.count(sum(known), "B")


def _link_tables(plans: Sequence[Placed]) -> list[TextTable]:
    """Return a table of the fifty busiest links by bytes, in the order of the last plan."""
    scored = [(placed, placed.row.score) for placed in plans if placed.row is not None]
    if not scored or not scored[-1][1].link_bytes or scored[-1][1].link_bytes[0][2] is None:
        return []
    order = sorted(range(len(scored[-1][1].link_bytes)), key=lambda i: -(scored[-1][1].link_bytes[i][2] or 0.0))[:50]
    rows = []
    for i in order:
        a, b, _ = scored[-1][1].link_bytes[i]
        sent = [found.link_bytes[i][2] or 0.0 for _, found in scored]
        change = (tables.percent(sent[-1] / sent[0] - 1, "+.1f") if sent[0] else "-",) if len(sent) > 1 else ()
        rows.append((f"{a} -> {b}", *(tables.count(each, "B") for each in sent), *change))
    return [
        TextTable(
            title="Bytes by link, dispatch and combine",
            columns=("link", *(placed.name for placed, _ in scored), *(("change",) if len(scored) > 1 else ())),
            rows=tuple(rows),
        )
    ]
