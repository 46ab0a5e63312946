"""The commands `moetool bench`: measure, write results and figures, and print them."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moetool.base import durable, plugins, tables
from moetool.base.config import parse, parse_bytes, parse_settings
from moetool.base.errors import UsageError, unknown_name
from moetool.cli.flags import Jobs, Json, Model, Overwrite, PredictorDir, Recipe, listed, require_policies, settable

if TYPE_CHECKING:
    from moetool.bench.bench_result import BenchResult

Results = Annotated[
    Path | None, typer.Option("--out", help="Output directory for results (JSON) and figures, or a .json file.")
]
Traces = Annotated[list[Path], typer.Option("--trace", help="Trace directory. Repeatable.")]
_OWN = ".moetool-paper"
"""File that marks a directory of `--work`."""


def _file(out: Path | None, name: str, overwrite: bool) -> Path | None:
    """Return the path of the results. Raises: UsageError before measuring if it cannot be written."""
    if out is None:
        return None
    file = out if out.suffix == ".json" else out / f"{name}.json"
    durable.require_new_file(file, overwrite)
    return file


def _hand_over(made: "BenchResult", file: Path | None, as_json: bool) -> None:
    """Draw figures beside the file, if there is one, and print tables or JSON."""
    from moetool.bench.bench_result import draw, show

    if file is not None:
        tables.narrate(f"moetool: {', '.join(map(str, (file, *draw(made, file.parent))))}")
    if as_json:
        tables.print_json(made.to_json())
    else:
        show(made)


def show(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Results of a bench (JSON).")],
    out: Annotated[Path | None, typer.Option("--out", help="Output directory for the figures.")] = None,
) -> None:
    """Print the tables of earlier results, and draw their figures."""
    from moetool.bench.bench_result import draw, read_result
    from moetool.bench.bench_result import show as show_result

    made = read_result(file)
    show_result(made)
    if out is not None:
        tables.narrate(f"moetool: {', '.join(map(str, draw(made, out))) or 'this bench has no figures'}")


def serve(
    policy: Annotated[list[str], typer.Option(help="Cache policies, comma-separated or repeated.")],
    budget: Annotated[
        list[str], typer.Option(help="Expert memory: bytes, e.g. 64MB, or a share of all experts, e.g. 25%.")
    ],
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="'reference', a Hugging Face directory or a hub name.")
    ] = None,
    shape: Annotated[
        str | None, typer.Option(help="Shape of random weights to use instead of MODEL, e.g. deepseek-v2-lite.")
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="MoE layers of the shape (default: all).")] = None,
    routes: Annotated[Path | None, typer.Option(help="Trace directory whose routing the model follows.")] = None,
    data: Annotated[
        list[str], typer.Option(help="Prompts for a MODEL with its own routing: embedded sets or files. Repeatable.")
    ] = [],
    predictor: PredictorDir = None,
    work: Annotated[Path, typer.Option(help="Directory that keeps random weights for the next run.")] = Path(
        "moetool-bench"
    ),
    settings: Annotated[
        list[str],
        settable("Setting of the bench or option of a policy: bench.rounds, bench.requests, ..., POLICY.OPTION."),
    ] = [],
    overwrite: Overwrite = False,
    as_json: Json = False,
    out: Results = None,
    recipe: Recipe = None,
) -> None:
    """Time cache policies and memory sizes in a live engine, with their bounds."""
    file = _file(out, "serve", overwrite)
    names, options = listed(policy), parse_settings(settings)
    values = options.pop("bench", {})
    require_policies(names, options)
    texts = tuple(listed(data)) if data else ()
    from moetool.bench.serve import bench_serve
    from moetool.bench.serving_setup import BenchModel, ServingBenchOptions

    subject = BenchModel(
        model=model, shape=shape, layers=layers, routes=routes, data=texts, predictor=predictor, work=work
    )
    with tables.progress(f"benchmarking {model or shape}", 100) as on_progress:
        made = bench_serve(
            subject,
            policies=names,
            budgets=listed(budget),
            options=parse(ServingBenchOptions, values, "bench"),
            policy_options=options,
            on_progress=on_progress,
            file=file,
        )
    _hand_over(made, file, as_json)


def policies(
    trace: Traces,
    budget: Annotated[
        list[str], typer.Option(help="Expert memory as shares of all experts, comma-separated or repeated.")
    ] = ["12.5%,25%,50%"],
    tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of each trace that count, in whole requests; as many run before them.")
    ] = 2000,
    start: Annotated[
        list[str],
        typer.Option(
            help="Requests before the tokens that count: none (cold), of the same task (task) or of other tasks "
            "(others); comma-separated."
        ),
    ] = ["cold,task,others"],
    task: Annotated[str | None, typer.Option(help="Task that counts (default: the last of each trace).")] = None,
    jobs: Jobs = 0,
    as_json: Json = False,
    out: Results = None,
    overwrite: Overwrite = False,
) -> None:
    """Replay every policy that needs no training, cold and warm, with Belady's bound."""
    from moetool.bench.policy_table import PolicyTableOptions, bench_policies

    file, whole = _file(out, "policies", overwrite), 10**9
    shares = tuple(parse_bytes(text, whole) / whole for text in listed(budget))
    options = PolicyTableOptions(shares=shares, tokens=tokens, starts=tuple(listed(start)), task=task, jobs=jobs)
    with tables.progress("traces", len(trace)) as passed:
        made = bench_policies(trace, options, passed, file)
    _hand_over(made, file, as_json)


def predictors(
    trace: Traces,
    predictor: Annotated[
        list[str],
        typer.Option(help="Predictors, comma-separated or repeated (default: those that routes suffice for)."),
    ] = [],
    tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of each trace to train, validate and test on, in whole requests.")
    ] = 4000,
    seeds: Annotated[int, typer.Option(min=1, help="Fits of each predictor, each with its own held-out requests.")] = 3,
    settings: Annotated[
        list[str], settable("Option of the fits or of one predictor: fit.max_epochs, expert_mlp.hidden, ...")
    ] = [],
    work: Annotated[
        Path | None,
        typer.Option(help="Directory that keeps predictors, so that a killed run continues (default: temporary)."),
    ] = None,
    as_json: Json = False,
    out: Results = None,
    overwrite: Overwrite = False,
) -> None:
    """Train predictors under several seeds, and score them on held-out requests and another task."""
    from moetool.bench.predictor_table import PREDICTORS, PredictorTableOptions, bench_predictors
    from moetool.training.fit_options import FitOptions

    file, values = _file(out, "predictors", overwrite), parse_settings(settings)
    for name in listed(predictor) if predictor else ():
        plugins.allow("predictor", name)
    options = PredictorTableOptions(
        fit=parse(FitOptions, values.pop("fit", {}), "fit"),
        predictors=tuple(listed(predictor)) if predictor else PREDICTORS,
        seeds=seeds,
        tokens=tokens,
        options=values,
    )
    if work is not None:
        _require_own(work)
    with tempfile.TemporaryDirectory() as scratch, tables.progress("seeds", len(trace) * seeds) as passed:
        made = bench_predictors(trace, options, Path(scratch) if work is None else work, passed, file)
    _hand_over(made, file, as_json)


def rivals(
    model: Model,
    gguf: Annotated[Path | None, typer.Option(help="GGUF file of the same weights, for llama.cpp.")] = None,
    llama_server: Annotated[Path | None, typer.Option(help="Path of llama-server (default: found on PATH).")] = None,
    engine: Annotated[list[str], typer.Option(help="Engines, comma-separated or repeated (default: all).")] = [],
    settings: Annotated[
        list[str], settable("Setting: prompt_tokens, new_tokens, rounds, shares, threads, dtype, alternate.")
    ] = [],
    as_json: Json = False,
    out: Results = None,
    overwrite: Overwrite = False,
) -> None:
    """Compare moetool with llama.cpp and transformers, in memory and under memory limits.

    Exit code 1 means that no engine was measured.
    """
    from moetool.bench.rivals import ENGINES, RivalOptions, bench_rivals

    file = _file(out, "rivals", overwrite)
    engines = listed(engine) if engine else list(ENGINES)
    for name in engines:
        if name not in ENGINES:
            raise unknown_name("engine", name, ENGINES)
    made = bench_rivals(
        model,
        gguf=gguf,
        llama_server=None if llama_server is None else str(llama_server),
        engines=engines,
        options=parse(RivalOptions, parse_settings(settings), "rivals"),
        file=file,
    )
    _hand_over(made, file, as_json)
    if all("why" in row for row in made.rows):
        raise typer.Exit(1)


def gpu(
    routes: Annotated[Path, typer.Option(help="Directory with one trace per shape, named after the shape.")],
    out: Annotated[
        Path,
        typer.Option("--out", help="Output directory for gpu.json, or a .json file, written anew after each cell."),
    ],
    shape: Annotated[
        str, typer.Option(help="Model shapes with random weights, comma-separated.")
    ] = "deepseek-v2-lite,qwen3-30b-a3b",
    device: Annotated[str, typer.Option(help="Device: cuda, or cpu for a dry run.")] = "cuda",
    settings: Annotated[
        list[str], settable("Setting: layers, shares, policies, new_tokens, limit_s, plain, io_threads.")
    ] = [],
    as_json: Json = False,
    overwrite: Overwrite = False,
) -> None:
    """Time cache policies on a GPU with published routes, with the bound of its host link."""
    from moetool.bench.gpu import GpuBenchOptions, bench_gpu

    file = _file(out, "gpu", overwrite)
    options = parse(GpuBenchOptions, parse_settings(settings), "gpu")
    assert file is not None
    made = bench_gpu(listed([shape]), routes, device=device, options=options, work=file.parent / "work", file=file)
    _hand_over(made, file, as_json)


def cluster(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="'reference', a Hugging Face directory or a hub name.")],
    data: Annotated[
        list[str],
        typer.Option(help="Prompt sets or files, one per server (default: arithmetic, ascii_words, narratives)."),
    ] = [],
    planner: Annotated[
        list[str],
        typer.Option(
            help="Planners to compare, comma-separated, or the single-server baselines alone and redirected (default: "
            "Prism's). Repeatable."
        ),
    ] = [],
    quick: Annotated[bool, typer.Option("--quick", help="Smoke test: a few short requests.")] = False,
    settings: Annotated[
        list[str], settable("Setting: bench.rounds, bench.gap_s, bench.link, bench.where=namespaces, ...")
    ] = [],
    out: Results = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Compare placements on live edge servers under Poisson arrivals."""
    values = parse_settings(settings)
    given = values.pop("bench", {})
    if values or not isinstance(given, dict):
        raise UsageError(
            f"--set {next(iter(values), 'bench')!r} is unknown here, expected bench.NAME, as in bench.rounds=5"
        )
    file = _file(out, "cluster", overwrite)
    sets = listed(data) if data else []
    from moetool.bench.live_cluster.bench_options import QUICK, TASKS, ClusterBenchOptions, parse_lines
    from moetool.bench.live_cluster.rounds import bench_cluster

    options = parse(ClusterBenchOptions, {**(QUICK if quick else {}), **given}, "bench")
    lines = parse_lines(planner)
    with tables.progress(f"benchmarking {model}", 100) as on_progress:
        made = bench_cluster(model, sets or TASKS, lines, options, on_progress=on_progress, file=file)
    _hand_over(made, file, as_json)


def paper(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME", help="Paper: prism, director, duoserve, finemoe, smoe or all, or your own recipe (.toml)."
        ),
    ] = None,
    only: Annotated[list[str], typer.Option(help='Table or figure, e.g. "Figure 8" (default: all). Repeatable.')] = [],
    quick: Annotated[
        bool, typer.Option("--quick", help="Smoke test: tiny sizes, about a minute, most verdicts undecided.")
    ] = False,
    trace: Annotated[
        list[str], typer.Option(help="NAME=DIR: trace to use instead of the embedded model's. Repeatable.")
    ] = [],
    out: Results = None,
    work: Annotated[
        Path | None,
        typer.Option(help="Directory that keeps traces and predictors for later runs (default: temporary)."),
    ] = None,
    jobs: Annotated[
        int, typer.Option(min=1, help="Papers (and rates of --links) to run in parallel, one core each.")
    ] = 1,
    links: Annotated[
        list[float],
        typer.Option(help="Speed of all links relative to the machine's, e.g. 0.5, to judge claims again. Repeatable."),
    ] = [],
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Re-run the experiments of a paper, or of all, at this machine's scale and judge each claim."""
    from moetool.bench.paper.claims import names
    from moetool.bench.paper.paper_run import PaperOptions, run_papers
    from moetool.placement.planning import open_traces

    if name is None:
        raise UsageError(f"no paper named, expected one of: {', '.join(names())}, all; run: moetool bench paper NAME")
    file = _file(out, "verdicts", overwrite)
    options = PaperOptions(names=(name,), only=tuple(only), quick=quick, links=tuple(links), jobs=jobs)
    given = {server: one.path for server, one in open_traces(trace).items()}
    if work is not None:
        _require_own(work)
    _hand_over(run_papers(options, given, work, file), file, as_json)


def _require_own(work: Path) -> None:
    """Use a folder for traces and predictors: a new or empty one, or one of an earlier run."""
    if work.exists() and (not work.is_dir() or (any(work.iterdir()) and not (work / _OWN).exists())):
        raise UsageError(f"{work} is not empty and not from a bench; name a new directory, or leave --work out")
    work.mkdir(parents=True, exist_ok=True)
    (work / _OWN).touch()
