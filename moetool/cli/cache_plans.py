"""The commands for one device: `moetool plan cache`, `maps` and `alpha`."""

from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from moetool.base import durable, tables
from moetool.base.config import MOST_SEED, parse, parse_seconds, parse_settings
from moetool.base.errors import UsageError
from moetool.cli.flags import (
    Jobs,
    Json,
    Model,
    Out,
    Overwrite,
    PredictorDir,
    ProfileFile,
    Recipe,
    Revision,
    ServedDevice,
    ServedHostMemory,
    TraceDir,
    find_overlap,
    listed,
    memory_bytes,
    note,
    open_predictor,
    open_trace,
    read_timeline,
    settable,
)


def plan_cache(
    trace: TraceDir,
    out: Annotated[Path, typer.Option("--out", help="Plan file to write (JSON).")],
    device_memory: Annotated[
        str | None,
        typer.Option(
            "--device-memory",
            help="Device memory for the whole model, e.g. 64MB or 20GiB; with --target-tpot, its upper limit (default: "
            "what is free).",
        ),
    ] = None,
    predictor: PredictorDir = None,
    profile: ProfileFile = None,
    model: Annotated[str | None, typer.Option(help="Model of the trace (default: the path in the trace).")] = None,
    revision: Revision = None,
    config_only: Annotated[
        bool, typer.Option("--config-only", help="Read only the model's config or file headers, not its weights.")
    ] = False,
    target_tpot: Annotated[
        str | None,
        typer.Option(help="Find the least memory that reaches this time per output token, e.g. 80ms; needs --profile."),
    ] = None,
    frontier: Annotated[
        int,
        typer.Option(
            min=0, max=1000, help="Number of memory sizes on the frontier, from the smallest pool to all experts."
        ),
    ] = 3,
    draw: Annotated[
        Path | None, typer.Option(help="Figure of the memory-latency frontier: an .svg, .png or .pdf file.")
    ] = None,
    pool: Annotated[
        str,
        typer.Option(
            help="Form of the expert pool: one (for all layers), layer (equal slots per layer), mixed or auto "
            "(the best); see 'moetool guide policies'."
        ),
    ] = "auto",
    settings: Annotated[
        list[str], settable("Further setting, as for serve: kv_tokens, dtype, ..., and timeline.device, ...")
    ] = [],
    jobs: Jobs = 0,
    overwrite: Overwrite = False,
    as_json: Json = False,
    recipe: Recipe = None,
) -> None:
    """Choose a cache policy and expert slots for a device by replaying a trace.

    Minimizes the bytes loaded, or with --profile the time per output token. One half of the requests chooses the
    policy, the other half tests it. Device and data type are those that `moetool serve` chooses on this machine.
    """
    from moetool.models.checkpoint import Checkpoint
    from moetool.models.files.hub import with_revision
    from moetool.models.files.location import shape_names
    from moetool.report.cache_page import candidates_table, frontier_table
    from moetool.report.drawing import require_drawable
    from moetool.report.figures.frontier import draw_frontier
    from moetool.runtime.automatic import on_this_machine
    from moetool.runtime.budget import every_slot_bytes, free_device_bytes
    from moetool.runtime.serve_options import ServeOptions
    from moetool.tuning.cache_planning import NO_PREDICTOR, CacheSearch, PlanPredictor
    from moetool.tuning.cache_planning import plan_cache as run

    durable.require_new_file(out, overwrite)
    if draw is not None:
        require_drawable(draw)
        durable.require_new_file(draw, overwrite)
        if draw.resolve() == out.resolve():
            raise UsageError(f"{draw} is the plan file itself; choose another file for --draw")
        if frontier < 1:
            raise UsageError("--draw draws the frontier; give --frontier 1 or more budgets")
    target_s = None if target_tpot is None else parse_seconds(target_tpot)
    if target_s is not None and profile is None:
        raise UsageError("--target-tpot depends on the machine; give its costs with --profile FILE")
    given_bytes = memory_bytes("--device-memory", device_memory)
    source = open_trace(trace)
    values = parse_settings(settings)
    machine = values.pop("timeline", {})
    options = parse(ServeOptions, values, "--set")
    if options.devices > 1:
        raise UsageError(
            f"a plan is made for one device, but devices is {options.devices}; give devices to 'moetool serve' only"
        )
    name = with_revision(model or str(source.manifest["provenance"].get("model", "")), revision)
    try:
        checkpoint = Checkpoint.open(name, weights=not config_only)
    except UsageError as error:
        if model is not None or "imported" not in source.manifest["provenance"]:
            raise
        raise UsageError(
            f"{trace} is imported, and its model is not here: {error}; or give --config-only with --model "
            f"{' or '.join(shape_names())}"
        ) from None
    require = source.spec.require_alike if config_only else source.spec.require_same
    require(checkpoint.spec, "the trace", f"the model at {checkpoint.path}")
    options = parse(ServeOptions, on_this_machine(checkpoint, values)[0], "--set")
    in_host = options.device == "cuda" and options.host_memory_bytes >= every_slot_bytes(checkpoint, options)
    tier = "pinned" if in_host else "disk"
    costs, timeline = read_timeline(
        profile, machine, device=options.device, dtype=options.dtype, io_threads=options.io_threads, tier=tier
    )
    limit = given_bytes or free_device_bytes(checkpoint, options)
    memory = device_budget(checkpoint, options, values, limit)
    loaded = open_predictor(predictor)
    predicts = NO_PREDICTOR
    if predictor is not None and loaded is not None:
        predicts = PlanPredictor.of(loaded, predictor, source, find_overlap(source, loaded).repeated)
    with tables.stages() as on_progress:
        search = CacheSearch(
            profile=costs,
            timeline=timeline,
            target_tpot_s=target_s,
            frontier=frontier,
            pool=pool,
            jobs=jobs,
            on_progress=on_progress,
        )
        plan = run(source, memory, search, predicts)
    plan.save(out)
    if draw is not None:
        draw_frontier(draw, plan)
    if as_json:
        tables.print_json(plan.to_json())
        return
    each = plan.slot_bytes or plan.spec.slot_bytes
    stored = "" if each == plan.spec.slot_bytes else f", of experts of {tables.count(plan.spec.slot_bytes, 'B')} stored"
    tables.print_paragraph(
        f"{out}: {plan.policy} with {plan.slots} expert slots ({tables.count(plan.slots * each, 'B')}{stored})"
    )
    tables.print_paragraph(plan.reason)
    candidates_table(plan).print()
    if plan.frontier:
        frontier_table(plan).print()


def device_budget(checkpoint: Any, options: Any, given: Collection[str], device_memory_bytes: int) -> Any:
    """Return the division of `moetool serve` on this machine in plain numbers, for `plan_cache`.

    Args:
        options: completed for the machine.
        given: names of the options that the user set.
    """
    from moetool.runtime.budget import least_and_most, served_budgets, slot_stride
    from moetool.tuning.cache_planning import DeviceBudget, Room

    served = served_budgets(checkpoint, options, given)

    def divide(memory: int, predictor: int) -> Room:
        made = served(memory, predictor)
        return Room(slots=made.slots, dense_bytes=made.dense_bytes, kv_bytes=made.kv_bytes, kv_tokens=made.kv_tokens)

    least, most = least_and_most(checkpoint, options, fixed_kv="kv_tokens" in given)
    return DeviceBudget(
        device_memory_bytes=device_memory_bytes,
        least_bytes=least,
        most_bytes=most,
        slot_bytes=slot_stride(checkpoint, options),
        divide=divide,
        dtype=options.dtype,
    )


def plan_maps(
    trace: TraceDir,
    out: Out,
    capacity: Annotated[
        str | None,
        typer.Option(help="Maps to keep: a number, or 2LJ or LJlnLJ/2 for L layers of J experts (default: LJlnLJ/2)."),
    ] = None,
    settings: Annotated[list[str], settable("Option of the predictor expert_map, e.g. source=topk.")] = [],
    seed: Annotated[
        int, typer.Option(min=0, max=MOST_SEED, help="Seed of the split into stored and held-out requests.")
    ] = 0,
    overwrite: Overwrite = False,
    as_json: Json = False,
    recipe: Recipe = None,
) -> None:
    """Build a FineMoE expert-map store and score it on held-out requests."""
    from moetool.training.map_store import plan_maps as run

    options = parse_settings(settings) | ({} if capacity is None else {"capacity": capacity})
    with tables.progress("storing maps"):
        made = run(trace, out, options=options, seed=seed, overwrite=overwrite)
    if as_json:
        tables.print_json(made.to_json())
    else:
        _print_maps(made)


def plan_alpha(
    model: Model,
    data: Annotated[list[str], typer.Option(help="Held-out text, as for capture. Repeatable.")],
    target_tpot: Annotated[str, typer.Option(help="Limit of the time per output token, e.g. 80ms.")],
    out: Annotated[Path, typer.Option("--out", help="Plan file to write (JSON), for 'moetool serve --plan'.")],
    device_memory: Annotated[
        str | None, typer.Option(help="Memory for weights, KV cache and experts, e.g. 64MB (default: what is free).")
    ] = None,
    device: ServedDevice = None,
    host_memory: ServedHostMemory = None,
    settings: Annotated[
        list[str], settable("Setting: alphas=[0,0.2,0.4], tokens=N, rounds=N, or of serve, e.g. serve.dtype=bfloat16.")
    ] = [],
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Choose SMoE's alpha, its allowed deviation from the router, by measured time and loss."""
    from moetool.measuring.alpha import AlphaOptions, print_points
    from moetool.measuring.alpha import plan_alpha as run
    from moetool.models.checkpoint import Checkpoint
    from moetool.prompts import gather as prompt_sets
    from moetool.runtime.automatic import choose
    from moetool.runtime.serve_options import ServeOptions

    durable.require_new_file(out, overwrite)
    target_s = parse_seconds(target_tpot)
    values = parse_settings(settings)
    serve = values.pop("serve", {})
    if isinstance(serve, dict):
        serve |= {} if device is None else {"device": device}
        serve |= {} if host_memory is None else {"host_memory_bytes": memory_bytes("--host-memory", host_memory)}
    parse(ServeOptions, serve, "--set serve")  # refuse bad values first
    options = parse(AlphaOptions, values, "--set")
    checkpoint = Checkpoint.open(model)
    memory = memory_bytes("--device-memory", device_memory)
    setup = choose(checkpoint, serve, device_memory_bytes=memory, policy="smoe")
    for line in tables.aligned(setup.choices):
        note(line)
    texts = [f"{prompt.text} {prompt.answer or ''}" for prompt in prompt_sets.load(listed(data))]
    show = partial(print_points, setup.budget.slots, checkpoint.spec.total_experts)
    with tables.progress("passes", options.rounds * len({0.0, *options.alphas})) as passed:
        plan = run(
            checkpoint,
            texts,
            setup.budget,
            target_s,
            serve=setup.options,
            options=options,
            on_pass=passed,
            on_points=(lambda points: None) if as_json else show,
        )
    plan.save(out)
    if as_json:
        tables.print_json(plan.to_json())
        return
    tables.print_paragraph(f"{out}: {plan.reason}")


def _print_maps(made: Any) -> None:
    """Print a `MapReport`: the maps, and the correlation of similarity and hit rate."""
    tables.print_paragraph(
        f"{made.out}: {made.maps:,} expert maps of at most {made.capacity:,} ({tables.count(made.bytes, 'B')})"
    )
    rows = []
    for name, likeness in (("embeddings", made.meaning), ("gates", made.path)):
        if likeness is None:
            continue
        pearson = "-" if likeness.pearson is None else f"{likeness.pearson:.3f}"
        rise = ", ".join(f"{least:.2f}: {hit_rate:.2f}" for least, _, hit_rate, _ in likeness.bins)
        rows.append([name, pearson, f"{likeness.best:.3f}", f"{likeness.best_hit_rate:.3f}", rise])
    tables.print_table(
        f"similarity to {made.iterations:,} held-out iterations, and hit rate of the map's K most likely experts",
        ["similarity of", "Pearson", "of the best map", "its hit rate", "hit rate from a similarity of"],
        rows,
    )
    tables.print_paragraph(
        f"distance {made.distance}: the threshold δ selects {made.selected:.2f} experts per layer "
        f"({tables.percent(made.selected_share)}; K = {made.top_k}), more than K in "
        f"{tables.percent(made.widened_share)} of the layers. {tables.percent(made.hit_rate)} of the needed experts "
        "are selected."
    )
