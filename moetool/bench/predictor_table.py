"""Train predictors on several traces under several seeds; score them on requests and a task that they have not seen."""

import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from moetool.base import plugins
from moetool.base.errors import UsageError
from moetool.base.tables import numbered
from moetool.bench.bench_result import BenchResult, Row, not_measured, recorded, table
from moetool.bench.experiment_figure import ExperimentResult
from moetool.bench.policy_table import spaced_requests
from moetool.simulation.simulation_results import interval
from moetool.trace.edit import select
from moetool.trace.reader import Trace
from moetool.training.evaluate import Evaluation, evaluate
from moetool.training.fit_options import FitOptions
from moetool.training.predictor import build, load_predictor
from moetool.training.training import FIT, options_for, train

PREDICTORS = ("affinity", "next_use", "expert_map", "path_mlp", "expert_mlp", "fused")
"""Predictors that need no more than experts and weights."""
TRAJECTORY = {"source": "topk", "prompts": "tokens"}
"""Options of `expert_map` on traces without logits or embeddings: a map is the trajectory of a token."""
_FARTHER = 3  # layers ahead, beside one


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictorTableOptions:
    """Options of the bench.

    Attributes:
        seeds: fits of each predictor; each has its own split of requests, initial weights and order.
        tokens: approximate tokens of each trace for training, validation and test, in whole requests evenly spaced over
            all tasks but the last one; and a quarter of as many of the last task.

    Raises:
        UsageError: a number is below 1, or a predictor is unknown or not made of a trace.
    """

    predictors: tuple[str, ...] = PREDICTORS
    seeds: int = 3
    tokens: int = 4000
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    fit: FitOptions = FIT

    def __post_init__(self) -> None:
        if self.seeds < 1 or self.tokens < 1:
            raise UsageError(f"seeds are {self.seeds} and tokens {self.tokens}, expected at least 1")
        if stray := sorted(self.options.keys() - set(self.predictors)):
            raise UsageError(f"options of {stray[0]} are given, expected of one of: {', '.join(self.predictors)}")
        for name in self.predictors:
            if plugins.load("predictor", name).Predictor.made_of != "trace":
                raise UsageError(f"{name} is made from a model, expected predictors that are trained on a trace")


def bench_predictors(
    traces: Sequence[Path],
    options: PredictorTableOptions,
    work: Path,
    on_seed: Callable[[int], object] = lambda number: None,
    file: Path | None = None,
) -> BenchResult:
    """Train predictors on parts of traces, and score them with `moetool.training.evaluate`.

    A row is one predictor under one seed on one trace: `task` is `known` for held-out requests of the tasks that it was
    trained on, and `other` for the trace's last task. `match` is that of the top-k one layer ahead, `farther` three
    layers ahead. A predictor whose columns a trace lacks has a row that says `why`.

    Args:
        work: folder for parts of traces and for predictors; those of an earlier run are not trained again.
        on_seed: called with the number of seeds done, over all traces.
        file: see `BenchResult`.

    Raises:
        UsageError: two traces have one name, or a trace has too few requests.
    """
    if len({path.name for path in traces}) < len(traces):
        raise UsageError("two traces have the same directory name; rename one")
    with recorded("predictors", options, file) as made:
        for number, path in enumerate(traces):
            trace = Trace(path)
            known, other = _parts(trace, options.tokens, work / path.name)
            size = f"{numbered(known.num_tokens, 'token')} of {numbered(len(known.requests), 'request')}"
            made.notes.append(f"{path.name}: {size} to train, validate and test on")
            if other is not None:
                task = other.requests["task"][0].as_py()
                made.notes[-1] += f"; other task: {other.num_tokens:,} tokens of {task}"
            chosen = {name: _options(name, trace, options.options.get(name, {})) for name in options.predictors}
            lacks = {name: build(name, trace.spec, chosen[name]).needs - trace.columns for name in chosen}
            for name, columns in lacks.items():
                if columns:
                    made.add(trace=path.name, predictor=name, why=f"the trace lacks {', '.join(sorted(columns))}")
            for seed in range(options.seeds):
                folders = {
                    name: _trained(name, known, work, chosen[name], options.fit, seed)
                    for name in options.predictors
                    if not lacks[name]
                }
                for score in evaluate(list(folders.values()), known.path, other.path if other else None):
                    if score.baseline is None:
                        made.add(trace=path.name, seed=seed, **_row(score))
                on_seed(number * options.seeds + seed + 1)
    return made


def tables(made: BenchResult) -> Iterator[Any]:
    """A table per trace: the best match on known tasks first."""
    for trace in dict.fromkeys(row["trace"] for row in made.rows if "seed" in row):
        rows = []
        for name in dict.fromkeys(row["predictor"] for row in made.of(trace=trace) if "seed" in row):
            known, other = (made.of(trace=trace, predictor=name, task=task) for task in ("known", "other"))
            rows.append({**known[0], "known": known, "other": other})
        rows.sort(key=lambda row: -interval([one["match"] for one in row["known"]])[0])
        columns: dict[str, Any] = {
            "predictor": ("predictor", ""),
            "known tasks": (lambda row: _mean(row["known"], "match"), ""),
            f"{_FARTHER} layers ahead": (lambda row: _mean(row["known"], "farther"), ""),
            "other task": (lambda row: _mean(row["other"], "match"), ""),
            "parameters": (lambda row: row["parameters"] or None, ","),
            "epochs": (lambda row: _listed(row["known"], "epochs"), ""),
            "stopped by": (lambda row: _listed(row["known"], "stopped_by"), ""),
            "training s": (lambda row: _listed(row["known"], "training_s"), ""),
        }
        seeds = numbered(made.options["seeds"], "seed")
        title = f"{trace}: match of the top-k one layer ahead, mean ± 95 % interval of {seeds}"
        yield table(title, rows, columns)
    yield from not_measured(made, lambda row: f"{row['predictor']} on {row['trace']}")


def figures(made: BenchResult) -> dict[str, ExperimentResult]:
    """The match one layer ahead of every predictor: a figure per trace and task."""
    found = {}
    scored = [row for row in made.rows if "seed" in row]
    for trace, task in dict.fromkeys((row["trace"], row["task"]) for row in scored):
        values: dict[str, list[float]] = {}
        for row in made.of(trace=trace, task=task):
            values.setdefault(row["predictor"], []).append(row["match"])
        found[f"predictors-{trace}-{task}"] = ExperimentResult(
            values=dict(sorted(values.items(), key=lambda one: -sum(one[1]))),
            what="match of the top-k one layer ahead",
            unit="",
            on=f"{trace}, {_TASKS[task]}",
            highest_best=True,
        )
    return found


_TASKS = {"known": "other requests of its tasks", "other": "a task that it was not trained on"}


def _mean(rows: Sequence[Row], name: str) -> str | None:
    values = [row[name] for row in rows if row[name] is not None]
    if not values:
        return None
    mean, half = interval(values)
    return f"{mean:.3f}" + ("" if half is None else f" ± {half:.3f}".replace("0.", "."))


def _listed(rows: Sequence[Row], name: str) -> str | None:
    """Return the values of all seeds; one where they are equal."""
    values = [row[name] for row in rows if row[name] is not None]
    texts = [f"{value:.0f}" if isinstance(value, float) else str(value) for value in values]
    return ", ".join(texts if len(set(texts)) > 1 else texts[:1])


def _parts(trace: Trace, tokens: int, folder: Path) -> tuple[Trace, Trace | None]:
    """Return the part of a trace to train on, and one of its last task if it has several."""
    rows = [row for row in trace.requests.to_pylist() if row["tokens"]]
    sizes = {row["request"]: row["tokens"] for row in rows}
    last = [row["request"] for row in rows if row["task"] == rows[-1]["task"]]
    first = [request for request in sizes if request not in set(last)]
    if not first:
        return _part(trace, folder, spaced_requests(last, sizes, tokens)), None
    return tuple(  # type: ignore[return-value]
        _part(trace, folder, spaced_requests(requests, sizes, count))
        for requests, count in ((first, tokens), (last, max(1, tokens // 4)))
    )


def _part(trace: Trace, folder: Path, requests: Sequence[int]) -> Trace:
    out = folder / f"part-{_digest(trace.sha256, list(requests))}"
    return Trace(out) if out.exists() else select(trace, out, requests)


def _options(name: str, trace: Trace, given: Mapping[str, Any]) -> dict[str, Any]:
    short = name == "expert_map" and not {"logits", "embeddings"} <= trace.columns
    return options_for(name, trace.columns, {**(TRAJECTORY if short else {}), **given})


def _trained(name: str, trace: Trace, work: Path, options: Mapping[str, Any], fit: FitOptions, seed: int) -> Path:
    """Return the folder of a predictor, which is trained unless an earlier run has, by the same code."""
    code = inspect.getsource(plugins.load("predictor", name))
    folder = work / f"{Path(name).name}-{_digest(code, trace.sha256, dict(options), asdict(fit), seed)}"
    if not folder.exists():
        train(name, trace.path, folder, options=options, fit=fit, seed=seed)
    return folder


def _digest(*facts: object) -> str:
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def _row(score: Evaluation) -> Row:
    near = score.overall()
    return {
        "predictor": score.predictor,
        "task": "other" if score.unseen_task else "known",
        "requests": score.num_requests,
        "tokens": score.num_tokens,
        "match": near[1].match,
        "farther": near[_FARTHER].match if _FARTHER in near else None,
        "parameters": score.parameters,
        "training_tokens": score.training_tokens,
        "training_s": score.training_s,
        "epochs": score.epochs,
        "stopped_by": load_predictor(Path(score.path)).card["fit"].get("stopped_by"),
    }
