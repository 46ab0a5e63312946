"""`moetool bench cluster --mode ep`: DIRECTOR's comparisons on ranks of this machine."""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moetool import tables
from moetool.cli.bench_results import hand_over, results_file
from moetool.config import parse
from moetool.errors import UsageError


def bench_parallel(
    model: str,
    *,
    data: Sequence[str] = (),
    lines: Sequence[str] = (),
    quick: bool = False,
    values: Mapping[str, Any],
    out: Path | None = None,
    overwrite: bool = False,
    as_json: bool = False,
) -> None:
    """Measure, print, and write results and figures into `out`.

    Args:
        data: prompt sets (default: all embedded ones).
        lines: names of `moetool.bench.expert_parallelism.variants` (default: all).
        quick: smoke test with small sizes.
        values: options of `RankBenchOptions` by name, and `work`: a folder that keeps the trace and the predictors.

    Raises:
        UsageError: an unknown option or variant.
    """
    from moetool.bench.expert_parallelism import QUICK, RankBenchOptions
    from moetool.bench.expert_parallelism import bench_parallel as run
    from moetool.bench.expert_parallelism_results import draw, print_parallel_bench
    from moetool.cluster.launch import Where
    from moetool.cluster.parallel.rank_launch import RankProcesses

    given = {**(QUICK if quick else {}), **values, **({"data": list(data)} if data else {})}
    work = given.pop("work", None)
    options = parse(RankBenchOptions, given, "bench")
    file = results_file(out, "cluster-ep.json", overwrite)
    launcher = RankProcesses(Where(count=options.ranks), [f"rank {n}" for n in range(options.ranks)], threads=1)
    with tempfile.TemporaryDirectory() as scratch, tables.progress(f"benchmarking {model}", 100) as on_progress:
        folder = Path(scratch if work is None else str(work))
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"cannot make the directory {folder}: {error.strerror}") from None
        bench = run(model, options, launcher, folder, only=lines, on_progress=on_progress)
    hand_over(bench, file, print_parallel_bench, as_json=as_json, draw=draw)
