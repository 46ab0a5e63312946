"""A part of a trace is a trace: the same rows, fewer of them."""

from pathlib import Path

import numpy as np
import pytest

from moetool.base.errors import MismatchError, UsageError
from moetool.trace.edit import head, split
from moetool.trace.merge import merge
from moetool.trace.reader import Trace
from moetool.trace.rows import TokenBatch
from tests import traces
from tests.refusals import refused

LENGTHS = [(4, 3), (2, 2), (5, 1)]
COLUMNS = ("weights", "logits", "hidden")


def test_the_first_layers_and_requests(tmp_path: Path) -> None:
    whole = traces.write(tmp_path / "whole", traces.together(LENGTHS), LENGTHS)
    made = head(whole, tmp_path / "head", layers=2, requests=2)
    spec = made.spec
    assert (spec.num_layers, spec.layer_ids_L, spec.top_k_L) == (2, (1, 2), (2, 2))
    assert spec.revision != whole.spec.revision
    assert not {"ahead", "resident"} & made.columns and made.requests.num_rows == 2
    before = TokenBatch.concatenate(list(whole.batches(COLUMNS)))
    before = before.select(before.request_T < 2)
    after = TokenBatch.concatenate(list(made.batches(COLUMNS)))
    assert np.array_equal(after.experts_TS, before.experts_TS[:, :4])
    for name, width in (("weights_TS", 4), ("logits_TF", 16), ("hidden_TH", 8)):
        assert np.array_equal(getattr(after, name), getattr(before, name)[:, :width])
    assert [row[:2] for row in made.embeddings()] == [row[:2] for row in whole.embeddings() if row[0] < 2]
    assert len(list(made.forwards(sequential=True, columns=["embeddings"]))) == 5


def test_all_layers_keep_the_model(tmp_path: Path) -> None:
    whole = traces.write(tmp_path / "whole", traces.alone(LENGTHS), LENGTHS)
    made = head(whole, tmp_path / "head", requests=1)
    assert made.spec == whole.spec and made.columns == whole.columns and made.ahead == whole.ahead
    assert made.num_tokens == 6


@pytest.mark.parametrize("asked", [{"layers": 0}, {"layers": 4}, {"requests": 4}])
def test_more_than_there_is_is_refused(asked: dict[str, int], tmp_path: Path) -> None:
    whole = traces.write(tmp_path / "whole", traces.alone(LENGTHS), LENGTHS)
    with refused(UsageError, 3, "1 to 3"):
        head(whole, tmp_path / "head", **asked)


EVERY = ("weights", "logits", "hidden", "ahead", "resident")


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """Six requests of six tasks that ran together, with every column."""
    lengths = [(4, 3), (2, 2), (5, 1), (1, 4), (3, 2), (2, 3)]
    return traces.write(tmp_path_factory.mktemp("many") / "trace", traces.together(lengths), lengths)


def requests_of(trace: Trace) -> dict[str, TokenBatch]:
    """Each request's rows by its prompt."""
    prompts = dict(zip(trace.requests["request"].to_pylist(), trace.requests["prompt_id"].to_pylist(), strict=True))
    columns = [name for name in EVERY if name in trace.columns]
    return {prompts[int(rows.request_T[0])]: rows for rows in trace.whole_requests(columns)}


def require_same_rows(part: Trace, whole: Trace) -> None:
    """Every request of the part has the rows that it has in the whole; they are numbered from 0."""
    assert part.requests["request"].to_pylist() == list(range(len(part.requests)))
    before, after = requests_of(whole), requests_of(part)
    for prompt, rows in after.items():
        for name in (
            "experts_TS",
            "weights_TS",
            "logits_TF",
            "hidden_TH",
            "ahead_TR",
            "resident_TW",
            "token_id_T",
            "iteration_T",
        ):
            if (column := getattr(rows, name)) is not None:
                assert np.array_equal(column, getattr(before[prompt], name)), name
    if "embeddings" in part.columns:
        numbers = dict(zip(part.requests["request"].to_pylist(), part.requests["prompt_id"].to_pylist(), strict=True))
        found = {(numbers[r], i): e.tolist() for r, i, e in part.embeddings()}
        expected = {(str(r), i): e.tolist() for r, i, e in whole.embeddings()}  # prompts are named by their number
        assert found.items() <= expected.items() and len(found) == sum(part.requests["new_tokens"].to_pylist())
        assert len(list(part.forwards(sequential=True, columns=["embeddings"])))


def test_parts_by_task_are_the_tasks(many: Trace, tmp_path: Path) -> None:
    parts = split(many, tmp_path / "parts", by="task")
    assert list(parts) == [f"t{i}" for i in range(6)]
    for i, part in enumerate(parts.values()):
        assert part.requests["prompt_id"].to_pylist() == [str(i)]
        require_same_rows(part, many)
        assert part.manifest["provenance"]["part"] == f"t{i}"
    with refused(UsageError, "exists"):
        split(many, tmp_path / "parts", by="task")
    split(many, tmp_path / "parts", by="request", shares=[0.5], overwrite=True)
    assert sorted(path.name for path in (tmp_path / "parts").iterdir()) == ["0", "1", "split.json"]


def test_shares_are_evenly_spread_and_together_the_whole(many: Trace, tmp_path: Path) -> None:
    half, rest = split(many, tmp_path / "a", by="request", shares=[0.5]).values()
    assert half.requests["prompt_id"].to_pylist() == ["0", "2", "4"]
    assert rest.requests["prompt_id"].to_pylist() == ["1", "3", "5"]
    parts = split(many, tmp_path / "b", by="request", shares=[0.5, 1 / 3, 1 / 6])
    assert [len(part.requests) for part in parts.values()] == [3, 2, 1]
    for part in parts.values():
        require_same_rows(part, many)
    assert sorted(p for part in parts.values() for p in requests_of(part)) == list("012345")
    for shares in ([], [0.0], [1.0], [0.7, 0.7], [-0.5], [float("nan")]):
        with refused(UsageError, "shares", "0"):
            split(many, tmp_path / "x", by="request", shares=shares)
    with refused(UsageError, "part 1"):
        split(many, tmp_path / "x", by="request", shares=[0.99])
    with refused(UsageError, "--share", "--by request"):
        split(many, tmp_path / "x", by="task", shares=[0.5])
    with refused(UsageError, "task"):
        split(many, tmp_path / "x", by="tasks")


def test_merged_parts_are_the_whole_again(many: Trace, tmp_path: Path) -> None:
    parts = list(split(many, tmp_path / "parts", by="request", shares=[0.5]).values())
    made, notes = merge(parts, tmp_path / "merged")
    assert notes == [] and made.columns == many.columns and made.ahead == many.ahead
    require_same_rows(made, many)
    assert made.requests["prompt_id"].to_pylist() == ["0", "2", "4", "1", "3", "5"]
    forwards = [set(rows.request_T.tolist()) for rows in made.recorded_forwards([])]
    assert all(requests <= {0, 1, 2} or requests <= {3, 4, 5} for requests in forwards)
    merged = made.manifest["provenance"]["merged"]
    assert [each["sha256"] for each in merged] == [part.sha256 for part in parts]
    assert [each["first_request"] for each in merged] == [0, 3]
    assert merged[1]["provenance"] == parts[1].manifest["provenance"]


def test_a_merge_says_what_it_leaves_out(tmp_path: Path) -> None:
    lengths = [(2, 2)]
    one = traces.write(tmp_path / "a", traces.alone(lengths), lengths)
    two = traces.write(tmp_path / "b", traces.alone([(3, 2)]), [(3, 2)], keep=("topk", "ahead"))
    log = traces.write(tmp_path / "c", traces.alone([(1, 2)]), [(1, 2)], composition={"kind": "log"})
    made, notes = merge([one, two], tmp_path / "m")
    assert made.columns == {"weights", "ahead", *made.columns} - {"logits", "hidden", "resident", "embeddings"}
    assert "left out logits: not in all of them" in notes
    assert "1 prompt in more than one of them; a split by request may separate copies" in notes
    other = traces.write(tmp_path / "e", traces.alone(lengths), lengths, resident=0.25)
    made, notes = merge([one, other], tmp_path / "p")
    assert "resident" not in made.columns and "left out resident: different shares of the experts" in notes
    made, notes = merge([one, log], tmp_path / "n")
    assert made.manifest["composition"] == {"kind": "log"} and "embeddings" not in made.columns
    assert any("by forward" in note for note in notes)
    batch = traces.write(tmp_path / "d", traces.alone([(1, 1)]), [(1, 1)], composition={"kind": "batch", "size": "4"})
    made, _ = merge([one, batch], tmp_path / "o")
    assert made.describe()["composition"] == "mixed sequential, batch 4"
    assert len(list(made.forwards(sequential=False))) == 3


def test_what_cannot_be_merged_is_refused(many: Trace, tmp_path: Path) -> None:
    other = head(many, tmp_path / "other", layers=2)
    with refused(MismatchError, "tiny", 2):
        merge([many, other], tmp_path / "x")
    with refused(UsageError, "same trace"):
        merge([many, Trace(many.path)], tmp_path / "x")
    with refused(UsageError, 1):
        merge([many], tmp_path / "x")
    with refused(UsageError, "exists"):
        merge([many, head(many, tmp_path / "s", requests=1)], tmp_path / "other")
    assert not (tmp_path / "x").exists() and not list(tmp_path.glob("*.partial"))
