"""A cache plan as a page: latency by memory, and the policies' results on held-out requests."""

from collections.abc import Sequence

from moetool.base import tables
from moetool.base.tables import TextTable
from moetool.caching.plan import CachePlan
from moetool.report.figures.frontier import frontier_plot
from moetool.report.html_page import Section, render_page
from moetool.report.trace_page import shape_of


def page(plan: CachePlan, facts: Sequence[tuple[str, str]]) -> str:
    """Return the page as HTML.

    Args:
        facts: origin of the plan, as terms and texts.
    """
    name = "Memory and latency"
    latency = Section(name=name, notes=["The plan has no frontier; plan with --frontier 8 to see one."])
    if plan.frontier:
        latency = Section(name=name, plots=[frontier_plot(plan)], tables=[frontier_table(plan)])
    return render_page(
        title=f"Cache plan of {plan.spec.name}",
        heading=f"Cache plan for {plan.spec.name}",
        shape=shape_of(plan.spec),
        facts=facts,
        sections=[
            Section(name="Plan", notes=[plan.reason], tables=[_memory_table(plan)]),
            latency,
            Section(name="Candidates", tables=[candidates_table(plan)]),
        ],
    )


def _memory_table(plan: CachePlan) -> TextTable:
    """Return a table of device memory by use."""
    slots_bytes = plan.slots * plan.spec.slot_bytes
    parts = [
        ("dense weights", plan.dense_bytes),
        (f"KV cache ({plan.kv_tokens:,} tokens)", plan.kv_bytes),
        ("predictor", plan.predictor_bytes),
        (f"experts: {plan.slots:,} slots of {plan.spec.total_experts:,}", slots_bytes),
    ]
    rows = [
        (name, tables.count(size, "B"), tables.percent(size / plan.device_memory_bytes)) for name, size in parts if size
    ]
    whole = ("total", tables.count(plan.device_memory_bytes, "B"), "100.0 %")
    return TextTable(title="Device memory", columns=("use", "bytes", "share"), rows=(*rows, whole))


def frontier_table(plan: CachePlan) -> TextTable:
    """Return the plan's frontier as a table; the point of its own budget is marked."""
    timed = all(point["tpot_used_s"] is not None for point in plan.frontier)
    rows = []
    for point in plan.frontier:
        cells = [
            tables.count(point["device_memory_bytes"], "B") + (" (the plan's)" if point["chosen"] else ""),
            point["policy"],
            f"{point['slots']:,} of {plan.spec.total_experts:,}",
            *(f"{point[name] / 1e6:,.3f}" for name in ("bytes_used", "bytes_held_out")),
        ]
        if timed:
            seconds = (point["tpot_used_s"], point["tpot_held_out_s"])
            cells += ["-" if value is None else tables.milliseconds(value) for value in seconds]
        rows.append(cells)
    columns = ["device memory", "policy", "slots", "MB/decode token", "held out"]
    title = f"Best policy by device memory, chosen on {tables.numbered(len(plan.requests_used), 'request')}"
    return TextTable(
        title=f"{title}, tested on {len(plan.requests_held_out)} held out",
        columns=[*columns, *(("TPOT ms", "held out") if timed else ())],
        rows=rows,
        num_text=2,
    )


def candidates_table(plan: CachePlan) -> TextTable:
    """Return a table of every candidate in the plan's budget, on held-out requests."""
    timed = any(row.get("tpot_mean_s") is not None for row in plan.evidence)
    rows = []
    for row in plan.evidence:
        decoded, seconds = row["decode_tokens"], row.get("tpot_mean_s")
        moved = row["bytes_per_decode_token"] + row["host_bytes_per_decode_token"]  # the measure that plans minimize
        rows.append(
            (
                row["policy"] + (" (the plan)" if row["policy"] == plan.policy else ""),
                f"{row['slots']:,}",
                f"{row['hit_rate_decode']:.3f}" if decoded else "-",
                f"{moved / 1e6:,.3f}" if decoded else "-",
                *(["-" if seconds is None else f"{seconds * 1e3:,.2f}"] if timed else []),
            )
        )
    return TextTable(
        title=f"Candidates on {len(plan.requests_held_out):,} held-out requests; belady: the bound without prefetching",
        columns=("policy", "slots", "hit rate in decode", "MB/decode token", *(("TPOT ms",) if timed else ())),
        rows=tuple(rows),
    )
