"""Memory that prompt chunks borrow from expert slots, and what goes back to the system."""

import contextlib
from pathlib import Path

import psutil
import pytest
import torch

from moetool.caching._policy import build_policy
from moetool.caching._residency import Residency
from moetool.models.checkpoint import Checkpoint
from moetool.models.loading import CPU, load_lazy
from moetool.runtime.expert_store import open_store
from moetool.runtime.memory_share import MemoryShare
from moetool.runtime.returned_memory import give_back
from moetool.runtime.sizing import LEAST_CHUNK


def test_longer_chunks_borrow_more_and_never_less_than_their_activations() -> None:
    share = MemoryShare(most_slots=30, chunk_tokens=2070)
    found = [share.borrowed(tokens) for tokens in range(3000)]
    assert found == sorted(found)
    assert set(found[: LEAST_CHUNK + 1]) == {0} and found[LEAST_CHUNK + 1] > 0 and set(found[2070:]) == {30}
    assert len(set(found)) <= 17
    slot_tokens = (2070 - LEAST_CHUNK) / 30
    assert all((tokens - LEAST_CHUNK) / slot_tokens <= slots for tokens, slots in enumerate(found[:2071]))


def test_returned_pages_are_no_longer_resident() -> None:
    memory, process = torch.ones(64 << 20, dtype=torch.uint8), psutil.Process()
    before = process.memory_info().rss
    give_back(memory)
    assert before - process.memory_info().rss > 60 << 20
    assert int(memory[1 << 20]) == 0


@pytest.mark.parametrize("prefetch", [False, True])
def test_a_released_slot_is_loaded_anew(prefetch: bool, reference: Path) -> None:
    with contextlib.closing(load_lazy(Checkpoint.open(reference), torch.float32, CPU)) as loaded:
        residency = Residency(build_policy("lru", loaded.spec, {}, 4))
        with contextlib.closing(open_store(loaded, residency)) as store:
            first = [part.clone() for part in store.ready(5, 2)]
            store.load(7, 2, prefetch=prefetch)
            store.release([2, 3])
            again = store.ready(5, 2)
            assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
            assert not store.holds(7, 2)
