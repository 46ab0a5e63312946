"""The store hands out the right bytes or none, whatever the threads do."""

import random
import threading
from collections.abc import Iterator

import pytest
import torch

from moetool.errors import MoetoolError
from moetool.serving.store import ExpertStore
from moetool.types import ModelSpec
from tests.servers import eventually


class _Files:
    """Stands in for the expert files: expert `key` is the number `key`, over and over."""

    slot_bytes = 1000

    def __init__(self) -> None:
        self.spec = ModelSpec(
            name="toy",
            revision="0",
            layer_ids_L=(3, 4),
            num_experts_L=(100, 100),
            top_k_L=(2, 2),
            has_logits_L=(True, True),
            num_shared_experts=0,
            num_groups=1,
            hidden_size=4,
            expert_bytes_L=(1000, 1000),
            score_function="softmax",
            renormalize=True,
        )
        self.gate = threading.Event()
        self.gate.set()
        self.failures: dict[int, int] = {}
        self.reads: list[int] = []

    def read_into(self, key: int, slot: torch.Tensor) -> int:
        self.gate.wait()
        self.reads.append(key)
        slot[:500] = key
        if self.failures.get(key, 0) > 0:
            self.failures[key] -= 1
            raise OSError("the disk is on fire")
        slot[500:] = key
        return 1000

    def views(self, slot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return slot[:500], slot[500:]


@pytest.fixture
def files() -> _Files:
    return _Files()


@pytest.fixture(params=[1, 3])
def store(files: _Files, request: pytest.FixtureRequest) -> Iterator[ExpertStore]:
    store = ExpertStore(files, 4, num_threads=request.param)  # type: ignore[arg-type]
    yield store
    files.gate.set()
    store.close()


def _holds(store: ExpertStore, key: int, slot: int) -> bool:
    first, second = store.ready(key, slot)
    return bool((first == key).all() and (second == key).all())


def test_slots_are_equally_aligned(store: ExpertStore) -> None:
    assert {slot.data_ptr() % 64 for slot in store._slots} == {0}


def test_random_programs_never_hand_out_a_wrong_weight(store: ExpertStore, files: _Files) -> None:
    draw = random.Random(0)
    held: dict[int, int] = {}
    for _ in range(3000):
        slot = draw.randrange(4)
        if slot not in held or draw.random() < 0.6:
            held[slot] = draw.randrange(200)
            store.load(held[slot], slot, prefetch=draw.random() < 0.5)
        else:
            assert _holds(store, held[slot], slot)
    assert store.stats.bytes_read == store.stats.reads * 1000


def test_a_superseded_prefetch_is_never_read(store: ExpertStore, files: _Files) -> None:
    files.gate.clear()
    for slot in range(3):
        store.load(slot, slot, prefetch=True)  # keeps every thread busy
    store.load(50, 3, prefetch=True)
    store.load(51, 3, prefetch=False)
    threading.Timer(0.05, files.gate.set).start()
    assert _holds(store, 51, 3)
    for slot in range(3):
        assert _holds(store, slot, slot)
    assert 50 not in files.reads


def test_a_load_waits_for_the_write_that_is_under_way(store: ExpertStore, files: _Files) -> None:
    """The first load is writing into the slot, the second never begins, the third must come after the first."""
    files.gate.clear()
    store.load(7, 0, prefetch=True)
    while not store._jobs[0].claimed:  # type: ignore[union-attr]
        pass
    store.load(8, 0, prefetch=True)
    store.load(9, 0, prefetch=False)
    threading.Timer(0.05, files.gate.set).start()
    assert _holds(store, 9, 0)


def test_demand_goes_ahead_of_prefetch(files: _Files) -> None:
    store = ExpertStore(files, 4, num_threads=1)  # type: ignore[arg-type]
    files.gate.clear()
    store.load(1, 0, prefetch=True)
    while not store._jobs[0].claimed:  # type: ignore[union-attr]
        pass
    store.load(2, 1, prefetch=True)
    store.load(3, 2, prefetch=False)
    files.gate.set()
    for job in store._jobs[:3]:
        assert job is not None
        eventually(lambda job=job: job.done)
    assert files.reads == [1, 3, 2]
    store.close()


def test_a_read_that_fails_once_is_tried_again(store: ExpertStore, files: _Files) -> None:
    files.failures[5] = 1
    store.load(5, 0, prefetch=False)
    assert _holds(store, 5, 0)
    assert store.stats.retried == 1


def test_a_read_that_fails_twice_names_the_expert_and_can_be_had_later(store: ExpertStore, files: _Files) -> None:
    files.failures[105] = 2
    store.load(105, 0, prefetch=False)
    with pytest.raises(MoetoolError, match="expert 5 of layer 4: the disk is on fire"):
        store.ready(105, 0)
    assert _holds(store, 105, 0)


def test_a_slot_with_another_expert_is_read_again(store: ExpertStore) -> None:
    store.load(1, 0, prefetch=False)
    assert _holds(store, 1, 0)
    assert _holds(store, 2, 0)  # the program says 2; an aborted forward never loaded it


def test_a_late_prefetch_is_counted(store: ExpertStore, files: _Files) -> None:
    files.gate.clear()
    store.load(1, 0, prefetch=True)
    threading.Timer(0.05, files.gate.set).start()
    assert _holds(store, 1, 0)
    assert store.stats.late == 1
    assert store.stats.stall_seconds > 0
    assert _holds(store, 1, 0)
    assert store.stats.late == 1
