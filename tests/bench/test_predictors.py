"""Every predictor on the same traces under the same measures: the embedded model, and two published routings.

    OMP_NUM_THREADS=1 python -m pytest tests/bench/test_predictors.py -m '' -s

Each is trained by `moetool train` with the epochs that `EPOCHS` gives, and judged by `moetool evaluate`; those that a
trace has not the columns for are named with the reason. `MOETOOL_BENCH_WORK=DIR` keeps traces, predictors and pages in
DIR and takes those that are there, so that a run that was stopped goes on.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from moetool import plugins
from moetool.capture.run import CaptureOptions, capture
from moetool.costing.costs import CostProfile
from moetool.costing.profile import profile
from moetool.errors import MismatchError
from moetool.evaluation.evaluate import Evaluation, evaluate
from moetool.evaluation.page import write_page
from moetool.evaluation.tables import print_evaluations
from moetool.learning.training import train
from moetool.prompts import gather as prompt_sets
from moetool.trace.importing import import_trace
from moetool.trace.reader import KEEP, Trace

SHARED = Path(os.environ.get("MOETOOL_SHARED", Path(__file__).parents[2].parent / "shared"))
DEEPSEEK = SHARED / "data" / "routes" / "deepseek_v2_lite"
QWEN = SHARED / "data" / "routes" / "bigmoeonedge" / "qwen3_30b_a3b.route.csv"

PROMPTS, NEW_TOKENS, AHEAD = 12, 32, 6
UNSEEN = "code"
SCORED_EVERY = 4  # sequence of those that are scored: so many tokens take minutes
EPOCHS = {"expert_mlp": 10, "cascade": 30, "single_transformer": 30, "lstm": 30}
ROUTE_EPOCHS = {"expert_mlp": 8, "next_use": 10}
OTHERS = 20
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


def _trained(trace: Path, out: Path, epochs: Mapping[str, int], options: Mapping[str, Any], **fit: Any) -> list[Path]:
    """Folders of all predictors that the trace has the columns for."""
    made = []
    for name in plugins.names("predictor"):
        folder = out / name
        if not folder.exists():
            most = epochs.get(name, OTHERS)
            try:
                train(name, trace, folder, options=options.get(name), max_epochs=most, **fit)
            except MismatchError as error:
                print(f"{name} is left out: {str(error).split(';')[0].replace(f'{trace}', 'the trace')}", flush=True)
                continue
        made.append(folder)
    return made


def _judged(
    title: str, work: Path, predictors: Sequence[Path], trace: Path, unseen: Path | None, costs: CostProfile | None
) -> dict[tuple[str, bool], Evaluation]:
    rows = evaluate(predictors, trace, unseen, costs)
    print(f"\n{title}")
    print_evaluations(rows)
    write_page(work / "report.html", rows)
    return {(row.predictor, row.unseen_task): row for row in rows}


def test_embedded_model(work: Path) -> None:
    """Six of the embedded prompt sets to train and to score, the seventh as a task that is not trained on."""
    here = work / "reference"
    options = CaptureOptions(max_new_tokens=NEW_TOKENS, batch_size=8, keep=KEEP, ahead=AHEAD, threads=1)

    def captured(*names: str) -> Callable[[Path], object]:
        texts = list(prompt_sets.load(names, max_prompts=PROMPTS))
        return lambda out: capture("reference", texts, out, options)

    trace = _once(here / "trace", captured(*(name for name in prompt_sets.names() if name != UNSEEN)))
    unseen = _once(here / "unseen", captured(UNSEEN))
    costs = _once(
        here / "profile.json", lambda out: profile("reference", dtype="float32", seconds=10, threads=1).save(out)
    )
    predictors = _trained(trace, here / "predictors", EPOCHS, {})
    predictors.append(_once(here / "predictors" / "awq_replica", _replica))
    title = f"the embedded model; {UNSEEN} is the unseen task"
    found = _judged(title, here, predictors, trace, unseen, CostProfile.load(costs))
    assert {name for name, _ in found} >= set(plugins.names("predictor"))
    for name in ("cascade", "single_transformer"):
        told = found[name, False].foretold
        assert told is not None and told.load_error < found["popularity", False].foretold.load_error  # type: ignore[union-attr]


def _replica(out: Path) -> None:
    """Its scales are chosen on prompts that the traces do not hold."""
    known = [name for name in prompt_sets.names() if name != UNSEEN]
    others = [p for name in known for p in prompt_sets.load([name])[PROMPTS:]]
    text = out.parent / "others.jsonl"
    text.write_text("".join(json.dumps({"id": p.prompt_id, "prompt": p.text, "task": p.task}) + "\n" for p in others))
    plugins.load("predictor", "awq_replica").make("reference", [str(text)], out, {})


@pytest.mark.skipif(not DEEPSEEK.is_dir(), reason="shared/data/routes is not here")
def test_deepseek_routes(work: Path) -> None:
    """Every other sequence of intent and law to train; of the others, and of translation, every fourth to score."""
    here = work / "deepseek"
    known, every = ("intent", "law"), SCORED_EVERY
    learned = _once(here / "train", lambda out: _import(out, known, slice(0, None, 2)))
    scored = _once(here / "score", lambda out: _import(out, known, slice(1, None, 2 * every)))
    unseen = _once(here / "unseen", lambda out: _import(out, ("translation",), slice(0, None, every)))
    costs = _once(
        here / "profile.json",
        lambda out: profile(
            "deepseek-v2-lite", config_only=True, dtype="bfloat16", seconds=20, threads=1, scratch=here
        ).save(out),
    )
    predictors = _trained(learned, here / "predictors", ROUTE_EPOCHS, ROUTE_OPTIONS, held_out=0.05)
    title = "DeepSeek-V2-Lite; translation is the unseen task"
    found = _judged(title, here, predictors, scored, unseen, CostProfile.load(costs))
    for name, inside, outside in (("popularity", 0.19, 0.12), ("affinity", 0.57, 0.33)):
        assert found[name, False].overall()[1].match == pytest.approx(inside, abs=0.04)
        assert found[name, True].overall()[1].match == pytest.approx(outside, abs=0.04)


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
    predictors = _trained(trace, here / "predictors", {}, ROUTE_OPTIONS)
    found = _judged("Qwen3-30B-A3B, one conversation split in time", here, predictors, trace, None, None)
    assert all(row.requests == "end" for row in found.values())
    assert Trace(trace).requests.num_rows == 1
