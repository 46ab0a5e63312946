"""Every predictor on the same traces under the same measures: the embedded model, and two published routings.

    OMP_NUM_THREADS=1 python -m pytest tests/bench/test_predictors.py -m '' -s

Each is trained by `moetool train` until the validation loss stops falling, or `BUDGET` is spent, and judged by
`moetool evaluate` on requests that none has seen; those that a trace has not the columns for are named with the reason.
Then the policies that take one replay with it. `MOETOOL_BENCH_WORK=DIR` keeps traces, predictors and pages in DIR and
takes those that are there, so that a run that was stopped goes on. `MOETOOL_BENCH_SEEDS` and `MOETOOL_BENCH_BUDGET` set
the seeds and the budget.
"""

import copy
import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from moetool.base import plugins
from moetool.base.errors import MismatchError
from moetool.capture.run import CaptureOptions, capture
from moetool.costing.costs import CostProfile
from moetool.measuring.profile import ProfileOptions, profile
from moetool.prediction.unseen_requests import unseen_by_all
from moetool.prompts import gather as prompt_sets
from moetool.simulation.simulation_results import interval
from moetool.trace.foreign.importing import import_trace
from moetool.trace.reader import Trace
from moetool.trace.rows import KEEP
from moetool.training.evaluate import Evaluation, evaluate
from moetool.training.fit_options import FitOptions
from moetool.training.match_tables import print_evaluations
from moetool.training.predictor import load_predictor
from moetool.training.training import train
from moetool.tuning.replay import ReplaySetup, replay
from tests.published_routes import DEEPSEEK, QWEN

PROMPTS, NEW_TOKENS, AHEAD = 12, 32, 6
UNSEEN = "code"
SCORED_EVERY = 4  # sequence of those that are scored: so many tokens take minutes
BUDGET = int(os.environ.get("MOETOOL_BENCH_BUDGET", "60"))
"""Most passes over every layer of every token, for every predictor."""
SEEDS = int(os.environ.get("MOETOOL_BENCH_SEEDS", "3"))
COUNTED = ("popularity", "affinity", "activation_matrix", "expert_map", "next_use", "gate_ahead", "resident_forward")
SEEDED = (*COUNTED, "lstm", "single_transformer", "cascade", "path_mlp", "promoe", "fused")
SEED_PROMPTS = 6  # of each set: three times as many fits take as long as one of twice as many
EQUAL: dict[str, tuple[str, dict[str, Any]]] = {
    "promoe, hidden 402": ("promoe", {"hidden": 402}),  # as many parameters as fused
    "expert_mlp, hidden 640 to 64": ("expert_mlp", {"hidden": [640, 320, 160, 80, 64]}),  # as many as path_mlp
}
"""The published predictors that ours are nearest to, at their numbers of parameters."""
ROUTE_OPTIONS: dict[str, dict[str, Any]] = {"expert_map": {"source": "topk", "prompts": "tokens"}}
"""The routes hold no scores over all experts; each of their tokens is one of a prompt, and makes a map."""


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    kept = os.environ.get("MOETOOL_BENCH_WORK")
    folder = Path(kept) if kept else tmp_path_factory.mktemp("predictors")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _once(path: Path, make: Callable[[Path], object]) -> Path:
    if not path.exists():
        make(path)
    return path


def _trained(
    trace: Path,
    out: Path,
    options: Mapping[str, Any],
    names: Sequence[str] = (),
    **fit: Any,
) -> list[Path]:
    """Folders of these predictors, or of all that the trace has the columns for."""
    made = []
    for name in names or plugins.names("predictor"):
        folder = out / name
        if plugins.load("predictor", name).Predictor.made_of != "trace":
            print(f"{name} is left out: it is made of the model itself, which is not here", flush=True)
            continue
        if not folder.exists():
            try:
                train(name, trace, folder, options=options.get(name), fit=FitOptions(max_epochs=BUDGET, **fit))
            except MismatchError as error:
                print(f"{name} is left out: {str(error).split(';')[0].replace(f'{trace}', 'the trace')}", flush=True)
                continue
        made.append(folder)
    return made


def _judged(
    title: str, predictors: Sequence[Path], trace: Path, unseen: Path | None, costs: CostProfile | None
) -> dict[tuple[str, bool], Evaluation]:
    rows = evaluate(predictors, trace, unseen, costs)
    print(f"\n{title}")
    print_evaluations(rows)
    return {(row.predictor, row.unseen_task): row for row in rows}


def embedded(here: Path, names: Sequence[str] = (), prompts: int = PROMPTS) -> tuple[Path, Path, list[Path]]:
    """A trace of six of the embedded prompt sets, one of the seventh, and (these) predictors made of the first."""
    options = CaptureOptions(
        max_new_tokens=NEW_TOKENS, batch_size=8, keep=KEEP, ahead=AHEAD, threads=1, dtype="float32"
    )

    def captured(*names: str) -> Callable[[Path], object]:
        texts = list(prompt_sets.load(names, max_prompts=prompts))
        return lambda out: capture("reference", texts, out, options)

    trace = _once(here / "trace", captured(*(name for name in prompt_sets.names() if name != UNSEEN)))
    unseen = _once(here / "unseen", captured(UNSEEN))
    predictors = _trained(trace, here / "predictors", {}, names)
    return trace, unseen, predictors


def test_embedded_model(work: Path) -> None:
    """Six of the embedded prompt sets to train and to score, the seventh as a task that is not trained on."""
    here = work / "reference"
    trace, unseen, predictors = embedded(here)
    predictors.append(_once(here / "predictors" / "awq_replica", _replica))
    costs = _once(
        here / "profile.json",
        lambda out: profile("reference", ProfileOptions(dtype="float32", seconds=10, threads=1)).save(out),
    )
    title = f"the embedded model; {UNSEEN} is the unseen task"
    found = _judged(title, predictors, trace, unseen, CostProfile.load(costs))
    assert {name for name, _ in found} >= set(plugins.names("predictor"))
    for name in ("cascade", "single_transformer"):
        told = found[name, False].prompt_prediction
        assert told is not None and told.load_error < found["popularity", False].prompt_prediction.load_error  # type: ignore[union-attr]


def _print_seeds(found: Mapping[str, Sequence[Evaluation]], others: Mapping[str, Sequence[Evaluation]]) -> None:
    """Means over the seeds so far, on known tasks and on the unseen one, by the phases that were scored."""

    def shown(values: Sequence[float]) -> str:
        mean, half = interval(values)
        return f"{mean:.3f}" + (f" ± {half:.3f}" if half is not None else "")

    def matches(rows: Sequence[Evaluation]) -> list[str]:
        phases = [phase for phase in ("prefill", "decode") if 1 in rows[0].overall(phase)]
        near = [shown([row.overall(phase)[1].match for row in rows]) for phase in phases]
        farther = [n for n in (3, 6) if n in rows[0].overall()]
        return near + [f"{n} ahead {shown([row.overall()[n].match for row in rows])}" for n in farther]

    print("| predictor | known tasks | unseen task | exact | in 2k | parameters | epochs |")
    for label, rows in found.items():
        unseen = " / ".join(matches(others[label])) if others.get(label) else "-"
        exact = shown([row.overall()[1].exact for row in rows])
        twice = shown([row.overall()[1].recall[-1] for row in rows])
        epochs = ", ".join(str(row.epochs) for row in rows)
        told = f"{' / '.join(matches(rows))} | {unseen} | {exact} | {twice} | {rows[0].parameters:,} | {epochs}"
        print(f"| {label} | {told} |", flush=True)


def _over_seeds(
    here: Path,
    wanted: Mapping[str, tuple[str, Mapping[str, Any]]],
    learned: Path,
    scored: Path,
    unseen: Path | None,
    **fit: Any,
) -> dict[str, list[Evaluation]]:
    """Evaluations of predictors by label, trained and scored under each seed: another split, other weights and order.

    `awq_replica` is made on the prompts of `_replica`, drawn by the seed.
    """
    found: dict[str, list[Evaluation]] = {}
    others: dict[str, list[Evaluation]] = {}
    for seed in range(SEEDS):
        paths = {}
        for label, (name, options) in wanted.items():
            folder = here / f"seed-{seed}" / label.partition(",")[0] / ("equal" if label in EQUAL else "own")
            if name == "awq_replica":
                folder.parent.mkdir(parents=True, exist_ok=True)
                _once(folder, partial(_replica, seed=seed))
            elif not folder.exists():
                train(name, learned, folder, options=options, fit=FitOptions(max_epochs=BUDGET, **fit), seed=seed)
            paths[label] = folder
            print(f"{label}, seed {seed}: {load_predictor(folder).card.get('fit', {}).get('stopped_by')}", flush=True)
        judged = evaluate(list(paths.values()), scored, unseen)
        rows = {(row.path, row.unseen_task): row for row in judged if row.baseline is None}
        for label, path in paths.items():
            found.setdefault(label, []).append(rows[str(path), False])
            if unseen is not None:
                others.setdefault(label, []).append(rows[str(path), True])
        _print_seeds(found, others)
    return found


def test_embedded_model_over_seeds(work: Path) -> None:
    """The best published predictors and ours, on other splits, first weights and orders: mean and 95 % interval."""
    here = work / "seeds"
    trace, unseen, _ = embedded(here, ("popularity",), SEED_PROMPTS)
    wanted: dict[str, tuple[str, dict[str, Any]]] = {**{name: (name, {}) for name in SEEDED}, **EQUAL}
    found = _over_seeds(here, wanted, trace, trace, unseen)
    best = {label: sum(row.overall()[1].match for row in rows) / len(rows) for label, rows in found.items()}
    assert best["affinity"] < min(best[name] for name in (*EQUAL, "path_mlp", "promoe", "fused"))


def test_replica_over_seeds(work: Path) -> None:
    """Three 4-bit replicas, their scales chosen on the same prompts in another order."""
    here = work / "seeds"
    trace, unseen, _ = embedded(here, ("popularity",), SEED_PROMPTS)
    (rows,) = _over_seeds(here, {"awq_replica": ("awq_replica", {})}, trace, trace, unseen).values()
    assert min(row.overall()[1].match for row in rows) > 0.9


BUDGETS = (0.25, 0.5)
POLICIES: tuple[tuple[str, str | None, dict[str, Any]], ...] = (
    ("lru", None, {}),
    ("lfu", None, {}),
    ("mixtral_offloading", None, {}),
    ("moe_infinity", None, {}),
    ("smoe", None, {"alpha": 0.0}),
    ("smoe", None, {"alpha": 0.0, "predict_from": "resident"}),
    *(("duoserve", name, {"slots_per_layer": 16}) for name in ("affinity", "expert_mlp", "next_use", "gate_ahead")),
    *(("duoserve", name, {"slots_per_layer": 16}) for name in ("promoe", "fused", "resident_forward")),
    *(("promoe", name, {}) for name in ("affinity", "gate_ahead", "promoe", "fused")),
    ("finemoe", "expert_map", {}),
    ("foresight", "next_use", {}),
)
"""Policies, the predictor that they take, and options: SMoE without substitution, so that all compute the same."""


def test_policies_with_predictors(work: Path) -> None:
    """Replay of requests that none of the predictors has seen: hits and bytes of decoding, which no clock moves."""
    here = work / "reference"
    trace, _, paths = embedded(here)
    predictors = {path.name: load_predictor(path) for path in paths}
    requests = frozenset(unseen_by_all([predictor.card for predictor in predictors.values()], Trace(trace)).part)
    spec = Trace(trace).spec
    budgets = [round(share * spec.total_experts) * spec.slot_bytes for share in BUDGETS]
    print(
        f"\ndecoding {len(requests)} requests, with {' and '.join(f'{share:.0%}' for share in BUDGETS)} of the experts"
    )
    for policy, name, options in POLICIES:
        predictor = None if name is None else copy.deepcopy(predictors[name])
        rows = replay(
            Trace(trace),
            [policy],
            budgets,
            ReplaySetup(predictor=predictor, requests=requests, options={policy: options}),
        )
        told = " / ".join(
            f"{row.slots} slots: {row.decode.hit_rate:.3f} hits, {row.bytes_per_decode_token / 1e6:.2f} MB, "
            f"{row.decode.wasted / max(1, row.decode.loads):.2f} of the loads wasted"
            for row in rows
        )
        print(f"{policy} {name or '-'} {options or ''}: {told}", flush=True)
        assert all(0 <= row.decode.hit_rate <= 1 for row in rows)


def _replica(out: Path, seed: int = 0) -> None:
    """Its scales are chosen on prompts that the traces do not hold."""
    known = [name for name in prompt_sets.names() if name != UNSEEN]
    others = [p for name in known for p in prompt_sets.load([name])[PROMPTS:]]
    text = out.parent / "others.jsonl"
    text.write_text("".join(json.dumps({"id": p.prompt_id, "prompt": p.text, "task": p.task}) + "\n" for p in others))
    plugins.load("predictor", "awq_replica").make("reference", [str(text)], out, {}, seed=seed)


@pytest.mark.skipif(not DEEPSEEK.is_dir(), reason="shared/data/routes is not here")
def test_deepseek_routes(work: Path) -> None:
    """Every other sequence of intent and law to train; of the others, and of translation, every fourth to score."""
    here = work / "deepseek"
    learned, scored, unseen = _deepseek(here)
    costs = _once(
        here / "profile.json",
        lambda out: profile(
            "deepseek-v2-lite", ProfileOptions(config_only=True, dtype="bfloat16", seconds=20, threads=1, scratch=here)
        ).save(out),
    )
    predictors = _trained(learned, here / "predictors", ROUTE_OPTIONS, held_out=0.05)
    title = "DeepSeek-V2-Lite; translation is the unseen task"
    found = _judged(title, predictors, scored, unseen, CostProfile.load(costs))
    for name, inside, outside in (("popularity", 0.19, 0.12), ("affinity", 0.57, 0.33)):
        assert found[name, False].overall()[1].match == pytest.approx(inside, abs=0.04)
        assert found[name, True].overall()[1].match == pytest.approx(outside, abs=0.04)


def _deepseek(here: Path) -> tuple[Path, Path, Path]:
    """Traces to train on, to score, and of the task that is not trained on."""
    known, every = ("intent", "law"), SCORED_EVERY
    return (
        _once(here / "train", lambda out: _import(out, known, slice(0, None, 2))),
        _once(here / "score", lambda out: _import(out, known, slice(1, None, 2 * every))),
        _once(here / "unseen", lambda out: _import(out, ("translation",), slice(0, None, every))),
    )


def _import(out: Path, tasks: Sequence[str], chosen: slice) -> None:
    """Some sequences of some tasks as a trace, each a prompt."""
    files = []
    for task in tasks:
        table = pq.read_table(DEEPSEEK / f"{task}.parquet")
        numbers = list(dict.fromkeys(table["sequence"].to_pylist()))[chosen]
        files.append(out.parent / f"{out.name}-{task}.parquet")
        out.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table.filter(pc.is_in(table["sequence"], pa.array(numbers, pa.int32()))), files[-1])
    import_trace(files, "topk_parquet", out, tokens_as="prefill")
    for file in files:
        file.unlink()


@pytest.mark.skipif(not QWEN.is_file(), reason="shared/data/routes is not here")
def test_qwen_conversation(work: Path) -> None:
    """One conversation, split in time."""
    here = work / "qwen"
    trace = _once(here / "trace", lambda out: import_trace([QWEN], "route_csv", out))
    predictors = _trained(trace, here / "predictors", ROUTE_OPTIONS)
    found = _judged("Qwen3-30B-A3B, one conversation split in time", predictors, trace, None, None)
    assert all(row.requests == "end" for row in found.values())
    assert Trace(trace).requests.num_rows == 1
