"""The command `moetool bench cluster`."""

from pathlib import Path
from typing import Annotated

import typer

from moetool import tables
from moetool.cli.bench_results import command_line, hand_over, results_file
from moetool.cli.flags import settable
from moetool.config import parse, parse_settings
from moetool.errors import UsageError, unknown_name


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
    variant: Annotated[
        list[str],
        typer.Option(
            help="Variants to compare with --mode ep, comma-separated: vanilla, offline, reactive, ... (default: "
            "all). Repeatable."
        ),
    ] = [],
    mode: Annotated[str, typer.Option(help="Cluster mode: edge, or ep for expert parallelism.")] = "edge",
    quick: Annotated[bool, typer.Option("--quick", help="Smoke test: a few short requests.")] = False,
    settings: Annotated[
        list[str], settable("Setting: bench.rounds, bench.gaps_s, bench.links, bench.where=namespaces, ...")
    ] = [],
    out: Annotated[Path | None, typer.Option("--out", help="Output directory for results (JSON) and figures.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Overwrite earlier results.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Compare placements on live edge servers, or on expert-parallel ranks, under Poisson arrivals."""
    from moetool.bench.live_cluster.bench_options import QUICK, ClusterBenchOptions, parse_lines

    values = parse_settings(settings)
    given = values.pop("bench", {})
    if values or not isinstance(given, dict):
        raise UsageError(
            f"--set {next(iter(values), 'bench')!r} is unknown here, expected bench.NAME, as in bench.rounds=5"
        )
    if mode not in _MODES:
        raise unknown_name("--mode", mode, _MODES)
    if stray := {"edge": variant, "ep": planner}[mode]:
        wrong, right = ("--variant", "--planner") if mode == "edge" else ("--planner", "--variant")
        raise UsageError(f"{wrong} {','.join(stray)} does not work with --mode {mode}; use {right}")
    if mode == "ep":
        from moetool.cli.parallel_bench import bench_parallel

        sets, names = ([name for text in texts for name in text.split(",") if name] for texts in (data, variant))
        bench_parallel(
            model, data=sets, lines=names, quick=quick, values=given, out=out, overwrite=overwrite, as_json=as_json
        )
        return
    options = parse(ClusterBenchOptions, {**(QUICK if quick else {}), **given}, "bench")
    lines = parse_lines(planner)
    file = results_file(out, "cluster.json", overwrite)
    from moetool.bench.live_cluster.cluster_figures import save_figures
    from moetool.bench.live_cluster.cluster_results import print_cluster_bench
    from moetool.bench.live_cluster.rounds import bench_cluster

    tasks = [name for text in data for name in text.split(",") if name] or list(_TASKS)
    with tables.progress(f"benchmarking {model}", 100) as on_progress:
        made = bench_cluster(
            model,
            tasks,
            lines,
            options,
            command=command_line(),
            on_progress=on_progress,
        )
    hand_over(made, file, print_cluster_bench, as_json=as_json, draw=save_figures)


_MODES = ("edge", "ep")
_TASKS = ("arithmetic", "ascii_words", "narratives")
"""Prism's first setup has three BIG-bench tasks; these embedded sets are the closest."""
