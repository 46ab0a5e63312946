"""The command line: commands, and the one place where errors become messages and exit codes.

The commands about placement are in `moetool.cli.placement`, those about traces in `moetool.cli.trace`, `moetool
simulate` in `moetool.cli.simulation`, pages of plans in `moetool.cli.report`, and `moetool serve --cluster` in
`moetool.cli.cluster`.
"""

import contextlib
import errno
import json
import os
import shlex
import sys
import tomllib
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from moetool import __version__, assets, durable, tables
from moetool.cli import cluster as cli_cluster
from moetool.cli import cluster_bench as cli_cluster_bench
from moetool.cli import paper as cli_paper
from moetool.cli import placement as cli_placement
from moetool.cli import report as cli_report
from moetool.cli import simulation as cli_simulate
from moetool.cli import trace as cli_trace
from moetool.config import parse, parse_bytes, parse_seconds, parse_settings
from moetool.errors import MoetoolError, UsageError

# What the machine refuses is no bug of ours: full disks and quotas, permissions, read-only file systems.
_OUTSIDE = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.ENAMETOOLONG}
    | {errno.ENOENT, errno.EEXIST, errno.EISDIR, errno.ENOTDIR}
)

app = typer.Typer(
    name="moetool",
    help="Capture the routing of Mixture-of-Experts models, learn it, plan by it, serve a model larger than memory.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
trace_app = typer.Typer(help="Look at traces, part and join them, and exchange them with others.", no_args_is_help=True)
plan_app = typer.Typer(help="Decide where experts live.", no_args_is_help=True)
bench_app = typer.Typer(help="Measure what belongs together, side by side.", no_args_is_help=True)
reference_app = typer.Typer(help="Make a small model like the embedded one.", no_args_is_help=True)
app.add_typer(trace_app, name="trace")
app.add_typer(plan_app, name="plan")
app.add_typer(bench_app, name="bench")
app.add_typer(reference_app, name="reference")
cli_cluster_bench.register(bench_app)
cli_paper.register(bench_app)
cli_placement.register(plan_app)
cli_simulate.register(app)
cli_trace.register(trace_app)


def _use_recipe(ctx: typer.Context, path: Path | None) -> Path | None:
    """Take the defaults of a command's flags from a TOML file; flags that are given win."""
    if path is None:
        return None
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the recipe {path}: {error}") from None
    known = {parameter.name for parameter in ctx.command.params}
    for name in values:
        if name.replace("-", "_") not in known:
            raise UsageError(f"{path} sets {name!r}, which {ctx.command_path} does not have; see --help")
    ctx.default_map = {name.replace("-", "_"): value for name, value in values.items()}
    return path


Model = Annotated[str, typer.Argument(help="'reference', a folder in Hugging Face format, or a hub name.")]
TraceDir = Annotated[Path, typer.Option("--trace", help="Folder of a trace.")]
Out = Annotated[Path, typer.Option("--out", help="Where the result goes; it appears there whole or not at all.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a result that is there.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
ProfileFile = Annotated[Path | None, typer.Option("--profile", help="Costs of a machine, by 'moetool profile'.")]
Settings = Annotated[list[str], typer.Option("--set", help="An option by name, as in --set width=64. Repeatable.")]
Device = Annotated[str | None, typer.Option(help="cpu (the default) or cuda: where the model computes.")]
ApiKey = Annotated[
    str | None,
    typer.Option(envvar="MOETOOL_API_KEY", show_default=False, help="What clients have to send."),
]
HostMemory = Annotated[
    str | None,
    typer.Option(help="For experts between disk and --device-memory, such as 32GB; pinned beside a GPU."),
]
Recipe = Annotated[
    Path | None,
    typer.Option("--recipe", help="TOML file with values for these flags.", is_eager=True, callback=_use_recipe),
]


@app.callback(invoke_without_command=True)
def _top(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(__version__)
        raise typer.Exit


@app.command()
def capture(
    model: Model,
    data: Annotated[
        list[str],
        typer.Option(help="Embedded prompt sets (or 'all'), public ones ('moetool data'), JSONL, Parquet, text files."),
    ],
    out: Out,
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder of a copy of the public sets, instead of the Hugging Face hub.")
    ] = None,
    max_prompts: Annotated[int | None, typer.Option(min=1, help="Prompts of each source.")] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens to decode for each prompt, at most; the public set's number, else 32."),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts that are forwarded together.")] = 1,
    keep: Annotated[str, typer.Option(help="Columns: topk,logits,embeddings,hidden,ahead,resident.")] = "topk,logits",
    ahead: Annotated[int, typer.Option(min=1, help="For how many layers the column 'ahead' looks ahead.")] = 3,
    resident: Annotated[
        float, typer.Option(help="Share of a layer's experts that column 'resident' reckons with.")
    ] = 0.5,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    threads: Annotated[int, typer.Option(min=0, help="Of the arithmetic; 0 chooses.")] = 0,
    device_memory: Annotated[
        str | None, typer.Option(help="For dense weights and an expert pool, such as 64MB: a model larger than memory.")
    ] = None,
    device: Device = None,
    host_memory: HostMemory = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes that share the batches, one thread each.")] = 1,
    settings: Annotated[
        list[str], typer.Option("--set", help="data.task, data.split, data.seed, data.duplicates=keep, ... Repeatable.")
    ] = [],  # noqa: B006
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a run of this command that was stopped.")
    ] = False,
    overwrite: Overwrite = False,
    as_json: Json = False,
    recipe: Recipe = None,
) -> None:
    """Run a model over prompts and record what its routers do, token by token."""
    from moetool.prompts import gather as prompts

    if host_memory is not None and device_memory is None:
        raise UsageError("--host-memory is the tier below --device-memory: give that too, or leave both out")
    values = parse_settings(settings)
    wanted = values.pop("data", {})
    if data_dir is not None and isinstance(wanted, dict):
        wanted = {**wanted, "folder": data_dir}
    chosen = parse(prompts.DataOptions, wanted, "data")
    if values:
        raise UsageError(f"--set {next(iter(values))!r} is no option of capture, expected data.NAME, as in data.seed=1")
    gathered = prompts.gather(_split(data), max_prompts=max_prompts, options=chosen)
    texts = gathered.prompts
    if gathered.duplicates:
        tables.narrate(f"moetool: {gathered.duplicates:,} prompts that repeat others were left out")
    from moetool.capture import shares
    from moetool.capture.run import CaptureOptions
    from moetool.capture.run import capture as run
    from moetool.models.loading import parse_device

    options = CaptureOptions(
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        keep=tuple(_split([keep])),
        ahead=ahead,
        resident=resident,
        device=device or "cpu",
        dtype=dtype,
        threads=threads,
        data=tuple(gathered.origins),
    )
    parse_device(options.device)  # refused here once, and not by every worker
    rest: dict[str, Any] = {"overwrite": overwrite, "resume": resume, "on_note": tables.narrate}
    if device_memory is not None:
        from moetool.serving.assembly import open_pooled

        rest["open_model"] = partial(
            open_pooled,
            device_memory_bytes=parse_bytes(device_memory),
            host_memory_bytes=None if host_memory is None else parse_bytes(host_memory),
        )
    with tables.progress(f"capturing {model}", None if workers > 1 else len(texts)) as on_progress:
        if shares.under_torchrun():
            shared = shares.capture_under_torchrun(model, texts, out, options, **rest, on_progress=on_progress)
            if shared is None:
                return  # the process of rank 0 speaks for all
            made = shared
        elif workers > 1:
            made = shares.capture_with_workers(model, texts, out, options, workers, **rest, on_progress=on_progress)
        else:
            made = run(model, texts, out, options, **rest, on_progress=on_progress)
    if as_json:
        tables.print_json(made.to_json())
        return
    left_out = [f"{n:,} {why}" for n, why in ((made.too_long, "too long for the context"), (made.empty, "empty")) if n]
    skipped = f"; prompts left out: {', '.join(left_out)}" if left_out else ""
    print(
        f"{out}: {made.requests:,} prompts, {made.tokens:,} tokens, {tables.count(made.bytes, 'B')} "
        f"({made.bytes / made.tokens:,.0f} bytes a token) in {made.seconds:,.1f} s{skipped}"
    )


@app.command()
def train(
    predictor: Annotated[str, typer.Argument(help="Name of a predictor, such as expert_mlp.")],
    out: Out,
    model: Annotated[str | None, typer.Argument(help="For awq_replica: the model that it is a replica of.")] = None,
    trace: Annotated[Path | None, typer.Option("--trace", help="Folder of a trace, for all but awq_replica.")] = None,
    data: Annotated[list[str], typer.Option(help="For awq_replica: text to choose scales on, as for capture.")] = [],  # noqa: B006 - Typer copies defaults
    bits: Annotated[int | None, typer.Option(help="For awq_replica: bits of a weight: 2, 4 (default) or 8.")] = None,
    group: Annotated[
        int | None, typer.Option(help="For awq_replica: weights that share a scale: 32, 64 (default) or 128.")
    ] = None,
    symmetric: Annotated[
        bool | None,
        typer.Option(
            "--symmetric/--asymmetric",
            help="For awq_replica: whether experts' zero points are 0; others are refused, with the reason.",
        ),
    ] = None,
    settings: Annotated[
        list[str],
        typer.Option("--set", help="The predictor's options, and fit.max_epochs, fit.max_tokens, fit.held_out, ..."),
    ] = [],  # noqa: B006
    seed: Annotated[int, typer.Option(help="Of the split, the weights and the order of the samples.")] = 0,
    overwrite: Overwrite = False,
    as_json: Json = False,
    recipe: Recipe = None,
) -> None:
    """Fit a predictor of the experts that will be used next, or round a replica of the model whose gates tell."""
    from moetool import plugins

    options = parse_settings(settings)
    module = plugins.load("predictor", predictor)
    rounding = {"bits": bits, "group": group, "symmetric": symmetric}
    if module.Predictor.made_of == "model":
        if model is None or not data or trace is not None:
            raise UsageError(
                f"{predictor} is made from a model and text: moetool train {predictor} MODEL --data all --out {out}"
            )
        options = {**{name: value for name, value in rounding.items() if value is not None}, **options}
        with tables.steps(f"rounding {model}") as on_progress:
            card = module.make(
                model, _split(data), out, options, seed=seed, overwrite=overwrite, on_progress=on_progress
            )
    else:
        from moetool.learning.training import FitOptions
        from moetool.learning.training import train as run

        if trace is None or model is not None or data or set(rounding.values()) != {None}:
            raise UsageError(f"{predictor} is trained on a trace: moetool train {predictor} --trace DIR --out {out}")
        fit = parse(FitOptions, options.pop("fit", {}), "fit")
        card = run(predictor, trace, out, options=options, seed=seed, overwrite=overwrite, **asdict(fit))
    if as_json:
        tables.print_json(card)
    elif "quantization" in card:
        tables.print_replica(out, card)
    else:
        print(f"{out}: {summarize_card(card)}")


def summarize_card(card: dict[str, Any]) -> str:
    """One line about a trained predictor."""
    return (
        f"{card['predictor']}, {tables.count(card['parameters'])} parameters, trained on "
        f"{tables.count(card['tokens']['train'])} tokens of {len(card['requests']['train'])} prompts in "
        f"{card['seconds']:,.1f} s"
    )


@app.command()
def evaluate(
    predictors: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Folders of trained predictors.")],
    trace: TraceDir,
    unseen_task: Annotated[
        Path | None, typer.Option("--unseen-task", help="Folder of a trace of a task that they were not trained on.")
    ] = None,
    settings: Annotated[
        list[str], typer.Option("--set", help="Another option of one, as in --set awq_replica.activation_bits=8.")
    ] = [],  # noqa: B006
    profile: Annotated[
        Path | None, typer.Option(help="By 'moetool profile': gives times as shares of a decode step.")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="The tables as a page as well, an HTML file.")] = None,
    as_json: Json = False,
) -> None:
    """Score predictors on requests that they were not trained on, beside popularity and affinity."""
    from moetool.costing.costs import CostProfile

    if report is not None:
        durable.require_writable(report)
    costs = CostProfile.load(profile) if profile is not None else None
    from moetool.evaluation.evaluate import evaluate as run
    from moetool.evaluation.page import write_page
    from moetool.evaluation.tables import print_evaluations

    rows = run(predictors, trace, unseen_task, costs, parse_settings(settings))
    if report is not None:
        write_page(report, rows)
    if as_json:
        tables.print_json([row.to_json() for row in rows])
    else:
        print_evaluations(rows)


@plan_app.command("cache")
def plan_cache(
    trace: TraceDir,
    device_memory: Annotated[
        str,
        typer.Option(
            "--device-memory",
            "--max-memory",
            help="For the whole model on the device, such as 64MB or 20GiB; with --target-tpot the most of it.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", help="The plan, a JSON file.")],
    predictor: Annotated[Path | None, typer.Option(help="Folder of a trained predictor.")] = None,
    profile: ProfileFile = None,
    model: Annotated[str | None, typer.Option(help="The trace's model, if it is no longer where it was.")] = None,
    target_tpot: Annotated[
        str | None,
        typer.Option(help="Plan for the least memory that brings a token to this, as 80ms; by --profile."),
    ] = None,
    frontier: Annotated[
        int, typer.Option(min=0, help="Budgets to show the best policy for, from the smallest pool to all experts.")
    ] = 3,
    draw: Annotated[
        Path | None, typer.Option(help="Draw that frontier of memory and latency: a .svg, .png or .pdf file.")
    ] = None,
    tune: Annotated[
        bool, typer.Option("--tune", help="Try prefetch distances, pinned experts and limits of prefetching too.")
    ] = False,
    settings: Settings = [],  # noqa: B006
    as_json: Json = False,
    recipe: Recipe = None,
) -> None:
    """Choose a cache policy and its slots for a device, by replaying the trace: the fewest bytes, or with a profile
    the shortest time per output token.

    Everything is chosen on one half of the requests and shown on the other.
    """
    from moetool.models.spec import locate, read_spec
    from moetool.planning.cache import plan_cache as run
    from moetool.report.drawing import require_drawable
    from moetool.report.figures.frontier import draw_frontier
    from moetool.serving.assembly import ServeOptions, fixed_bytes
    from moetool.trace.reader import Trace

    durable.require_writable(out)
    if draw is not None:
        require_drawable(draw)
        durable.require_writable(draw)
        if draw.resolve() == out.resolve():
            raise UsageError(f"{draw} is the plan's own file; draw into another")
        if frontier < 1:
            raise UsageError("--draw draws the frontier; give --frontier 1 or more budgets")
    target_s = None if target_tpot is None else parse_seconds(target_tpot)
    if target_s is not None and profile is None:
        raise UsageError("--target-tpot is a time on some machine: give its costs with --profile FILE")
    source = Trace(trace)
    values = parse_settings(settings)
    machine = values.pop("timeline", {})
    options = parse(ServeOptions, values, "--set")
    if options.devices > 1:
        raise UsageError(
            f"devices is {options.devices}: a plan is made for one device; leave it out here, not in serve"
        )
    costs, timeline = _timeline(profile, machine, dtype=options.dtype, io_threads=options.io_threads)
    path = locate(model or str(source.manifest["provenance"].get("model", "")))
    source.spec.require_same(read_spec(path), "the trace", f"the model at {path}")
    dense, kv = fixed_bytes(path, options)
    plan = run(
        source,
        predictor,
        parse_bytes(device_memory),
        dense_bytes=dense,
        kv_bytes=kv,
        kv_tokens=options.kv_tokens,
        dtype=options.dtype,
        profile=costs,
        timeline=timeline,
        target_tpot_s=target_s,
        frontier=frontier,
        tuned=tune,
    )
    plan.save(out)
    if draw is not None:
        draw_frontier(draw, plan)
    if as_json:
        tables.print_json(plan.to_json())
        return
    print(
        f"{out}: {plan.policy} with {plan.slots} expert slots ({tables.count(plan.slots * plan.spec.slot_bytes, 'B')})"
    )
    print(plan.reason)
    if plan.frontier:
        tables.print_frontier(plan)


@plan_app.command("maps")
def plan_maps(
    trace: TraceDir,
    out: Out,
    capacity: Annotated[str | None, typer.Option(help="Maps to keep: a number, 2LJ or LJlnLJ/2 (default).")] = None,
    settings: Annotated[
        list[str], typer.Option("--set", help="Options of the predictor expert_map, such as source=topk. Repeatable.")
    ] = [],  # noqa: B006
    seed: Annotated[int, typer.Option(help="Of the split into requests for the maps and requests to judge them.")] = 0,
    overwrite: Overwrite = False,
    as_json: Json = False,
    recipe: Recipe = None,
) -> None:
    """Make a store of expert maps, for the policy finemoe, and say what likeness is worth on held-out requests."""
    from moetool.planning.maps import plan_maps as run

    options = parse_settings(settings) | ({} if capacity is None else {"capacity": capacity})
    made = run(trace, out, options=options, seed=seed, overwrite=overwrite)
    if as_json:
        tables.print_json(made.to_json())
    else:
        tables.print_maps(made)


@plan_app.command("alpha")
def plan_alpha(
    model: Model,
    data: Annotated[list[str], typer.Option(help="Held-out texts: as for capture.")],
    device_memory: Annotated[str, typer.Option(help="For the whole model on the device, such as 64MB.")],
    target_tpot: Annotated[str, typer.Option(help="The longest that a token may take, such as 80ms.")],
    out: Annotated[Path, typer.Option("--out", help="The plan, a JSON file, for 'moetool serve --plan'.")],
    settings: Annotated[
        list[str], typer.Option("--set", help="alphas=[0,0.2,0.4], tokens=N, rounds=N, or as in serve (serve.dtype=…).")
    ] = [],  # noqa: B006
    as_json: Json = False,
) -> None:
    """Choose how far the policy smoe may go from the router's choice: measures time and loss live, alpha by alpha."""
    from moetool.prompts import gather as prompt_sets
    from moetool.serving.alpha import AlphaOptions, print_points
    from moetool.serving.alpha import plan_alpha as run
    from moetool.serving.assembly import ServeOptions

    durable.require_writable(out)
    values = parse_settings(settings)
    serve_options = parse(ServeOptions, values.pop("serve", {}), "--set serve")
    options = parse(AlphaOptions, values, "--set")
    texts = [f"{prompt.text} {prompt.answer or ''}" for prompt in prompt_sets.load(_split(data))]
    with tables.progress("passes", options.rounds * len({0.0, *options.alphas})) as passed:
        plan, points = run(
            model,
            texts,
            parse_bytes(device_memory),
            parse_seconds(target_tpot),
            serve=serve_options,
            options=options,
            on_pass=passed,
        )
    plan.save(out)
    if as_json:
        tables.print_json(plan.to_json())
        return
    print_points(plan, points)
    print(f"{out}: {plan.reason}")


@app.command()
def replay(
    trace: TraceDir,
    policy: Annotated[
        list[str], typer.Option(help="Cache policies; repeat, or separate by commas. auto: all that can serve.")
    ],
    budget: Annotated[list[str], typer.Option(help="For experts: bytes (64MB) or a share of all experts (25%).")],
    predictor: Annotated[Path | None, typer.Option(help="Folder of a trained predictor.")] = None,
    profile: ProfileFile = None,
    order: Annotated[str, typer.Option(help="auto, sequential (one request after the other) or recorded.")] = "auto",
    pool: Annotated[
        str, typer.Option(help="slots (each for any expert), bytes, or auto: bytes for imported traces.")
    ] = "auto",
    settings: Annotated[
        list[str],
        typer.Option(
            "--set",
            help="A policy's option, as in --set lfu.forget=true, timeline.device=cuda, or devices=2 that share it.",
        ),
    ] = [],  # noqa: B006
    as_json: Json = False,
) -> None:
    """Run cache policies over a trace: hits, loads and bytes, and with a profile times, without the model."""
    from moetool.planning.candidates import best, servable, too_large
    from moetool.replay import replay as run
    from moetool.replay import whole_bytes
    from moetool.trace.reader import Trace

    orders = {"auto": None, "sequential": True, "recorded": False}
    if order not in orders:
        raise UsageError(f"unknown --order {order!r}: known are {', '.join(orders)}")
    source = Trace(trace)
    budgets = [parse_bytes(text, whole_bytes(source, pool)) for text in _split(budget)]
    asked, options = _split(policy), parse_settings(settings)
    devices = options.pop("devices", 1)
    if type(devices) is not int or devices < 1:
        raise UsageError(f"devices is {devices!r}, expected 1 or more")
    costs, timeline = _timeline(profile, options.pop("timeline", {}))
    predicts = None
    if predictor is not None:
        from moetool.predictor import load_predictor

        predicts = load_predictor(predictor)
    known = servable(source, predicts) if "auto" in asked else []
    names = list(dict.fromkeys(name for one in asked for name in (known if one == "auto" else [one])))
    _require_policies(names, options)
    left_out = too_large([name for name in known if name not in asked], source.spec, min(budgets), options, devices)
    names = [name for name in names if name not in left_out]
    rows = run(
        source,
        names,
        budgets,
        predictor=predicts,
        sequential=orders[order],
        options=options,
        pool=pool,
        profile=costs,
        timeline=timeline,
        devices=devices,
    )
    chosen = [best([row for row in rows if row.policy in known and row.budget_bytes == b]) for b in budgets if known]
    for name, why in left_out.items():
        tables.narrate(f"moetool: auto leaves out {name}, {why}")
    for row in chosen:
        tables.narrate(f"moetool: auto is {row.policy} with {tables.count(row.budget_bytes, 'B')} for experts")
    if as_json:
        tables.print_json([{**row.to_json(), **({"auto": row in chosen} if known else {})} for row in rows])
        return
    among = f", {devices} devices" if devices > 1 else ""
    title = f"{trace}: {len(source.requests):,} requests, {source.num_tokens:,} tokens{among}"
    tables.print_replay(title, rows, chosen)


@app.command()
def serve(
    model: Model,
    plan: Annotated[
        Path | None, typer.Option(help="Of 'moetool plan cache', or with --cluster of 'moetool plan placement'.")
    ] = None,
    cluster: Annotated[str | None, typer.Option(help="local:N, or HOST:PORT of a Ray head: several servers.")] = None,
    mode: Annotated[
        str | None,
        typer.Option(help="What the servers of --cluster do: edge (if not said), or ep: expert parallelism."),
    ] = None,
    policy: Annotated[str | None, typer.Option(help="Cache policy; the plan's (or auto), or lru.")] = None,
    predictor: Annotated[Path | None, typer.Option(help="Folder of a trained predictor; the plan's.")] = None,
    device_memory: Annotated[
        str | None, typer.Option(help="For everything together, such as 64MB; the plan's.")
    ] = None,
    device: Device = None,
    host_memory: HostMemory = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes any free one.")] = 8000,
    api_key: ApiKey = None,
    log: Annotated[
        Path | None, typer.Option(help="Record gates and decisions as a trace, for 'moetool replay'.")
    ] = None,
    settings: Settings = [],  # noqa: B006
    recipe: Recipe = None,
) -> None:
    """Serve a model through an OpenAI-compatible API, its experts in a pool smaller than the model."""
    from moetool.plan import CachePlan

    if cluster is not None:
        values = parse_settings(settings)
        values |= {} if device is None else {"device": device}
        values |= {} if host_memory is None else {"host_memory_bytes": parse_bytes(host_memory)}
        _require_api_key(api_key)
        given = {"--policy": policy, "--device-memory": device_memory, "--log": log}
        cli_cluster.serve_cluster(
            cli_cluster.ClusterCommand(
                model=model,
                plan=plan,
                cluster=cluster,
                mode=mode or "edge",
                host=host,
                port=port,
                api_key=api_key,
                values=values,
                refused={name: value is not None for name, value in given.items()},
                predictor=predictor,
            )
        )
        return
    if mode is not None:
        raise UsageError("--mode says what the servers of a --cluster do; give that too, such as --cluster local:3")
    if plan is not None:
        cli_cluster.require_no_placement(plan)
    if policy == "auto":
        if plan is None:
            raise UsageError(
                "--policy auto is what replay found best on a trace, and there is no plan that says so; make one with "
                "moetool plan cache, and give it with --plan"
            )
        policy = None
    chosen = CachePlan.load(plan) if plan is not None else None
    values = parse_settings(settings)
    if chosen is not None:
        values = {"kv_tokens": chosen.kv_tokens, "dtype": chosen.dtype, **values}
    if device is not None:
        values["device"] = device
    if host_memory is not None:
        values["host_memory_bytes"] = parse_bytes(host_memory)
    _require_api_key(api_key)
    from moetool.serving import server
    from moetool.serving.assembly import ServeOptions, build_engine
    from moetool.serving.server_options import ServerOptions
    from moetool.serving.status_line import status_line

    allowed = parse(ServerOptions, values.pop("server", {}), "--set server")
    sock = server.bind(host, port)
    try:
        options = parse(ServeOptions, values, "--set")
        engine = build_engine(
            model,
            options=options,
            plan=chosen,
            policy=policy,
            predictor=predictor,
            device_memory_bytes=None if device_memory is None else parse_bytes(device_memory),
            log=log,
        )
    except BaseException:
        sock.close()
        raise
    engine.start()
    slots = engine.store.num_slots
    among = f" on {options.devices} devices" if options.devices > 1 else ""
    below = (
        f", {tables.count(engine.store.host_pool_bytes, 'B')} in host memory" if engine.store.host_pool_bytes else ""
    )
    tables.narrate(
        f"moetool: {model} under {policy or (chosen.policy if chosen else 'lru')}: {slots} of "
        f"{engine.spec.total_experts} experts fit{among} ({tables.count(engine.store.pool_bytes, 'B')}{below})"
    )

    def ready(url: str) -> None:
        tables.narrate(f"moetool: serving on {url}/v1")

    try:
        with status_line(engine):
            server.run(engine, sock, on_ready=ready, options=allowed, api_key=api_key)
    finally:
        engine.close()
    if log is not None:
        tables.narrate(f"moetool: the gate stream is in {log}")


def _require_api_key(api_key: str | None) -> None:
    if api_key is not None and not (api_key.isascii() and api_key.isprintable() and api_key.strip() == api_key != ""):
        raise UsageError("an API key is printable ASCII without spaces around it, at least one character")


@app.command()
def chat(
    url: Annotated[str, typer.Argument(help="Of the server, such as http://127.0.0.1:8000.")] = "http://127.0.0.1:8000",
    api_key: ApiKey = None,
    settings: Settings = [],  # noqa: B006
) -> None:
    """Talk to a server: a line is a turn; Ctrl-C stops an answer, Ctrl-D or an empty line ends. --set temperature=0
    and the like go along with every request.
    """
    from moetool.chat import Conversation, Refused

    conversation = Conversation(url, api_key, parse_settings(settings))
    tables.narrate(tables.printable(f"moetool: {conversation.model}"))
    while text := _next_line():
        try:
            for piece in conversation.ask(text):
                print(tables.printable(piece, keep=_SPOKEN), end="", flush=True)
            print()
        except Refused as refused:
            if not refused.may_go_on:
                raise
            tables.narrate(tables.printable(f"moetool: {refused}"))
        except KeyboardInterrupt:
            tables.narrate("\nmoetool: stopped; the answer is forgotten")


_SPOKEN = "\n\t\xa0\u3000\u200c\u200d"
"""Not printable to Python, and harmless parts of written language: blanks, and the joiners of scripts and emoji."""


def _next_line() -> str:
    """What the person says next; empty at the end."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        return ""


@app.command()
def profile(
    model: Annotated[
        str | None, typer.Argument(help="As elsewhere; with --config-only also a shape or config.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="The profile, a JSON file; printed only, if not given.")
    ] = None,
    config_only: Annotated[
        bool, typer.Option("--config-only", help="Without the weights: a folder, config.json, shape or hub name.")
    ] = False,
    dtype: Annotated[str | None, typer.Option(help="Of the arithmetic; float32 and bfloat16 both.")] = None,
    seconds: Annotated[float, typer.Option(min=0, help="How long to measure, beyond once everything.")] = 120.0,
    threads: Annotated[int, typer.Option(min=0, help="Of the arithmetic; 0 chooses.")] = 0,
    predictor: Annotated[Path | None, typer.Option(help="Folder of a trained predictor to time.")] = None,
    peer: Annotated[
        str | None, typer.Option(help="HOST:PORT of a 'moetool profile --listen' to time the way to.")
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(help="Be such a peer at PORT of this machine, or HOST:PORT; on trusted networks only: no login."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure what a model costs on this machine: experts, attention, loads from disk, link."""
    if listen is not None:
        from moetool.costing.probes.link import serve

        with contextlib.suppress(KeyboardInterrupt):
            serve(listen, on_ready=lambda address: tables.narrate(f"moetool: answering on {address}; Ctrl-C ends it"))
        return
    if model is None:
        raise UsageError("no model given: moetool profile MODEL --out profile.json")
    from moetool.costing.profile import profile as run

    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
    with tables.progress(f"profiling {model}", 100) as on_progress:
        made = run(
            model,
            config_only=config_only,
            dtype=dtype,
            seconds=seconds,
            threads=threads,
            predictor=predictor,
            peer=peer,
            scratch=Path() if out is None else out.parent,
            on_progress=on_progress,
        )
    if out is not None:
        made.save(out)
    if as_json:
        tables.print_json(made.to_json())
    else:
        tables.print_profile(made)


@app.command()
def report(
    trace: Annotated[Path, typer.Argument(metavar="PATH", help="Folder of a trace, or file of a plan.")],
    out: Annotated[Path, typer.Option("--out", help="The page, one HTML file with everything in it.")],
    policy: Annotated[
        list[str], typer.Option(help="Cache policies beside belady; repeat, or separate by commas. lru,lfu by default.")
    ] = [],  # noqa: B006
    budget: Annotated[
        list[str], typer.Option(help="For experts: bytes or shares; 6.25%,12.5%,25%,50%,75% by default.")
    ] = [],  # noqa: B006
    settings: Annotated[
        list[str],
        typer.Option(
            "--set", help="report.choices, report.uses, report.affinity_layers, ..., and POLICY.OPTION. Repeatable."
        ),
    ] = [],  # noqa: B006
    served: Annotated[
        list[str], typer.Option("--trace", help="For a placement: SERVER=DIR, whose work and traffic it shows.")
    ] = [],  # noqa: B006
    before: Annotated[Path | None, typer.Option(help="For a placement: the plan to show it beside.")] = None,
    overwrite: Overwrite = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers of the page as JSON.")] = False,
    recipe: Recipe = None,
) -> None:
    """Draw a trace as one page: popularity, skew, entropy, affinity, reuse, hit rates, and what they mean. Or a
    placement: who holds what, work and traffic. Or a cache plan: memory against latency.
    """
    from moetool.report.making import POLICIES, measure
    from moetool.report.sample import ReportOptions
    from moetool.trace.reader import Trace

    durable.require_writable(out)
    durable.require_absent(out, overwrite)
    if trace.is_file():
        if policy or budget or settings:
            raise UsageError(f"{trace} is no trace's folder, and --policy, --budget and --set are for one; leave them")
        cli_report.report_plan(trace, out, served, before, as_json)
        return
    if served or before is not None:
        raise UsageError(f"--trace and --before are for the page of a placement plan, expected its file, not {trace}")
    source, options = Trace(trace), parse_settings(settings)
    chosen = parse(ReportOptions, options.pop("report", {}), "report")
    policies = _split(policy) if policy else list(POLICIES)
    _require_policies(policies, options)
    with tables.progress(f"measuring {trace}", 100) as on_progress:
        made = measure(
            source,
            policies=policies,
            budgets=_split(budget) if budget else (),
            policy_options=options,
            options=chosen,
            on_progress=on_progress,
        )
    from moetool.report.findings import caveat, findings
    from moetool.report.page import render

    said = findings(made)
    page = render(made)
    durable.write_text(out, page)
    if as_json:
        tables.print_json({**made.to_json(), "caveat": caveat(made), "findings": [one.to_json() for one in said]})
        return
    print(f"{out}: {source.spec.name}, {tables.count(len(page.encode()), 'B')}")
    if warning := caveat(made):
        print(f"  {warning}")
    for finding in said:
        print(f"  {finding.topic}: {finding.text}")


@bench_app.command("serve")
def bench_serve(
    policy: Annotated[list[str], typer.Option(help="Cache policies; repeat, or separate by commas.")],
    budget: Annotated[list[str], typer.Option(help="For experts: bytes (64MB) or a share of all experts (25%).")],
    model: Annotated[
        str | None, typer.Argument(help="'reference', a folder in Hugging Face format, or a hub name.")
    ] = None,
    shape: Annotated[
        str | None, typer.Option(help="Instead of MODEL a config alone, such as deepseek-v2-lite: random weights.")
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="MoE layers of the shape; all, if not given.")] = None,
    routes: Annotated[Path | None, typer.Option(help="Folder of a trace whose routing the model follows.")] = None,
    beside: Annotated[
        str | None, typer.Option(help="Folder of a packed replica of MODEL, to be served in the same memory.")
    ] = None,
    data: Annotated[
        list[str], typer.Option(help="Prompts of a MODEL that routes by itself: embedded sets, or files.")
    ] = [],  # noqa: B006
    predictor: Annotated[Path | None, typer.Option(help="Folder of a trained predictor.")] = None,
    work: Annotated[Path, typer.Option(help="Where random weights are kept for the next time.")] = Path(
        "moetool-bench"
    ),
    settings: Annotated[
        list[str], typer.Option("--set", help="bench.rounds, bench.requests, ..., and POLICY.OPTION. Repeatable.")
    ] = [],  # noqa: B006
    as_json: Json = False,
    out: Annotated[Path | None, typer.Option("--out", help="The results with their raw values, a JSON file.")] = None,
    recipe: Recipe = None,
) -> None:
    """Time policies and budgets against each other in a live engine, beside their bounds."""
    if out is not None:
        durable.require_writable(out)
    names, options = _split(policy), parse_settings(settings)
    values = options.pop("bench", {})
    _require_policies(names, options)
    if beside is not None:
        from moetool.cli.forms import bench_beside

        refused = {"--shape": shape, "--layers": layers, "--routes": routes, "--predictor": predictor}
        bench_beside(
            model,
            beside,
            data=_split(data),
            policies=names,
            budgets=_split(budget),
            bench=values,
            policy_options=options,
            others=refused,
            as_json=as_json,
            out=out,
        )
        return
    from moetool.bench.results import print_serve_bench
    from moetool.bench.serve import bench_serve as run
    from moetool.bench.stage import BenchOptions, Subject

    subject = Subject(
        model=model,
        shape=shape,
        layers=layers,
        routes=routes,
        data=tuple(_split(data)) if data else (),
        predictor=predictor,
        work=work,
    )
    with tables.progress(f"benching {model or shape}", 100) as on_progress:
        made = run(
            subject,
            policies=names,
            budgets=_split(budget),
            options=parse(BenchOptions, values, "bench"),
            policy_options=options,
            command=shlex.join(["moetool", *sys.argv[1:]]),
            on_progress=on_progress,
        )
    if out is not None:
        durable.write_text(out, json.dumps(made.to_json(), indent=1) + "\n")
    if as_json:
        tables.print_json(made.to_json())
    else:
        print_serve_bench(made)


@reference_app.command("train")
def reference_train(
    data: Annotated[Path, typer.Option(help="Folder of .txt files, one a domain, documents ended by <|endoftext|>.")],
    out: Out,
    recipe: Annotated[
        Path | None,
        typer.Option(help="TOML file: seed, data, model, fit, sources; that of the embedded model if not given."),
    ] = None,
    start: Annotated[
        str | None, typer.Option("--from", help="Continue from this model; 'reference' is the embedded one.")
    ] = None,
    settings: Annotated[
        list[str], typer.Option("--set", help="A value of the recipe, as in --set fit.max_steps=500. Repeatable.")
    ] = [],  # noqa: B006
    resume: Annotated[bool, typer.Option("--resume", help="Go on where a run that was killed had come to.")] = False,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Train a small Mixture-of-Experts model on a folder of text."""
    from moetool.reference.recipe import read_recipe

    chosen = read_recipe(recipe or assets.path("recipes", "reference", "model.toml"), parse_settings(settings))
    durable.require_absent(out, overwrite, "training.json")
    from moetool.reference.train import train as run

    try:
        with tables.stages() as on_progress:
            facts = run(chosen, data, out, start=start, resume=resume, overwrite=overwrite, on_progress=on_progress)
    except KeyboardInterrupt:
        tables.narrate("moetool: stopped; the same command with --resume goes on from the last saved step, if any")
        raise
    if as_json:
        tables.print_json(facts)
    else:
        tables.print_reference(out, facts)


@app.command()
def doctor(as_json: Json = False) -> None:
    """Say what of this machine moetool can use; run it in the folder where models lie."""
    from moetool.doctor import doctor as run

    findings = run()
    if as_json:
        tables.print_json([finding.to_json() for finding in findings])
    else:
        tables.print_lines([(finding.name, finding.value, finding.meaning) for finding in findings])


@app.command()
def models(as_json: Json = False) -> None:
    """List the model families that moetool knows, and what it can do with each."""
    from moetool.models.families import FAMILIES

    rows = [family.to_json() for family in FAMILIES.values()]
    if as_json:
        tables.print_json(rows)
        return
    columns = ["family", "captured", "served", "substitution", "weights", "remarks"]
    yes = {True: "yes", False: "no"}
    table = [
        [r["family"], yes[r["captured"]], r["served"], yes[r["substitution"]], r["weights"], r["remarks"]] for r in rows
    ]
    tables.print_table(f"{len(rows)} families of mixture-of-experts models", columns, table, num_text=len(columns))


@app.command()
def data(as_json: Json = False) -> None:
    """List the prompt sets that --data takes by name: the embedded ones, and public ones on the Hugging Face hub."""
    from moetool.prompts.gather import describe

    rows = describe()
    if as_json:
        tables.print_json(rows)
    else:
        tables.print_prompt_sets(rows)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Where its files go; replaced if they are there.")] = Path("moetool-demo"),
) -> None:
    """The whole pipeline on the embedded model: capture, train, evaluate, plan, serve, compare."""
    from moetool.demo import run

    run(out)


def _require_policies(names: list[str], options: dict[str, Any]) -> None:
    """Raises: UsageError where a setting is no policy's option."""
    if stray := [name for name in options if name not in names or not isinstance(options[name], dict)]:
        raise UsageError(f"--set {stray[0]!r} is for none of {', '.join(names)}; write POLICY.OPTION=VALUE")


def _timeline(path: Path | None, values: Any, **defaults: Any) -> tuple[Any, Any]:
    """The profile, if there is one, and which of its machines a timeline is for."""
    from moetool.costing.costs import CostProfile
    from moetool.costing.pricing import TimelineOptions

    if path is None and values:
        raise UsageError("--set timeline… is of no use without a profile; give one with --profile FILE")
    if isinstance(values, dict):
        values = {**defaults, **values}
    timeline = parse(TimelineOptions, values, "timeline")
    return (CostProfile.load(path) if path is not None else None), timeline


def _split(values: list[str]) -> list[str]:
    """Repeated flags and commas alike make a list; a path with a comma in it stays whole if it exists."""
    parts = [part for value in values for part in ([value] if Path(value).exists() else value.split(",")) if part]
    if not parts:
        raise UsageError(f"{values!r} names nothing; give at least one")
    return parts


def main() -> None:
    """The console script.

    Effects: exits with 0, with the code of the MoetoolError that was raised, or, on a bug, with a traceback.
    """
    try:
        app()
    except MoetoolError as error:
        if os.environ.get("MOETOOL_DEBUG") == "1":
            raise
        _fail(str(error), error.exit_code)
    except OSError as error:
        if error.errno not in _OUTSIDE or os.environ.get("MOETOOL_DEBUG") == "1":
            raise
        _fail(f"{error.strerror}: {error.filename or 'the disk'}; what was there before is unchanged", 1)


def _fail(message: str, code: int) -> None:
    tables.narrate(f"moetool: {' '.join(message.split())}")
    sys.exit(code)


if __name__ == "__main__":
    main()
