"""The command `moetool replay`."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moetool.base import durable, tables
from moetool.base.config import parse, parse_bytes, parse_settings
from moetool.base.errors import CapacityError, Problems, UsageError, unknown_name
from moetool.cli.flags import (
    Jobs,
    Json,
    PredictorDir,
    ProfileFile,
    TraceDir,
    find_overlap,
    listed,
    named_timeline,
    open_predictor,
    open_trace,
    read_timeline,
    require_policies,
    settable,
)

if TYPE_CHECKING:
    from moetool.base.types import ModelSpec
    from moetool.tuning.replay import ReplayRow


def replay(
    trace: TraceDir,
    policy: Annotated[
        list[str],
        typer.Option(
            help="Cache policies, comma-separated or repeated; auto: all that can serve; served: those that "
            "the server used, from its log."
        ),
    ],
    budget: Annotated[
        list[str],
        typer.Option(
            help="Expert memory: bytes, e.g. 64MB, or a share of all experts, e.g. 25% (not for served, which has the "
            "server's slots)."
        ),
    ] = [],
    predictor: PredictorDir = None,
    profile: ProfileFile = None,
    machine: Annotated[
        str | None,
        typer.Option(
            help="Times on a machine by vendors' figures instead of a profile: a name (e.g. pc-rtx-4090-ddr5) or a "
            "TOML file."
        ),
    ] = None,
    misses: Annotated[
        str | None,
        typer.Option(
            help="Where misses are computed: load (on the device), host, both (split so that each event ends first); "
            "comma-separated (default: all with --machine, else load)."
        ),
    ] = None,
    order: Annotated[
        str, typer.Option(help="Order of requests: auto, sequential (one after the other) or recorded.")
    ] = "auto",
    requests: Annotated[
        str,
        typer.Option(
            help="Requests to replay: all, or unseen: those that --predictor was not trained on (default: unseen)."
        ),
    ] = "unseen",
    pool: Annotated[
        str,
        typer.Option(
            help="Form of the expert pool: one (for all layers), layer (equal slots per layer) or mixed (half of the "
            "slots per layer)."
        ),
    ] = "one",
    pool_unit: Annotated[
        str,
        typer.Option(
            help="Capacity of the pool 'one' in slots (of the largest expert) or bytes (of each expert's own size); "
            "auto: bytes for imported traces, else slots."
        ),
    ] = "auto",
    settings: Annotated[
        list[str],
        settable(
            "Option of a policy or of the replay, e.g. lfu.forget=true, timeline.device=cuda, devices=2, "
            "batching.order=experts."
        ),
    ] = [],
    draw: Annotated[
        Path | None, typer.Option(help="Figure of loaded bytes and hit rate by memory: an .svg, .png or .pdf file.")
    ] = None,
    jobs: Jobs = 0,
    as_json: Json = False,
) -> None:
    """Simulate cache policies on a trace without the model: hits, loads, bytes and, with --profile, times."""
    from moetool.caching.layer_slots import require_pool_form
    from moetool.caching.policy import admits_by_value, computes_on_host, parse_options
    from moetool.costing.machines import read_named_machine
    from moetool.costing.pricing import Prices, with_host_costs
    from moetool.tuning.batches import Batching
    from moetool.tuning.candidates import best, servable, too_large
    from moetool.tuning.replay import POOL_UNITS, SERVED, ReplaySetup, replay_served, require_place, whole_bytes
    from moetool.tuning.replay_jobs import replay_with_jobs
    from moetool.tuning.replay_table import replay_table

    if draw is not None:
        from moetool.report.drawing import require_drawable

        require_drawable(draw)
        durable.require_new_file(draw, False)
    orders = {"auto": None, "sequential": True, "recorded": False}
    sizes = listed(budget) if budget else []
    asked, options = listed(policy), parse_settings(settings)
    places = listed([misses]) if misses is not None else []
    with Problems() as problems:
        for kind, name, allowed in (
            ("--order", order, orders),
            ("--requests", requests, ("unseen", "all")),
            ("--pool-unit", pool_unit, POOL_UNITS),
        ):
            with problems.of():
                if name not in allowed:
                    raise unknown_name(kind, name, allowed)
        with problems.of():
            require_pool_form("--pool", pool)
        for place in places:
            with problems.of():
                require_place(place, False)
        for text in sizes:
            with problems.of("--budget: "):
                parse_bytes(text, 10**15)  # of any number of experts
        for name in asked:
            with problems.of():
                if name not in (SERVED, "auto"):
                    parse_options(name, {})
        if machine is not None:
            with problems.of():
                read_named_machine(machine)
        with problems.of():
            source = open_trace(trace)
    if asked == [SERVED]:
        given = {"--budget": sizes, "--pool": pool != "one", "--pool-unit": pool_unit != "auto", "--draw": draw}
        if idle := [flag for flag, value in given.items() if value]:
            verb, it = ("has", "it") if len(idle) == 1 else ("have", "them")
            raise UsageError(
                f"{' and '.join(idle)} {verb} no effect on served, which has the server's slots; leave {it} out"
            )
    elif not sizes:
        raise UsageError("give --budget, the memory for experts, such as 25% or 64MB")
    if not all(text.strip().endswith("%") for text in sizes):
        source.spec.require_sizes(trace)
    budgets = [parse_bytes(text, whole_bytes(source, pool, pool_unit)) for text in sizes]
    if draw is not None and len(set(budgets)) < 2:
        raise UsageError("--draw draws curves by memory; give two budgets or more, e.g. --budget 25%,50%")
    devices = options.pop("devices", 1)
    if type(devices) is not int or devices < 1:
        raise UsageError(f"devices is {devices!r}, expected 1 or more")
    batching = options.pop("batching", None)
    if machine is not None:
        costs, timeline = named_timeline(machine, profile, source.spec, options.pop("timeline", {}))
    else:
        costs, timeline = read_timeline(profile, options.pop("timeline", {}))
    on_disk = costs is not None and timeline.tier == "disk"
    places = places or (["load"] if machine is None or on_disk else ["load", "host", "both"])
    for place in places:
        require_place(place, on_disk)
    predicts = open_predictor(predictor)
    known = servable(source, predicts) if "auto" in asked else []
    names = list(dict.fromkeys(name for one in asked for name in (known if one == "auto" else [one])))
    served = SERVED in names
    names = [name for name in names if name != SERVED]
    require_policies(names, options)
    automatic = [name for name in known if name not in asked]
    with _of_budget():
        left_out = too_large(automatic, source.spec, min(budgets), options, devices) if automatic else {}
    names = [name for name in names if name not in left_out]
    priced = with_host_costs(names, options, None if costs is None else Prices(costs, source.spec, timeline))
    splittable = [name for name in names if not computes_on_host(name, priced.get(name, {}))]
    if misses is not None and not splittable:
        raise UsageError(
            f"--misses {misses} has no effect on {', '.join(asked)}, which place misses themselves; leave it out"
        )
    with_tokens = frozenset(row["request"] for row in source.requests.to_pylist() if row["tokens"])
    seen = find_overlap(source, predicts)
    unseen = with_tokens - seen.repeated
    held_out = requests == "unseen" and 0 < len(unseen) < len(with_tokens)
    if held_out:
        tables.narrate(
            f"moetool: {len(unseen)} of {tables.numbered(len(with_tokens), 'request')} are replayed, since the "
            f"predictor was trained on the others; --requests all includes them"
        )
    with tables.stages() as on_progress:
        setup = ReplaySetup(
            predictor=predicts,
            trained_on=seen.repeated,
            requests=unseen if held_out else None,
            sequential=orders[order],
            batching=None if batching is None else parse(Batching, batching, "batching"),
            options=options,
            pool=pool,
            pool_unit=pool_unit,
            profile=costs,
            timeline=timeline,
            devices=devices,
            jobs=jobs,
            on_progress=on_progress,
        )
        rows = [replay_served(source, replace(setup, requests=None))] if served else []
        for number, place in enumerate(places if names else ()):
            split = splittable if number else names  # those that place misses themselves have one row
            made = replace(setup, misses=place)
            if place == "load" and len(places) > 1:  # without what is about the other places
                by_value = [name for name in options if admits_by_value(parse_options(name, options[name]))]
                published = {name: {**options[name], "admit": "published"} for name in by_value}
                made = replace(made, options={**options, **published})
            with _of_budget():
                rows += replay_with_jobs(source, split, budgets, made) if split else []
    chosen = [best([row for row in rows if row.policy in known and row.budget_bytes == b]) for b in budgets if known]
    for name, why in left_out.items():
        tables.narrate(f"moetool: auto leaves out {name}, {why}")
    for row in chosen:
        size = f"{tables.count(row.budget_bytes, 'B')} for" if source.spec.sized else f"memory for {row.budget_bytes:,}"
        tables.narrate(f"moetool: auto is {row.policy} with {size} experts")
    if served:
        tables.narrate("moetool: the decisions of served are equal to the log's")
    if draw is not None:
        _draw(draw, rows, source.spec, whole_bytes(source, pool, pool_unit))
    if as_json:
        tables.print_json([{**row.to_json(), **({"auto": row in chosen} if known else {})} for row in rows])
        return
    among = f", {devices} devices" if devices > 1 else ""
    size = f"{tables.numbered(len(source.requests), 'request')}, {tables.numbered(source.num_tokens, 'token')}"
    if held_out:
        size = f"{tables.numbered(len(unseen), 'held-out request')} of {len(with_tokens)}"
    title = f"{trace}: {size}{among}"
    replay_table(title, rows, chosen, sized=source.spec.sized).print()


@contextmanager
def _of_budget() -> Iterator[None]:
    """Name the option in the error of a pool that is too small."""
    try:
        yield
    except CapacityError as error:
        raise CapacityError(f"--budget is too small: {error}") from None


def _draw(file: Path, rows: "Sequence[ReplayRow]", spec: "ModelSpec", all_bytes: int) -> None:
    """Draw loaded bytes, or experts where their size is unknown, and hit rate of new tokens by memory.

    Raises:
        UsageError: no row has new tokens.
    """
    from moetool.report import drawing
    from moetool.report.figures import memory_curves

    if not any(row.decode_tokens for row in rows):
        raise UsageError("the trace has no new tokens to draw; --draw is about decoding")
    labels = {row.policy: row.policy for row in rows}
    most = max(row.budget_bytes for row in rows)
    unit = ("experts", 1) if not spec.sized else ("GB", 1e9) if most >= 1e9 else ("MB", 1e6)
    whole = f"{tables.count(all_bytes, 'B')} of experts" if spec.sized else f"{spec.total_experts:,} experts"
    title = f"{spec.name}: {whole}"
    data = sorted((row.to_json() for row in rows), key=lambda row: row["budget_bytes"])
    drawing.save(file, 3.2, lambda figure: memory_curves.paint(figure, data, labels, unit, title))
