"""`moetool bench serve MODEL --beside REPLICA`: two forms of a model in the same memory."""

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moetool import durable, tables
from moetool.config import parse
from moetool.errors import UsageError


def bench_beside(
    model: str | None,
    beside: str,
    *,
    data: Sequence[str],
    policies: Sequence[str],
    budgets: Sequence[str],
    bench: Mapping[str, Any],
    policy_options: Mapping[str, Any],
    others: Mapping[str, object],
    as_json: bool,
    out: Path | None,
) -> None:
    """Bench two forms, print the table, and write the raw values.

    Args:
        others: the flags that a bench of two forms does not take, by name.

    Raises:
        UsageError: one of them was given, or model and text were not.
    """
    given = [name for name, value in others.items() if value is not None]
    if given or model is None or not data:
        found = f"{', '.join(given)} too" if given else "no MODEL" if model is None else "no --data"
        raise UsageError(
            f"--beside takes a MODEL and --data and lets both forms route by themselves; found {found}: moetool bench "
            f"serve MODEL --beside {beside} --data chat --policy lru --budget 25%"
        )
    from moetool.bench.forms import bench_forms, print_forms
    from moetool.bench.stage import BenchOptions

    with tables.progress(f"benching {model} beside {beside}", 100) as on_progress:
        made = bench_forms(
            model,
            beside,
            data=data,
            policies=policies,
            budgets=budgets,
            options=parse(BenchOptions, bench, "bench"),
            policy_options=policy_options,
            command=shlex.join(["moetool", *sys.argv[1:]]),
            on_progress=on_progress,
        )
    if out is not None:
        durable.write_text(out, json.dumps(made.to_json(), indent=1) + "\n")
    if as_json:
        tables.print_json(made.to_json())
    else:
        print_forms(made)
