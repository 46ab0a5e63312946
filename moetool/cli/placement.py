"""The placement commands: `moetool plan placement`, `score`, `compare`, `migrate` and `export`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moetool.base import durable, tables
from moetool.base.config import parse, parse_settings
from moetool.base.errors import Problems, UsageError
from moetool.cli.flags import Json, Overwrite, settable

if TYPE_CHECKING:
    from moetool.base.types import Cluster, ModelSpec
    from moetool.placement.engine_slots import SlotChoice
    from moetool.placement.plan import MigrationPlan
    from moetool.placement.planning import PlannerRow, PlanningInputs, Setting

_SETTINGS = ("seed", "starts", "sides", "routing", "value_bytes")
_MORE = f"{', '.join(_SETTINGS)} (see 'moetool guide placements')"

Traces = Annotated[
    list[str],
    typer.Option(
        "--trace", help="SERVER=DIR: trace or counts of a server's requests (repeatable), or DIR: of the whole cluster."
    ),
]
ClusterFile = Annotated[
    Path, typer.Option("--cluster", help="TOML file with servers, GPUs and links, or one server's GPUs such as 8x80GB.")
]
Profile = Annotated[
    Path | None, typer.Option("--profile", help="Machine costs from 'moetool profile' (default: unit costs).")
]
MachineName = Annotated[
    str | None,
    typer.Option(
        "--machine", help="Costs by vendors' figures instead of a profile: a name (e.g. h100-node) or a TOML file."
    ),
]
Split = Annotated[
    float,
    typer.Option(
        "--split", help="Share of the requests to plan on, of counts the first windows; the rest is held out."
    ),
]
Settings = Annotated[list[str], settable(f"Option of the planner, or {_MORE}.")]
PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="Placement plan (JSON).")]
CMax = Annotated[
    int | None, typer.Option("--c-max", help="Maximum experts of a layer per GPU (default: as memory allows).")
]
Engine = Annotated[
    str | None,
    typer.Option(
        "--for", help="Target engine, with its slots, routing and balance: sglang, vllm, tensorrt_llm or vllm_ascend."
    ),
]
SlotsPerGpu = Annotated[
    int | None,
    typer.Option(
        "--slots-per-gpu",
        help="Slots of each layer on every GPU (default with --for: the fewest within 5 % of the best balance, in plan "
        "compare those of --current; without: as memory allows).",
    ),
]
Redundant = Annotated[
    int | None,
    typer.Option("--redundant", help="Slots of each layer beyond one for each expert, on all GPUs together."),
]


def placement(
    trace: Traces,
    cluster: ClusterFile,
    planner: Annotated[str, typer.Option(help="Planner name, e.g. prism_exact or director.")],
    out: Annotated[Path, typer.Option("--out", help="Plan file to write (JSON).")],
    profile: Profile = None,
    machine: MachineName = None,
    engine: Engine = None,
    slots_per_gpu: SlotsPerGpu = None,
    redundant: Redundant = None,
    split: Split = 1.0,
    c_max: CMax = None,
    settings: Settings = [],
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Place experts on the GPUs of a cluster, from traces or counts of its servers."""
    from moetool.placement.cluster_file import load_cluster
    from moetool.placement.planning import open_traces, plan_placement, planning_inputs, slot_limit

    durable.require_new_file(out, overwrite)
    options: dict[str, Any] = {}
    with Problems() as problems:
        with problems.of():
            setting, options = _settings(
                settings,
                given={"engine": engine, "slots_per_gpu": slots_per_gpu, "redundant": redundant}
                | {"profile": profile, "machine": machine},
            )
        if c_max is not None:
            options["c_max"] = c_max
        with problems.of():
            traces = open_traces(trace, whole=True)
        with problems.of():
            machines = load_cluster(cluster)
        with problems.of():
            limit = slot_limit(planner, options)
    with tables.progress("planning"):
        inputs = planning_inputs(traces, machines, split, setting, limit)
        plan, rows = plan_placement(traces, machines, planner, options, split=split, setting=setting, inputs=inputs)
    plan.save(out)
    if as_json:
        choices = [choice.to_json() for choice in inputs.choices]
        tables.print_json({"plan": str(out), "scores": [row.to_json() for row in rows], "slot_choices": choices})
        return
    bound = "not known" if plan.lower_bound is None else tables.significant(plan.lower_bound)
    tables.print_paragraph(
        f"{out}: {plan.objective} {tables.significant(plan.value)}, lower bound {bound}, "
        f"planned in {plan.planning_s:,.2f} s"
    )
    _print_choices(inputs)
    _print(rows, plan.cluster, setting, plan.costs, _c_max({planner: plan.options}))
    _print_assumption(plan.spec, setting)


def score(
    plan: PlanFile,
    trace: Traces,
    profile: Profile = None,
    machine: MachineName = None,
    engine: Engine = None,
    settings: Settings = [],
    as_json: Json = False,
) -> None:
    """Score a placement on traces: locality, latency, load balance, link traffic, gap to the bounds."""
    from moetool.placement.plan import PlacementPlan
    from moetool.placement.planning import open_traces, score_plan
    from moetool.report.placement_page import summed_bytes

    chosen = PlacementPlan.load(plan)
    setting, stray = _settings(
        settings,
        {"starts": chosen.starts, "seed": chosen.seed},
        {"profile": profile, "machine": machine, "engine": engine},
    )
    _refuse(stray)
    row = score_plan(chosen, open_traces(trace, whole=True), setting=setting)
    if as_json:
        tables.print_json(row.to_json())
        return
    costs = f"{setting.costs}; in {row.score.unit}"
    _print([row], chosen.cluster, setting, costs, _c_max({chosen.planner: chosen.options}))
    _print_assumption(chosen.spec, setting)
    for a, b, sent in row.score.link_bytes:
        tables.print_paragraph(f"  {a} -> {b}: {summed_bytes([sent])}, dispatch and combine")


def compare(
    trace: Traces,
    cluster: ClusterFile,
    planner: Annotated[
        list[str] | None,
        typer.Option(
            help="Planner names, comma-separated (default: all but annealing, director_rounding, exhaustive and "
            "moetuner)."
        ),
    ] = None,
    split: Split = 0.5,
    unseen_task: Annotated[Path | None, typer.Option(help="Trace directory of a task that no planner sees.")] = None,
    current: Annotated[
        Path | None, typer.Option(help="Plan in force (default with --for: the engine's map at its start).")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Plan file to write: the best planner's (JSON).")] = None,
    profile: Profile = None,
    machine: MachineName = None,
    engine: Engine = None,
    slots_per_gpu: SlotsPerGpu = None,
    redundant: Redundant = None,
    c_max: CMax = None,
    settings: Annotated[list[str], settable(f"Option of a planner, PLANNER.OPTION=VALUE, or {_MORE}.")] = [],
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Compare planners on held-out requests, and price the migration to the best."""
    from moetool.placement.cluster_file import load_cluster
    from moetool.placement.comparison import comparable, migration_lines, verdict
    from moetool.placement.comparison import compare as run
    from moetool.placement.plan import PlacementPlan
    from moetool.placement.planner import find
    from moetool.placement.planning import open_traces
    from moetool.trace.reader import Trace

    if out is not None:
        durable.require_new_file(out, overwrite)
    names = [name for given in planner for name in given.split(",") if name] if planner else comparable()
    options: dict[str, Any] = {}
    with Problems() as problems:
        with problems.of():
            setting, options = _settings(
                settings,
                given={"engine": engine, "slots_per_gpu": slots_per_gpu, "redundant": redundant}
                | {"profile": profile, "machine": machine},
            )
        with problems.of():
            machines = load_cluster(cluster)
        with problems.of():
            traces = open_traces(trace, whole=True)
        stray = [name for name, values in options.items() if name not in names or not isinstance(values, dict)]
        for name in stray:
            with problems.of():
                raise UsageError(f"--set {name!r} is for none of {', '.join(names)}; write PLANNER.OPTION=VALUE")
        for name in names:
            with problems.of():
                kind = find(name).Options
                if name in stray:
                    continue
                if c_max is not None and "c_max" in kind.__dataclass_fields__:
                    options.setdefault(name, {})["c_max"] = c_max
                parse(kind, options.get(name, {}), f"planner {name}")
    with tables.progress("planning"):
        found = run(
            traces,
            machines,
            names,
            options=options,
            split=split,
            unseen=None if unseen_task is None else Trace(unseen_task),
            current=None if current is None else PlacementPlan.load(current),
            setting=setting,
        )
    if out is not None and found.plan is not None:
        found.plan.save(out)
    if as_json:
        tables.print_json(
            {
                "plan": None if out is None or found.plan is None else str(out),
                "best": found.best,
                "scores": [row.to_json() for row in found.rows],
                "slot_choices": [choice.to_json() for choice in found.inputs.choices],
                "left_out": found.left_out,
                "migration": None if found.migration is None else _migration_json(found.migration),
            }
        )
        return
    _print_choices(found.inputs)
    costs = f"{setting.costs}; in {found.rows[0].score.unit}"
    _print(found.rows, machines, setting, costs, _c_max(options))
    _print_assumption(found.inputs.spec, setting)
    for line in (*found.left_out, *verdict(found.rows)):
        tables.print_paragraph(line)
    if found.migration is not None:
        tables.print_paragraph("; ".join(migration_lines(found.migration, found.window_tokens)))
    if out is not None:
        done = (
            f"{out}: the plan of {found.best}" if found.plan else "the placement in force is the best: no plan written"
        )
        tables.print_paragraph(done)


def migrate(
    old: Annotated[Path, typer.Argument(metavar="OLD", help="Current plan.")],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="Target plan.")],
    trace: Traces,
    horizon_tokens: Annotated[
        float | None, typer.Option(help="Tokens to serve until the next migration (default: those of the traces).")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Migration plan to write (JSON).")] = None,
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
    profile: Profile = None,
    machine: MachineName = None,
    engine: Engine = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Order the expert moves between two placements and estimate whether they pay."""
    from moetool.placement.comparison import migration_lines
    from moetool.placement.decide import plan_migration
    from moetool.placement.demand import read_demand
    from moetool.placement.plan import PlacementPlan
    from moetool.placement.planning import latency_of, open_traces

    if out is not None:
        durable.require_new_file(out, overwrite)
    with Problems() as problems:
        for name, value in (("--horizon-tokens", horizon_tokens), ("--window-ms", window_ms), ("--call-ms", call_ms)):
            with problems.of():
                if value is not None and not 0 < value < float("inf"):
                    raise UsageError(f"{name} is {value}, expected a number above 0")
        with problems.of():
            before = PlacementPlan.load(old)
        with problems.of():
            after = PlacementPlan.load(new)
        with problems.of():
            traces = open_traces(trace, whole=True)
        with problems.of():
            setting, _ = _settings([], given={"profile": profile, "machine": machine, "engine": engine})
    plan = plan_migration(
        before,
        after,
        read_demand(traces, after.cluster),
        horizon_tokens=horizon_tokens,
        call_s=None if call_ms is None else call_ms / 1e3,
        window_s=None if window_ms is None else window_ms / 1e3,
        latency=latency_of(after.cluster, after.spec, setting),
        routing=setting.copies,
    )
    if out is not None:
        plan.save(out)
    if as_json:
        tables.print_json(_migration_json(plan))
        return
    where = "" if out is None else f"{out}: "
    if not plan.moves:
        tables.print_paragraph(f"{where}nothing moves")
        return
    aside = sum(move.kind == "stage" for move in plan.moves)
    tables.print_paragraph(f"{where}{tables.numbered(len(plan.moves), 'move')}, {aside:,} through host memory")
    tables.print_paragraph("; ".join(migration_lines(plan)))
    if plan.step_before_s is not None:
        tables.print_paragraph(
            f"over {plan.horizon_tokens:,.0f} tokens: {plan.step_before_s:,.4g} s become {plan.step_after_s:,.4g}: "
            f"{'worth it' if plan.worth_it else 'not worth it'}"
        )
    else:
        tables.print_paragraph(
            f"by calls between servers alone, over {plan.horizon_tokens:,.0f} tokens: {plan.calls_before:,.0f} become "
            f"{plan.calls_after:,.0f}, {plan.saved_s:,.2f} s saved at {plan.call_s * 1e3:.3g} ms a call, against "
            f"{plan.eq3_s:,.2f} s (Eq. 3) and {plan.seconds:,.2f} s of all moves: "
            f"{'worth it' if plan.worth_it else 'not worth it'}; as printed against {plan.printed_s:,.2f} s: "
            f"{'worth it' if plan.saved_s > plan.printed_s else 'not worth it'}"
        )
    _print_assumption(after.spec, setting)
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

    writer = plugins.load("export", format)
    suffixes = getattr(writer, "SUFFIXES", ())
    if suffixes and out.suffix not in suffixes:
        raise UsageError(f"--out {out} is a file for {format}, expected a name that ends in {' or '.join(suffixes)}")
    durable.require_new_file(out, overwrite)
    if hasattr(writer, "write_cache_plan"):
        lines = writer.write_cache_plan(CachePlan.load(plan), out)
    else:
        lines = writer.write_plan(PlacementPlan.load(plan), out, num_hidden_layers)
    for line in lines:
        tables.print_paragraph(line)


def _settings(
    settings: Sequence[str], default: Mapping[str, Any] | None = None, given: Mapping[str, Any] | None = None
) -> "tuple[Setting, dict[str, Any]]":
    """Split settings into those of scoring and those of planners; `given` are those with flags of their own."""
    from moetool.base.errors import unknown_name
    from moetool.costing.machines import read_named_machine
    from moetool.placement.demand import STARTS
    from moetool.placement.engine_slots import ENGINES
    from moetool.placement.latency import ROUTINGS, SIDES
    from moetool.placement.planning import Setting

    values = {**(default or {}), **parse_settings(settings)}
    setting = replace(Setting(), **(given or {}))
    with Problems() as problems:
        with problems.of():
            own = parse(Setting, {name: values.pop(name) for name in _SETTINGS if name in values}, "--set")
            setting = replace(own, **(given or {}))
        if setting.machine is not None:
            with problems.of():
                read_named_machine(setting.machine)
        for flag, word, known in (
            ("--for", setting.engine or ENGINES[0], ENGINES),
            ("--set starts", setting.starts, STARTS),
            ("--set sides", setting.sides, SIDES),
            ("--set routing", setting.routing or ROUTINGS[0], ROUTINGS),
        ):
            with problems.of():
                if word not in known:
                    raise unknown_name(flag, word, known)
    return setting, values


def _refuse(stray: dict[str, Any]) -> None:
    if stray:
        raise UsageError(f"--set {next(iter(stray))!r} is unknown here, expected one of {', '.join(_SETTINGS)}")


def _c_max(options: Mapping[str, Mapping[str, Any]]) -> str:
    """Describe the limits of planners, from their options by name."""
    given = [f"{values['c_max']} for {name}" for name, values in options.items() if values.get("c_max")]
    return ", ".join(given) or "as memory allows"


def _print(rows: "Sequence[PlannerRow]", cluster: "Cluster", setting: "Setting", costs: str, c_max: str) -> None:
    from moetool.report.placement_page import score_tables

    for table in score_tables([(row.planner, row) for row in rows], cluster, costs, setting.engine):
        table.print()
    tables.print_paragraph(
        f"settings: c_max {c_max}; tokens start {setting.starts}; sides {setting.sides}; routing {setting.copies}; "
        f"seed {setting.seed}"
    )


def _print_assumption(spec: "ModelSpec", setting: "Setting") -> None:
    """Print what the costs of a named machine assume about the model."""
    from moetool.costing.machine_profile import assumption

    if setting.machine is not None and (assumed := assumption(spec)):
        tables.print_paragraph(assumed)


def _migration_json(migration: "MigrationPlan") -> dict[str, Any]:
    return {**migration.to_json(), "pays_after_tokens": migration.pays_after_tokens}


def _print_choices(inputs: "PlanningInputs") -> None:
    """Print balance against memory, if it decided the slots."""
    if not inputs.choices:
        return
    columns: dict[str, Callable[[SlotChoice], str]] = {
        "slots per GPU": lambda choice: f"{choice.slots}{' *' if choice.slots == inputs.slots else ''}",
        "redundant": lambda choice: f"{choice.redundant:,}",
        "bytes per GPU": lambda choice: tables.count(choice.gpu_bytes, "B"),
        "balance": lambda choice: f"{choice.balance:.3f}",
    }
    title = "Slots of each layer on a GPU, and load balance by EPLB (*: chosen, the fewest within 5 % of the best)"
    tables.table_of(title, inputs.choices, columns).print()
