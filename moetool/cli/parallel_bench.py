"""`moetool bench cluster --mode ep`: DIRECTOR's comparisons on ranks of this machine."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moetool import durable, tables
from moetool.config import parse

QUICK = {"batches": 2, "rounds": 1, "prompts": 6, "seats": 1, "prompt_tokens": 12, "new_tokens": 2, "epochs": 1}
"""Options of a run that only shows that everything works."""


def bench_parallel(
    model: str,
    *,
    values: Mapping[str, Any],
    work: Path,
    out: Path | None,
    as_json: bool,
    quick: bool = False,
) -> None:
    """Measure, print, and write `results.json` and figures into `out`.

    Args:
        values: of `BenchOptions` by name, and `variants`: names of those to run.
        quick: small, to see that it works.

    Raises:
        UsageError: an unknown option or variant, or Ray is not installed.
    """
    from moetool.bench.parallel import BenchOptions
    from moetool.bench.parallel import bench_parallel as run
    from moetool.bench.parallel_results import draw, print_parallel_bench
    from moetool.cluster.launch import Where
    from moetool.cluster.parallel.launching import RayRanks

    given = {**(QUICK if quick else {}), **values}
    only = given.pop("variants", ())
    options = parse(BenchOptions, given, "--set")
    if out is not None:
        durable.require_writable(out / "results.json")
    work.mkdir(parents=True, exist_ok=True)
    launcher = RayRanks(Where(count=options.ranks), [f"rank {n}" for n in range(options.ranks)], threads=1)
    with tables.progress(f"benching {model}", 100) as on_progress:
        bench = run(
            model,
            options,
            launcher,
            work,
            only=[only] if isinstance(only, str) else tuple(only),
            on_progress=on_progress,
        )
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        durable.write_text(out / "results.json", json.dumps(bench.to_json(), indent=1) + "\n")
        for path in draw(bench, out):
            tables.narrate(f"moetool: drew {path}")
    if as_json:
        tables.print_json(bench.to_json())
    else:
        print_parallel_bench(bench)
