"""Pages of the KV cache in a file: what comes back, and what is refused."""

import json
from pathlib import Path

import pytest
import torch

from moetool.base import durable
from moetool.base.errors import MismatchError, MoetoolError
from moetool.runtime.decoding import PAGE_TOKENS
from moetool.runtime.kv import kept_prefixes
from moetool.runtime.kv.kept_prefixes import PrefixFile
from tests.refusals import refused

HASHES = [bytes([n]) * 16 for n in range(3)]
FACTS = {"revision": "a" * 64}


def _rows(dtype: torch.dtype = torch.bfloat16, width: int = 3) -> list[torch.Tensor]:
    """Rows of two layers, in 5 pages and the first."""
    drawn = torch.Generator().manual_seed(1)
    return [torch.randn(6 * PAGE_TOKENS, heads, width, generator=drawn).to(dtype) for heads in (1, 2)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "new" / "model.prefixes"
    PrefixFile(path, FACTS, _rows()).save(HASHES, [4, 1, 3])
    return path


@pytest.mark.parametrize(("most", "first"), [(5, 0), (2, 1), (0, 3)])
def test_pages_come_back_in_their_order_the_last_if_not_all_fit(path: Path, most: int, first: int) -> None:
    rows = [torch.zeros_like(layer) for layer in _rows()]
    assert PrefixFile(path, FACTS, rows).load(most) == HASHES[first:]
    for given, found in zip(_rows(), rows, strict=True):
        pages, kept = (layer.view(6, PAGE_TOKENS, *layer.shape[1:]) for layer in (given, found))
        assert torch.equal(kept[1 : 4 - first], pages[[4, 1, 3][first:]])
        assert not kept[0].any() and not kept[4 - first :].any()


def test_without_pages_there_is_no_file(path: Path) -> None:
    assert path.stat().st_mode & 0o077 == 0
    file = PrefixFile(path, FACTS, _rows())
    before = path.read_bytes()
    file.save([], [])
    assert path.read_bytes() == before  # perhaps of another server
    path.unlink()
    file.save([], [])
    assert not path.exists() and file.load(5) == []


@pytest.mark.parametrize("block_bytes", [1, 50, 10**6])
def test_blocks_make_no_difference(path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int) -> None:
    before = path.read_bytes()
    monkeypatch.setattr(kept_prefixes, "BLOCK_BYTES", block_bytes)
    PrefixFile(path, FACTS, _rows()).save(HASHES, [4, 1, 3])
    assert path.read_bytes() == before
    rows = [torch.zeros_like(layer) for layer in _rows()]
    assert PrefixFile(path, FACTS, rows).load(2) == HASHES[1:]
    for given, found in zip(_rows(), rows, strict=True):
        pages, kept = (layer.view(6, PAGE_TOKENS, *layer.shape[1:]) for layer in (given, found))
        assert torch.equal(kept[1:3], pages[[1, 3]]) and not kept[3:].any()


def test_a_header_that_claims_much_allocates_nothing(path: Path) -> None:
    line, rest = path.read_bytes().split(b"\n", 1)
    head = json.loads(line)
    path.write_bytes(json.dumps({**head, "hashes": head["hashes"] * 1000}).encode() + b"\n" + rest)
    with refused(MismatchError, str(path), path.stat().st_size):
        PrefixFile(path, FACTS, _rows()).load(5)


def test_a_damaged_file_is_refused(path: Path) -> None:
    content = path.read_bytes()
    flipped = [content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :] for at in range(0, len(content), 7)]
    for damaged in (*flipped, content[:-1], content + b"a", b"", b"[]\n", content[:40], b"\0" * 4096):
        path.write_bytes(damaged)
        with refused(MismatchError, str(path)):
            PrefixFile(path, FACTS, _rows()).load(5)


@pytest.mark.parametrize(
    ("facts", "rows", "name"),
    [
        ({"revision": "b" * 64}, _rows(), "revision"),
        (FACTS, _rows(torch.float16), "dtype"),
        (FACTS, _rows(width=4), "rows"),
    ],
)
def test_a_file_of_another_model_is_refused(
    path: Path, facts: dict[str, str], rows: list[torch.Tensor], name: str
) -> None:
    with refused(MismatchError, str(path), name):
        PrefixFile(path, facts, rows).load(5)


def test_a_disk_that_fails_leaves_the_earlier_file(path: Path) -> None:
    before = path.read_bytes()
    (path.parent / f"{path.name}.partial").mkdir()
    with refused(MoetoolError, str(path)):
        PrefixFile(path, FACTS, _rows()).save(HASHES[:1], [1])
    assert path.read_bytes() == before


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), MemoryError()])
def test_memory_that_fails_leaves_the_earlier_file(
    path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(self: torch.Tensor) -> torch.Tensor:
        raise error

    before = path.read_bytes()
    monkeypatch.setattr(torch.Tensor, "cpu", fail)
    with refused(MoetoolError, str(path)):
        PrefixFile(path, FACTS, _rows()).save(HASHES[:1], [1])
    assert path.read_bytes() == before and list(path.parent.iterdir()) == [path]


def test_two_servers_do_not_write_one_file_together(path: Path) -> None:
    before = path.read_bytes()
    with durable.alone(path), refused(MoetoolError, str(path)):
        PrefixFile(path, FACTS, _rows()).save(HASHES[:1], [1])
    assert path.read_bytes() == before


def test_a_folder_in_its_place_cannot_be_read(path: Path) -> None:
    path.unlink()
    path.mkdir()
    for use in (lambda file: file.load(5), lambda file: file.save(HASHES[:1], [1])):
        with refused(MoetoolError, str(path)) as caught:
            use(PrefixFile(path, FACTS, _rows()))
        assert caught.type is MoetoolError
