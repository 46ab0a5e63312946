"""The placement commands: `moetool plan placement`, `score`, `compare`, `migrate` and `export`."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moetool.base import durable, tables
from moetool.base.config import parse, parse_settings
from moetool.base.errors import UsageError
from moetool.cli.flags import Json, Overwrite, settable

if TYPE_CHECKING:
    from moetool.base.types import Cluster
    from moetool.placement.comparison import PlannerRow, Setting

_SETTINGS = ("seed", "starts", "sides", "routing", "value_bytes")
_MORE = f"{', '.join(_SETTINGS)} (see 'moetool guide placements')"

Traces = Annotated[list[str], typer.Option("--trace", help="SERVER=DIR: trace of a server's requests. Repeatable.")]
ClusterFile = Annotated[Path, typer.Option("--cluster", help="TOML file with servers, GPUs and links.")]
Profile = Annotated[
    Path | None, typer.Option("--profile", help="Machine costs from 'moetool profile' (default: unit costs).")
]
Split = Annotated[float, typer.Option("--split", help="Share of the requests to plan on; the rest is held out.")]
Settings = Annotated[list[str], settable(f"Option of the planner, or {_MORE}.")]
PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="Placement plan (JSON).")]
CMax = Annotated[
    int | None, typer.Option("--c-max", help="Maximum experts of a layer per GPU (default: as memory allows).")
]


def placement(
    trace: Traces,
    cluster: ClusterFile,
    planner: Annotated[str, typer.Option(help="Planner name, e.g. prism_exact or director.")],
    out: Annotated[Path, typer.Option("--out", help="Plan file to write (JSON).")],
    profile: Profile = None,
    engine: Annotated[
        str | None,
        typer.Option(
            "--for", help="Target engine, whose constraints the plan meets: sglang, vllm, tensorrt_llm or vllm_ascend."
        ),
    ] = None,
    split: Split = 1.0,
    c_max: CMax = None,
    settings: Settings = [],
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Place experts on the GPUs of a cluster, from traces of its servers."""
    from moetool.placement.cluster_file import load_cluster
    from moetool.placement.comparison import open_traces, plan_placement

    durable.require_new_file(out, overwrite)
    setting, options = _settings(settings)
    if c_max is not None:
        options["c_max"] = c_max
    setting = replace(setting, engine=engine)
    with tables.progress("planning"):
        plan, rows = plan_placement(
            open_traces(trace), load_cluster(cluster), planner, options, profile=profile, split=split, setting=setting
        )
    plan.save(out)
    if as_json:
        tables.print_json({"plan": str(out), "scores": [row.to_json() for row in rows]})
        return
    bound = "not known" if plan.lower_bound is None else tables.significant(plan.lower_bound)
    tables.print_paragraph(
        f"{out}: {plan.objective} {tables.significant(plan.value)}, lower bound {bound}, "
        f"planned in {plan.planning_s:,.2f} s"
    )
    _print(rows, plan.cluster, setting, plan.costs, _c_max({planner: plan.options}))


def score(
    plan: PlanFile,
    trace: Traces,
    profile: Profile = None,
    settings: Settings = [],
    as_json: Json = False,
) -> None:
    """Score a placement on traces: locality, latency, load balance, link traffic, gap to the bounds."""
    from moetool.placement.comparison import open_traces, score_plan
    from moetool.placement.plan import PlacementPlan
    from moetool.report.placement_page import summed_bytes

    chosen = PlacementPlan.load(plan)
    setting, stray = _settings(settings, {"starts": chosen.starts, "seed": chosen.seed})
    _refuse(stray)
    row = score_plan(chosen, open_traces(trace), profile=profile, setting=setting)
    if as_json:
        tables.print_json(row.to_json())
        return
    costs = "unit costs, no profile" if profile is None else f"profile {profile}"
    _print([row], chosen.cluster, setting, f"{costs}; in {row.score.unit}", _c_max({chosen.planner: chosen.options}))
    for a, b, sent in row.score.link_bytes:
        tables.print_paragraph(f"  {a} -> {b}: {summed_bytes([sent])}, dispatch and combine")


def compare(
    trace: Traces,
    cluster: ClusterFile,
    planner: Annotated[
        list[str] | None, typer.Option(help="Planner names, comma-separated (default: all but exhaustive).")
    ] = None,
    split: Split = 0.5,
    unseen_task: Annotated[Path | None, typer.Option(help="Trace directory of a task that no planner sees.")] = None,
    profile: Profile = None,
    c_max: CMax = None,
    settings: Annotated[list[str], settable(f"Option of a planner, PLANNER.OPTION=VALUE, or {_MORE}.")] = [],
    as_json: Json = False,
) -> None:
    """Compare planners on held-out requests."""
    from moetool.placement.cluster_file import load_cluster
    from moetool.placement.comparison import comparable, open_traces, verdict
    from moetool.placement.comparison import compare as run
    from moetool.placement.planner import find
    from moetool.trace.reader import Trace

    setting, options = _settings(settings)
    machines = load_cluster(cluster)
    names = [name for given in planner for name in given.split(",") if name] if planner else comparable()
    if stray := [name for name in options if name not in names or not isinstance(options[name], dict)]:
        raise UsageError(f"--set {stray[0]!r} is for none of {', '.join(names)}; write PLANNER.OPTION=VALUE")
    if c_max is not None:
        for name in names:
            if "c_max" in find(name).Options.__dataclass_fields__:
                options.setdefault(name, {})["c_max"] = c_max
    with tables.progress("planning"):
        rows = run(
            open_traces(trace),
            machines,
            names,
            options=options,
            profile=profile,
            split=split,
            unseen=None if unseen_task is None else Trace(unseen_task),
            setting=setting,
        )
    if as_json:
        tables.print_json([row.to_json() for row in rows])
        return
    costs = "unit costs, no profile" if profile is None else f"profile {profile}"
    _print(rows, machines, setting, f"{costs}; in {rows[0].score.unit}", _c_max(options))
    for line in verdict(rows):
        tables.print_paragraph(line)


def migrate(
    old: Annotated[Path, typer.Argument(metavar="OLD", help="Current plan.")],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="Target plan.")],
    trace: Traces,
    horizon_tokens: Annotated[float, typer.Option(help="Tokens to serve until the next migration.")],
    out: Annotated[Path, typer.Option("--out", help="Migration plan to write (JSON).")],
    window_ms: Annotated[
        float | None,
        typer.Option(
            help="Length of a compute phase that moves may overlap with, in milliseconds (default: not used)."
        ),
    ] = None,
    call_ms: Annotated[
        float | None,
        typer.Option(help="Measured latency of a remote call, in milliseconds (default: from the cluster's links)."),
    ] = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Order the expert moves between two placements and estimate whether they pay."""
    from moetool.placement.comparison import open_traces
    from moetool.placement.decide import plan_migration
    from moetool.placement.demand import read_demand
    from moetool.placement.plan import PlacementPlan

    durable.require_new_file(out, overwrite)
    for name, value in (("--horizon-tokens", horizon_tokens), ("--window-ms", window_ms), ("--call-ms", call_ms)):
        if value is not None and not 0 < value < float("inf"):
            raise UsageError(f"{name} is {value}, expected a number above 0")
    before, after = PlacementPlan.load(old), PlacementPlan.load(new)
    plan = plan_migration(
        before,
        after,
        read_demand(open_traces(trace), after.cluster),
        horizon_tokens=horizon_tokens,
        call_s=None if call_ms is None else call_ms / 1e3,
        window_s=None if window_ms is None else window_ms / 1e3,
    )
    plan.save(out)
    if as_json:
        tables.print_json(plan.to_json())
        return
    copies = sum(move.kind == "copy" for move in plan.moves)
    aside = sum(move.kind == "stage" for move in plan.moves)
    tables.print_paragraph(
        f"{out}: {tables.numbered(len(plan.moves), 'move')}, {copies:,} copies "
        f"({tables.count(plan.bytes, 'B')}), {aside:,} through host memory, {plan.seconds:,.2f} s in sequence"
    )
    tables.print_paragraph(
        f"over {horizon_tokens:,.0f} tokens: {plan.calls_before:,.0f} remote calls become {plan.calls_after:,.0f}, "
        f"{plan.saved_s:,.2f} s saved at {plan.call_s * 1e3:.3g} ms a call, against {plan.eq3_s:,.2f} s (Eq. 3) and "
        f"{plan.seconds:,.2f} s of all moves: {'worth it' if plan.worth_it else 'not worth it'}; as printed against "
        f"{plan.printed_s:,.2f} s: {'worth it' if plan.saved_s > plan.printed_s else 'not worth it'}"
    )
    if plan.windows is not None:
        tables.print_paragraph(f"fits into {plan.windows:,} compute phases of {window_ms:g} ms")


def export(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="Placement or cache plan (JSON).")],
    format: Annotated[
        str,
        typer.Option(
            help="Format of a placement (sglang, tensorrt_llm, vllm_ascend, ktransformers) or of a cache plan "
            "(llamacpp_override_tensor)."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", help="Output file.")],
    num_hidden_layers: Annotated[
        int | None, typer.Option(help="Number of layers, dense and MoE (needed if the last layer is dense).")
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Export a placement or cache plan to a production engine's format."""
    from moetool.base import plugins
    from moetool.caching.plan import CachePlan
    from moetool.placement.plan import PlacementPlan

    durable.require_new_file(out, overwrite)
    writer = plugins.load("export", format)
    if hasattr(writer, "write_cache_plan"):
        lines = writer.write_cache_plan(CachePlan.load(plan), out)
    else:
        lines = writer.write_plan(PlacementPlan.load(plan), out, num_hidden_layers)
    for line in lines:
        tables.print_paragraph(line)


def _settings(given: Sequence[str], default: Mapping[str, Any] | None = None) -> "tuple[Setting, dict[str, Any]]":
    """Split settings into those of scoring and those of planners."""
    from moetool.base.errors import unknown_name
    from moetool.placement.comparison import Setting
    from moetool.placement.demand import STARTS
    from moetool.placement.latency import ROUTINGS, SIDES

    values = {**(default or {}), **parse_settings(given)}
    setting = parse(Setting, {name: values.pop(name) for name in _SETTINGS if name in values}, "--set")
    for name, known in (("starts", STARTS), ("sides", SIDES), ("routing", ROUTINGS)):
        if getattr(setting, name) not in known:
            raise unknown_name(f"--set {name}", getattr(setting, name), known)
    return setting, values


def _refuse(stray: dict[str, Any]) -> None:
    if stray:
        raise UsageError(f"--set {next(iter(stray))!r} is unknown here, expected one of {', '.join(_SETTINGS)}")


def _c_max(options: Mapping[str, Mapping[str, Any]]) -> str:
    """Describe the limits of planners, from their options by name."""
    given = [f"{values['c_max']} for {name}" for name, values in options.items() if values.get("c_max")]
    return ", ".join(given) or "as memory allows"


def _print(rows: "Sequence[PlannerRow]", cluster: "Cluster", setting: "Setting", costs: str, c_max: str) -> None:
    """Print the planners' rows and their conditions."""
    from moetool.report.placement_page import score_tables

    for table in score_tables([(row.planner, row) for row in rows], cluster, costs):
        table.print()
    tables.print_paragraph(
        f"settings: c_max {c_max}; tokens start {setting.starts}; sides {setting.sides}; routing {setting.routing}; "
        f"seed {setting.seed}"
    )
