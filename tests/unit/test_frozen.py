"""Frozen hashes: what counts as a change, and that a record of another machine is refused."""

from pathlib import Path

import pytest
import torch

from tests.frozen import __main__ as frozen
from tests.frozen.record import Record, changes, digest, machine, table


def test_a_digest_tells_every_bit_type_and_shape_apart() -> None:
    zero = torch.zeros(2, 3)
    others = [-zero, zero.bfloat16(), zero.view(3, 2), zero.clone().index_fill_(1, torch.tensor([2]), 1e-45)]
    assert len({digest(one) for one in (zero, *others)}) == 5
    assert digest(zero.T) == digest(torch.zeros(3, 2)) and digest(zero, 1) != digest(zero, 2)


def test_changed_new_and_gone_kinds_are_listed_by_group() -> None:
    before = {"gguf A": {"logits": "1", "counts": "slots=3 missed=4"}, "gguf B": {"logits": "1"}}
    now = {"gguf A": {"logits": "2", "counts": "slots=5 missed=4"}, "gguf C": {"logits": "1"}}
    found = changes(before, now)
    assert [(one.case, one.kind) for one in found] == [
        *(("gguf A", "logits"), ("gguf A", "counts"), ("gguf B", "logits"), ("gguf C", "logits")),
    ]
    shown = table(found, before)
    assert "slots=3 missed=4 -> slots=5 missed=4" in shown and "gguf B: logits gone" in shown
    assert "gguf C: logits new" in shown and ["gguf", "logits", "3", "2"] in [
        line.split() for line in shown.splitlines()
    ]
    assert changes(before, before) == []


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A record of one case, and a run that gives it again."""
    cases = {"replay lru": {"decisions": "a"}}
    monkeypatch.setattr(frozen, "run", lambda only, seconds: cases)
    Record(commit="c" * 40, machine=machine(), cases=cases).save(tmp_path / "frozen.json")
    return tmp_path / "frozen.json"


def test_a_comparison_fails_only_if_something_changed(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert frozen.main(["compare", str(recorded)]) == 0
    monkeypatch.setattr(frozen, "run", lambda only, seconds: {"replay lru": {"decisions": "b"}})
    assert frozen.main(["compare", str(recorded)]) == 1
    monkeypatch.setattr(frozen, "run", lambda only, seconds: {})
    assert frozen.main(["compare", str(recorded)]) == 1


def test_a_record_of_another_processor_is_refused(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = Record.load(recorded)
    Record(commit=made.commit, machine=made.machine | {"processor": "another"}, cases=made.cases).save(recorded)
    assert frozen.main(["compare", str(recorded)]) == 2
    assert "processor: recorded another" in capsys.readouterr().out


def test_a_failed_case_is_never_recorded(recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frozen, "run", lambda only, seconds: {"replay lru": {"failed": "ValueError: x"}})
    assert frozen.main(["make", str(tmp_path / "other.json")]) == 1
    assert not (tmp_path / "other.json").exists()
