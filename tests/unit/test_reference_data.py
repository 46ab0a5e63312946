"""Which documents are held out, what each batch holds, and what text is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moetool.errors import UsageError
from moetool.reference.data import (
    SEPARATOR,
    Domain,
    TextBatches,
    held_out_rows,
    hold_out,
    read_domains,
    split_documents,
)


def domain(name: str, train: int, held_out: int = 10) -> Domain:
    return Domain(
        name=name,
        sha256=name,
        num_bytes=train,
        num_documents=2,
        num_held_out=1,
        train_N=np.arange(train, dtype=np.int32),
        held_out_N=np.arange(held_out, dtype=np.int32),
    )


def write(folder: Path, **texts: str | bytes) -> Path:
    folder.mkdir()
    for name, text in texts.items():
        (folder / f"{name}.txt").write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


def joined(*documents: str) -> str:
    return "".join(f"{document}\n{SEPARATOR}\n" for document in documents)


def test_documents_are_told_apart_and_copies_dropped(tmp_path: Path) -> None:
    content = joined("one\ntwo", "three", "one\ntwo", "  ").encode() + b"no separator after the last"
    found = split_documents(content, tmp_path)
    assert found == ["one\ntwo", "three", "no separator after the last"]


def test_a_document_is_on_the_same_side_whatever_else_there_is() -> None:
    documents = [f"document {i}" for i in range(400)]
    held, train = hold_out(documents, 0.1)
    assert sorted(held + train) == sorted(documents)
    assert 20 < len(held) < 60
    fewer, _ = hold_out(documents[::-2], 0.1)
    assert set(fewer) == set(held) & set(documents[::-2])


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_at_least_one_document_is_on_each_side(share: float) -> None:
    held, train = hold_out(["a", "b", "c"], share)
    assert len(held) == (1 if share == 0 else 2) and len(held) + len(train) == 3


def test_tokens_are_those_of_the_documents_each_with_its_end(tmp_path: Path, tokenizer: Any) -> None:
    folder = write(tmp_path / "text", law=joined("The court.", "A judge, twice."), code=joined("x = 1", "y = 2"))
    (folder / "notes.md").write_text("no domain")
    law = read_domains(folder, tokenizer, 0.5)[1]
    assert law.name == "law" and law.num_documents == 2 and law.num_held_out == 1
    texts = {tokenizer.decode(part) for part in (law.train_N, law.held_out_N)}
    assert texts == {f"The court.{SEPARATOR}", f"A judge, twice.{SEPARATOR}"}


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ({}, "holds no .txt file"),
        (
            {"one": "a long text without any separator"},
            f"one.txt holds 1 different documents.*{SEPARATOR[2:-2]}",
        ),
        ({"empty": ""}, "empty.txt holds 0 different documents"),
        ({"latin": b"caf\xe9"}, "latin.txt is not UTF-8 text .byte 3."),
    ],
)
def test_text_that_cannot_be_used_is_refused(
    tmp_path: Path, tokenizer: Any, texts: dict[str, str | bytes], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        read_domains(write(tmp_path / "text", **texts), tokenizer, 0.1)
    with pytest.raises(UsageError, match="no directory"):
        read_domains(tmp_path / "absent", tokenizer, 0.1)


def dealt(steps: int, seed: int = 3, mixing: float = 0.5) -> TextBatches:
    return TextBatches(
        [domain("large", 1601), domain("small", 101)], length=10, batch_size=8, steps=steps, mixing=mixing, seed=seed
    )


def test_rows_are_neighbouring_tokens_and_each_comes_once_before_any_comes_twice() -> None:
    batches = dealt(steps=12)
    rows = np.concatenate([batches.rows(step) for step in range(12)])
    assert rows.shape == (96, 11)
    assert (np.diff(rows, axis=1) == 1).all() and (rows[:, 0] % 10 == 0).all()
    for number, windows in enumerate((160, 10)):
        seen = batches.window_N[batches.domain_N == number]
        for turn in range(0, len(seen), windows):
            part = seen[turn : turn + windows]
            assert len(set(part.tolist())) == len(part)


def test_a_step_depends_on_the_seed_alone_and_not_on_how_many_follow() -> None:
    short, long, other = dealt(5), dealt(50), dealt(5, seed=4)
    assert all((short.rows(step) == long.rows(step)).all() for step in range(5))
    assert not all((short.rows(step) == other.rows(step)).all() for step in range(5))


def test_domains_are_mixed_by_a_power_of_their_size() -> None:
    assert dealt(1, mixing=1.0).share_D.tolist() == pytest.approx([16 / 17, 1 / 17])
    assert dealt(1, mixing=0.5).share_D.tolist() == pytest.approx([0.8, 0.2])
    assert dealt(1, mixing=0.0).share_D.tolist() == pytest.approx([0.5, 0.5])


def test_text_shorter_than_a_sequence_is_refused_with_a_length_that_works() -> None:
    with pytest.raises(UsageError, match=r"tiny has 10 tokens.*at least 11.*fit.sequence_length=5"):
        TextBatches([domain("tiny", 10)], length=10, batch_size=8, steps=1, mixing=1, seed=0)
    assert TextBatches([domain("tiny", 10)], length=5, batch_size=8, steps=1, mixing=1, seed=0).rows(0).shape == (8, 6)


def test_held_out_rows_are_spread_over_the_text() -> None:
    rows = held_out_rows(domain("d", 0, held_out=1001), length=10, max_tokens=40)
    assert rows[:, 0].tolist() == [120, 370, 620, 870] and (np.diff(rows, axis=1) == 1).all()
    assert held_out_rows(domain("d", 0, held_out=1001), length=10, max_tokens=10**6)[:, 0].tolist() == list(
        range(0, 1000, 10)
    )
    assert held_out_rows(domain("d", 0, held_out=7), length=10, max_tokens=40).tolist() == [list(range(7))]
