"""`moetool bench serve MODEL --beside REPLICA`: two forms of a model in the same memory."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moetool import tables
from moetool.cli.bench_results import command_line, hand_over
from moetool.config import parse
from moetool.errors import UsageError


def bench_beside(
    model: str | None,
    beside: str,
    *,
    shape: str | None,
    layers: int | None,
    routes: Path | None,
    data: Sequence[str],
    work: Path,
    predictor: Path | None,
    policies: Sequence[str],
    budgets: Sequence[str],
    bench: Mapping[str, Any],
    policy_options: Mapping[str, Any],
    as_json: bool,
    out: Path | None,
) -> None:
    """Bench two forms, print the table, and write the raw values.

    Raises:
        UsageError: flags that do not go together.
    """
    _require_together(model, beside, {"--layers": layers, "--routes": routes, "--predictor": predictor}, shape, data)
    from moetool.bench.forms import bench_forms, print_forms
    from moetool.bench.stage import BenchOptions, Subject

    subject = Subject(model=model, shape=shape, layers=layers, routes=routes, data=tuple(data), work=work)
    with tables.progress(f"benching {model or shape} beside {beside}", 100) as on_progress:
        made = bench_forms(
            subject,
            beside,
            policies=policies,
            budgets=budgets,
            options=parse(BenchOptions, bench, "bench"),
            policy_options=policy_options,
            command=command_line(),
            on_progress=on_progress,
        )
    hand_over(made, out, print_forms, as_json=as_json)


def _require_together(
    model: str | None, beside: str, others: Mapping[str, object], shape: str | None, data: Sequence[str]
) -> None:
    """Raises: UsageError unless it is a model with text, or a shape with routes and its own rounded form."""
    if others["--predictor"] is not None:
        raise UsageError("--beside compares two forms, and a predictor belongs to one: leave out --predictor")
    if shape is not None:
        found = "a MODEL too" if model is not None else "--data" if data else f"--beside {beside}"
        if model is not None or data or beside != "int4":
            raise UsageError(
                f"a --shape, whose weights are random, is benched --beside int4, which is made of it; found {found}: "
                f"moetool bench serve --shape {shape} --layers 2 --routes DIR --beside int4 --policy lru --budget 25%"
            )
        return
    given = [name for name, value in others.items() if value is not None]
    if given or model is None or not data:
        found = f"{', '.join(given)} too" if given else "no MODEL" if model is None else "no --data"
        raise UsageError(
            f"--beside takes a MODEL and --data and lets both forms route by themselves; found {found}: moetool bench "
            f"serve MODEL --beside {beside} --data chat --policy lru --budget 25%"
        )
