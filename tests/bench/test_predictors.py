"""Every predictor on the same traces under the same measures: the embedded model, and two published routings.

    python -m pytest tests/bench/test_predictors.py -m '' -s

Each is trained by `moetool train` with the epochs that `EPOCHS` gives, and judged by `moetool evaluate`; those that a
trace has not the columns for are named with the reason. `MOETOOL_BENCH_WORK=DIR` keeps traces, predictors and pages in
DIR and takes those that are there, so that a run that was stopped goes on.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from moetool import plugins
from moetool import prompts as prompt_sets
from moetool.capture import CaptureOptions, capture
from moetool.costs import CostProfile
from moetool.errors import MismatchError
from moetool.evaluation import Evaluation, evaluate
from moetool.evaluation_page import write_page
from moetool.evaluation_tables import print_evaluations
from moetool.formats.topk_parquet import read_routes
from moetool.profile import profile
from moetool.trace import Trace
from moetool.trace_import import import_trace
from moetool.training import HELD_OUT, train

SHARED = Path(os.environ.get("MOETOOL_SHARED", Path(__file__).parents[2].parent / "shared"))
DEEPSEEK = SHARED / "data" / "routes" / "deepseek_v2_lite"
QWEN = SHARED / "data" / "routes" / "bigmoeonedge" / "qwen3_30b_a3b.route.csv"

PROMPTS, NEW_TOKENS, AHEAD = 24, 32, 6
UNSEEN = "code"
EPOCHS = {"expert_mlp": 12, "cascade": 40, "single_transformer": 40, "lstm": 40}
ROUTE_EPOCHS = {"expert_mlp": 20}
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


def _trained(
    trace: Path, out: Path, epochs: Mapping[str, int], options: Mapping[str, Any], held_out: float = HELD_OUT
) -> list[Path]:
    """Folders of all predictors that the trace has the columns for."""
    made = []
    for name in plugins.names("predictor"):
        folder = out / name
        if not folder.exists():
            most = epochs.get(name, OTHERS)
            try:
                train(name, trace, folder, options=options.get(name), max_epochs=most, held_out=held_out)
            except MismatchError as error:
                print(f"left out: {str(error).split(';')[0].replace(f'{trace}', 'the trace')}", flush=True)
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
    keep = ("topk", "logits", "embeddings", "hidden", "ahead")
    options = CaptureOptions(max_new_tokens=NEW_TOKENS, batch_size=8, keep=keep, ahead=AHEAD, threads=1)

    def captured(*names: str) -> Callable[[Path], object]:
        texts = list(prompt_sets.load(names, max_prompts=PROMPTS))
        return lambda out: capture("reference", texts, out, options)

    trace = _once(here / "trace", captured(*(name for name in prompt_sets.names() if name != UNSEEN)))
    unseen = _once(here / "unseen", captured(UNSEEN))
    costs = _once(
        here / "profile.json", lambda out: profile("reference", dtype="float32", seconds=10, threads=1).save(out)
    )
    predictors = _trained(trace, here / "predictors", EPOCHS, {})
    title = f"the embedded model; {UNSEEN} is the unseen task"
    found = _judged(title, here, predictors, trace, unseen, CostProfile.load(costs))
    assert {name for name, _ in found} >= set(plugins.names("predictor"))
    for name in ("cascade", "single_transformer"):
        told = found[name, False].foretold
        assert told is not None and told.load_error < found["popularity", False].foretold.load_error  # type: ignore[union-attr]


@pytest.mark.skipif(not DEEPSEEK.is_dir(), reason="shared/data/routes is not here")
def test_deepseek_routes(work: Path) -> None:
    """Every other sequence of intent and law to train; the others, and translation, to score."""
    here = work / "deepseek"
    halves = {half: here / half for half in ("train", "score")}
    for number, half in enumerate(halves):
        _once(halves[half], lambda out, number=number: _import_half(out, number))  # type: ignore[misc]
    unseen = _once(
        here / "unseen",
        lambda out: import_trace([DEEPSEEK / "translation.parquet"], "topk_parquet", out, tokens_as="prefill"),
    )
    costs = _once(
        here / "profile.json",
        lambda out: profile(
            "deepseek-v2-lite", config_only=True, dtype="bfloat16", seconds=20, threads=1, scratch=here
        ).save(out),
    )
    predictors = _trained(halves["train"], here / "predictors", ROUTE_EPOCHS, ROUTE_OPTIONS, held_out=0.05)
    title = "DeepSeek-V2-Lite; translation is the unseen task"
    found = _judged(title, here, predictors, halves["score"], unseen, CostProfile.load(costs))
    for name, known, strange in (("popularity", 0.19, 0.12), ("affinity", 0.57, 0.33)):
        assert found[name, False].overall()[1].match == pytest.approx(known, abs=0.02)
        assert found[name, True].overall()[1].match == pytest.approx(strange, abs=0.02)


def _import_half(out: Path, number: int) -> None:
    """The even or odd sequences of intent and law as a trace, each a prompt."""
    files = []
    for task in ("intent", "law"):
        kept = out.parent / f"{out.name}-{task}.parquet"
        _write_half(DEEPSEEK / f"{task}.parquet", kept, number)
        files.append(kept)
    import_trace(files, "topk_parquet", out, tokens_as="prefill")
    for file in files:
        file.unlink()


def _write_half(source: Path, out: Path, number: int) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(source)
    names = [int(sequence.name) for sequence in read_routes(source).sequences][number::2]
    rows = pa.array([value in set(names) for value in table["sequence"].to_pylist()])
    out.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table.filter(rows), out)


@pytest.mark.skipif(not QWEN.is_file(), reason="shared/data/routes is not here")
def test_qwen_conversation(work: Path) -> None:
    """One conversation, split in time."""
    here = work / "qwen"
    trace = _once(here / "trace", lambda out: import_trace([QWEN], "route_csv", out))
    predictors = _trained(trace, here / "predictors", ROUTE_EPOCHS, ROUTE_OPTIONS)
    found = _judged("Qwen3-30B-A3B, one conversation split in time", here, predictors, trace, None, None)
    assert all(row.requests == "end" for row in found.values())
    assert Trace(trace).requests.num_rows == 1
