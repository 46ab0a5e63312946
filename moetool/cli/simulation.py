"""The command `moetool simulate`: a cluster, its requests and placement modes, without the hardware."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moetool.base import durable, tables
from moetool.base.config import parse_settings
from moetool.base.errors import Problems, UsageError
from moetool.cli.flags import Json, Overwrite, find_overlap, open_predictor, settable

if TYPE_CHECKING:
    from moetool.base.types import ModelSpec
    from moetool.simulation.simulation_options import SimulationOptions
    from moetool.simulation.simulation_results import Simulated


def simulate(
    trace: Annotated[
        list[str], typer.Option(help="SERVER=DIR: trace that a server's requests are drawn from. Repeatable.")
    ],
    cluster: Annotated[Path, typer.Option(help="TOML file with servers, GPUs and links.")],
    planner: Annotated[
        list[str],
        typer.Option(
            help="Planners, comma-separated: uniform, redundant, smartmoe, eplb, prism, prism_exact, ..., or one with "
            "-offline, -reactive or -proactive, e.g. director-proactive. Repeatable."
        ),
    ],
    arrivals: Annotated[
        str,
        typer.Option(help="Arrivals per server: poisson:10s, every:10s, or a file in Azure's or Mooncake's format."),
    ] = "poisson:10s",
    requests: Annotated[
        int,
        typer.Option(
            min=1, max=10_000_000, help="Number of requests; --sweep gpus=… multiplies it as it does the servers."
        ),
    ] = 200,
    plan: Annotated[Path | None, typer.Option(help="Initial placement plan (default: made by the planner).")] = None,
    profile: Annotated[
        Path | None, typer.Option(help="Machine costs from 'moetool profile' (default: assumed costs).")
    ] = None,
    predictor: Annotated[
        Path | None,
        typer.Option(
            help="Directory of a trained predictor for --set lookahead=predicted (default: recall of earlier tokens)."
        ),
    ] = None,
    sweep: Annotated[
        list[str],
        typer.Option(
            help="Values to sweep: gpus=4,16, bandwidth=100Mbps,1Gbps, gap=8s,15s, seed=0,1, lookahead=…, "
            "migrate=…. Repeatable."
        ),
    ] = [],
    figure: Annotated[
        Path | None,
        typer.Option(
            help="Figure of the runs: an .svg, .png or .pdf file, or a directory for all figures as SVG and PNG."
        ),
    ] = None,
    report: Annotated[Path | None, typer.Option(help="HTML file to write tables and figures to.")] = None,
    settings: Annotated[
        list[str], settable("Setting or planner option: seed, seats, replan_s, ..., PLANNER.OPTION.")
    ] = [],
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Simulate a cluster event by event: latency, local compute share, utilization, traffic, migrations."""
    from moetool.costing.costs import CostProfile
    from moetool.placement.cluster_file import load_cluster
    from moetool.placement.plan import PlacementPlan
    from moetool.simulation.simulate import ModeInputs, open_sources, read_settings
    from moetool.simulation.sweep import parse_sweeps
    from moetool.simulation.sweep import sweep as run

    if figure is not None:
        from moetool.report.simulation_page import require_drawable

        require_drawable(figure, overwrite)
    if report is not None:
        durable.require_new_file(report, overwrite)
    options, costs, planner_options = read_settings(parse_settings(settings))
    with Problems() as problems:
        with problems.of():
            swept = parse_sweeps(sweep)
        with problems.of():
            planners = _planners(planner, planner_options)
        with problems.of():
            sources = open_sources(trace)
        with problems.of():
            machines = load_cluster(cluster)
    if plan is not None and {"gpus", "bandwidth"} & swept.keys():
        raise UsageError("--plan is for one cluster, and --sweep changes the cluster; leave one of them out")
    given = None if plan is None else PlacementPlan.load(plan)
    predicts = open_predictor(predictor)
    for source in dict.fromkeys(sources.values()):
        find_overlap(source, predicts)
    with tables.stages() as on_progress:
        runs = run(
            sources,
            machines,
            {**swept, "planner": planners},
            planners[0],
            arrivals,
            requests,
            options,
            costs=costs if profile is None else CostProfile.load(profile),
            inputs=ModeInputs(options=planner_options, plan=given, predictor=predicts),
            on_progress=on_progress,
        )
    if figure is not None:
        from moetool.report.simulation_page import save

        drawn = save(figure, runs)
    links = _links(options, planners)
    drawn_from = _drawn_from(options.split, None if given is None else given.split)
    if report is not None:
        said = {
            "traces": ", ".join(trace),
            "cluster": cluster,
            "arrivals": arrivals,
            "requests": drawn_from,
            "costs": runs[0][1].costs,
            "plan": plan,
            "settings": ", ".join(settings),
            "links": f"{links}; {options.seats} running per GPU; seed {options.seed}",
        }
        _write_page(report, runs, next(iter(sources.values())).spec, said)
    if as_json:
        tables.print_json(
            {
                "arrivals": arrivals,
                "options": {name: getattr(options, name) for name in options.__dataclass_fields__},
                "runs": [{"at": at, **found.to_json(requests=not swept)} for at, found in runs],
            }
        )
        return
    _print(runs)
    if len(runs) == 1:
        _print_one(runs[0][1])
    tables.print_paragraph(
        f"{runs[0][1].costs}; arrivals {arrivals}; seed {options.seed}; {options.seats} running per GPU; "
        f"links {links}; requests: {drawn_from}"
    )
    if figure is not None:
        tables.print_paragraph(f"drawn in {', '.join(map(str, drawn))}")
    if report is not None:
        tables.print_paragraph(f"page: {report}")


def _planners(given: list[str], planner_options: Mapping[str, Any]) -> list[str]:
    """Return the planners' names. Raises: UsageError: there is none, or an option fits none of them."""
    from moetool.simulation.placement_control import find_mode

    chosen = [name for text in given for name in text.split(",") if name]
    if not chosen:
        raise UsageError("--planner names no planner, expected one such as prism_exact")
    planners = {find_mode(name).planner for name in chosen}
    if stray := [name for name, value in planner_options.items() if isinstance(value, dict) and name not in planners]:
        raise UsageError(f"--set {stray[0]!r} fits none of {', '.join(sorted(planners))}; write PLANNER.OPTION=VALUE")
    return chosen


def _links(options: "SimulationOptions", planners: Sequence[str]) -> str:
    """Describe the links of the modes: those of edge servers, of ranks, or both."""
    from moetool.simulation.placement_control import find_mode

    lockstep = {options.in_lockstep(find_mode(name).batches) for name in planners}
    return " or ".join("per GPU" if each else f"by {options.links}" for each in sorted(lockstep))


def _write_page(report: Path, runs: Any, spec: "ModelSpec", said: Mapping[str, Any]) -> None:
    from moetool.report.simulation_page import facts_of, page
    from moetool.report.trace_page import shape_of

    durable.write_text(report, page(runs, facts_of({"model": spec.name, **said}), shape_of(spec)))


def _drawn_from(split: float, planned: float | None) -> str:
    """Describe whether placements have seen the drawn requests.

    Args:
        planned: share of the requests that a given plan was made from.
    """
    if split == 1:
        return "drawn from those that placements are planned on"
    return "held out from planning" if planned in (None, split) else "possibly seen by the plan"


def _print(runs: Any) -> None:
    names = [name for name in runs[0][0] if name != "planner"]
    rows = []
    for at, found in runs:
        latencies_s = found.latencies_s
        made = sum(one.made for one in found.migrations)
        rows.append(
            [
                at["planner"],
                *(at[name] for name in names),
                *(tables.significant(value, 3) for value in (found.mean_s, *_percentiles(latencies_s))),
                *(tables.significant(value, 3) for value in (found.mean_first_s, found.mean_wait_s)),
                tables.percent(found.local),
                f"{found.tokens_per_s:,.1f}",
                tables.percent(sum(found.utilisation_G) / len(found.utilisation_G)),
                tables.percent(max(found.utilisation_G)),
                tables.count(found.sent_bytes, "B"),
                f"{made} of {len(found.migrations)}",
            ]
        )
    tables.print_table(
        f"Latency of {tables.numbered(len(runs[0][1].served), 'request')} in seconds from arrival"
        if len({len(found.served) for _, found in runs}) == 1
        else "Latency in seconds from arrival",
        [
            *("planner", *names, "mean", "p50", "p90", "p99", "first token", "waited", "local", "tokens/s"),
            *("GPUs busy", "busiest", "sent", "migrations"),
        ],
        rows,
        num_text=1 + len(names),
    )
    tables.print_paragraph(
        "waited: mean time in queues; local: local compute share; GPUs busy: mean utilization (busiest: of one GPU); "
        "sent: between servers; migrations: made, of those decided"
    )


def _percentiles(latencies_s: list[float]) -> list[float]:
    from moetool.simulation.simulation_results import percentile

    return [percentile(latencies_s, p) for p in (50, 90, 99)]


def _print_one(found: "Simulated") -> None:
    """Print the details of a single run."""
    slowest = sorted(found.mean_by_server.items(), key=lambda one: -one[1])
    more = f" and {len(slowest) - 12} more" if len(slowest) > 12 else ""
    tables.print_paragraph(
        "mean latency by server: "
        + ", ".join(f"{name} {tables.significant(s, 3)} s" for name, s in slowest[:12])
        + more
    )
    shares = [f"{one.until_s:,.0f} s: {tables.percent(one.local)}" for one in found.windows if one.local is not None]
    step = -(-len(shares) // 12)
    tables.print_paragraph("computed locally until " + ", ".join(shares[::step]))
    busiest = sorted(found.links, key=lambda link: -link[1])[:10]
    if busiest:
        tables.print_table(
            f"links by bytes, {len(busiest)} of {len(found.links)}",
            ["link", "sent", "busy"],
            [[name, tables.count(sent, "B"), tables.percent(busy)] for name, sent, busy in busiest],
        )
    if found.migrations:
        from moetool.report.simulation_page import decision_table

        title = "Eq. 4: remote calls over the horizon, seconds that they save and seconds of the migration"
        decision_table(found, title).print()
