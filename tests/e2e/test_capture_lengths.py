"""Prompts of public data sets are cut, and their answers are as long, as the papers have it."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from moetool.base.errors import CapacityError
from moetool.capture.run import CaptureOptions, capture
from moetool.cli import main as cli
from moetool.prompts.gather import Prompt, tokens_to_decode
from moetool.trace.reader import Trace
from tests.refusals import refused


def prompt(number: int, text: str, **rest: Any) -> Prompt:
    return Prompt(dataset="d", task="t", prompt_id=str(number), text=text, **rest)


def test_each_prompt_has_its_own_lengths_in_one_batch(tmp_path: Path, tokenizer: Any) -> None:
    answer = "a seven and some more words"
    long = "The harbour was rebuilt after the storm. " * 20
    texts = [
        prompt(0, "The first of the", output="answer", answer=answer),
        prompt(1, long, output=5, input_tokens=37),
        prompt(2, "Once upon a time"),
        prompt(3, long, output="answer", answer=None),  # no answer whose length could be taken
    ]
    capture("reference", texts, tmp_path / "t", CaptureOptions(batch_size=4, data=({"source": "d"},)))
    trace = Trace(tmp_path / "t")
    rows = trace.requests.to_pylist()
    limits = [len(tokenizer(answer, add_special_tokens=False)["input_ids"]), 5, 32, 32]
    assert [row["prompt_tokens"] for row in rows][1] == 37 < len(tokenizer(long)["input_ids"])
    assert all(row["new_tokens"] <= limit for row, limit in zip(rows, limits, strict=True))
    assert [row["new_tokens"] for row in rows][:2] == limits[:2]
    assert trace.manifest["provenance"]["max_new_tokens"] == 32
    assert trace.manifest["provenance"]["data"] == [{"source": "d"}]


def test_a_limit_holds_for_every_prompt(tokenizer: Any) -> None:
    answer = prompt(0, "x", output="answer", answer="one two three four")
    count = len(tokenizer(answer.answer)["input_ids"])
    assert [tokens_to_decode(answer, tokenizer, limit) for limit in (None, 2, 100)] == [count, 2, count]
    number = prompt(0, "x", output=20)
    assert [tokens_to_decode(number, tokenizer, limit) for limit in (None, 2, 100)] == [20, 2, 20]
    assert [tokens_to_decode(prompt(0, "x"), tokenizer, limit) for limit in (None, 2, 100)] == [32, 2, 100]


def test_a_prompt_whose_answer_does_not_fit_is_left_out(tmp_path: Path) -> None:
    with refused(CapacityError, "no prompt", "1"):
        capture("reference", [prompt(0, "x", output=10**6)], tmp_path / "t", CaptureOptions())


def test_a_public_set_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"idx": i, "inputs": f"What is {i} plus {i + 3}?", "targets": [str(2 * i + 3)]} for i in range(9)]
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "arithmetic.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, rows[0]]))
    command = ["capture", "reference", "--data", "bigbench", "--data-dir", str(tmp_path / "copy"), "--json"]
    command += ["--set", "data.task=arithmetic", "--set", "data.seed=5", "--batch-size", "9"]
    monkeypatch.setattr(sys, "argv", ["moetool", *command, "--out", str(tmp_path / "t")])
    with pytest.raises(SystemExit) as exit:
        cli.main()
    captured = capsys.readouterr()
    assert exit.value.code == 0, captured.err
    assert "because they repeat others: 1" in captured.err
    assert json.loads(captured.out)["requests"] == 9
    trace = Trace(tmp_path / "t")
    (origin,) = trace.manifest["provenance"]["data"]
    assert (origin["hub"], origin["config"], origin["exact_duplicates"]) == ("tasksource/bigbench", "arithmetic", 1)
    assert all(row["new_tokens"] <= 2 for row in trace.requests.to_pylist())  # answers of one or two digits
