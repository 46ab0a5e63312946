"""The store hands out the right bytes or none, whatever the threads do."""

import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from moetool.base.errors import CapacityError, MoetoolError
from moetool.base.types import ModelSpec
from moetool.runtime.experts.store import ExpertStore
from tests.refusals import refused
from tests.servers import PATIENCE_S, eventually
from tests.streams import Streams


class _Files:
    """Stands in for the expert files: expert `key` is the number `key`, over and over."""

    slot_bytes = stored_bytes = 1000
    converts = False
    num_layouts = 1

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
        self.weightless: set[int] = set()
        self.reads: list[int] = []
        self.begun: list[int] = []

    def layout_of(self, key: int) -> int:
        return 0

    def has_weights(self, key: int) -> bool:
        return key not in self.weightless

    def read_stored(self, key: int, slot: torch.Tensor) -> int:
        self.begun.append(key)
        self.gate.wait()
        self.reads.append(key)
        slot[:500] = key
        if self.failures.get(key, 0) > 0:
            self.failures[key] -= 1
            raise OSError("the disk is on fire")
        slot[500:] = key
        return 1000

    def read_into(self, key: int, slot: torch.Tensor) -> int:
        return self.read_stored(key, slot)

    def views(self, slot: torch.Tensor, layout: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
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
    assert {slot.data_ptr() % 64 for slot in store.slots} == {0}


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


def test_random_programs_with_bytes_from_elsewhere(store: ExpertStore, files: _Files) -> None:
    draw = random.Random(1)
    held: dict[int, int] = {}
    for _ in range(3000):
        slot, key = draw.randrange(4), draw.randrange(200)
        match draw.randrange(4):
            case 0:
                held[slot] = key
                store.load(key, slot, prefetch=draw.random() < 0.5)
            case 1:
                held[slot] = key
                store.put(key, slot, torch.full((1000,), key, dtype=torch.uint8))
            case 2 if slot in held:
                assert (store.bytes_of(held[slot], slot) == held[slot]).all()
            case _ if slot in held:
                assert _holds(store, held[slot], slot)


def test_bytes_from_elsewhere_come_after_the_write_that_is_under_way(store: ExpertStore, files: _Files) -> None:
    files.gate.clear()
    store.load(7, 0, prefetch=True)
    eventually(lambda: bool(files.begun))
    threading.Timer(0.05, files.gate.set).start()
    store.put(8, 0, torch.full((1000,), 8, dtype=torch.uint8))
    assert _holds(store, 8, 0)
    assert files.reads == [7]


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


@pytest.mark.parametrize("prefetch", [False, True])
def test_an_expert_without_weights_is_neither_read_nor_replaces_another(
    store: ExpertStore, files: _Files, prefetch: bool
) -> None:
    files.weightless = {9, 109}
    assert _holds(store, 1, 0)
    store.load(9, 0, prefetch)
    store.load(109, 1, prefetch)
    store.load(2, 2, prefetch)
    eventually(lambda: store.stats.reads == 2)  # loads begin in order: reads of 9 and 109 would have begun before
    assert all(store.holds(key, slot) for key, slot in ((9, 0), (109, 1), (1, 0)))
    assert store.ready(9, 0) == store.ready(109, 1) == ()
    assert files.begun == [1, 2]


def test_a_load_waits_for_the_write_that_is_under_way(store: ExpertStore, files: _Files) -> None:
    """The first load is writing into the slot, the second never begins, the third must come after the first."""
    files.gate.clear()
    store.load(7, 0, prefetch=True)
    eventually(lambda: bool(files.begun))
    store.load(8, 0, prefetch=True)
    store.load(9, 0, prefetch=False)
    threading.Timer(0.05, files.gate.set).start()
    assert _holds(store, 9, 0)


def test_demand_goes_ahead_of_prefetch(files: _Files) -> None:
    store = ExpertStore(files, 4, num_threads=1)  # type: ignore[arg-type]
    files.gate.clear()
    store.load(1, 0, prefetch=True)
    eventually(lambda: bool(files.begun))
    store.load(2, 1, prefetch=True)
    store.load(3, 2, prefetch=False)
    files.gate.set()
    eventually(lambda: len(files.reads) == 3)
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
    with refused(MoetoolError, "expert 5", "layer 4"):
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


# -- the host tier ----------------------------------------------------------------------------------------------


def _tiered(files: _Files, slots: int, experts: int | None, threads: int = 2, **options: Any) -> ExpertStore:
    """A store with room for so many experts in host memory."""
    return ExpertStore(
        files,  # type: ignore[arg-type]
        slots,
        num_threads=threads,
        host_memory_bytes=None if experts is None else experts * 1024 + 1023,
        **options,
    )


def test_idle_threads_read_ahead_into_free_host_memory(files: _Files) -> None:
    copies = Streams()
    store = _tiered(files, 4, 6, threads=1, copies=copies)
    store.read_ahead(range(10))
    deadline = time.monotonic() + 10
    while store.stats.reads < 6 and time.monotonic() < deadline:
        time.sleep(0.001)
    store.load_together([(1, 0), (5, 1), (9, 2)])
    for slot, key in enumerate((1, 5, 9)):
        store.ready(key, slot)
    copies.drain()
    assert all(_holds(store, key, slot) for slot, key in enumerate((1, 5, 9)))
    stats = store.stats
    assert (stats.reads, stats.host_hits, stats.prefetch_bytes) == (7, 2, 6 * 1000)
    store.close()


def test_experts_read_ahead_leave_in_the_opposite_order(files: _Files) -> None:
    copies = Streams()
    store = _tiered(files, 4, 4, threads=1, copies=copies)
    store.read_ahead([7, 3, 9, 1, 5])
    eventually(lambda: store.stats.reads == 4)
    for slot, key in enumerate((0, 2)):  # take the buffers of 1 and 9
        store.load(key, slot, prefetch=False)
        store.ready(key, slot)
    for slot, key in enumerate((7, 3)):
        store.load(key, slot, prefetch=False)
        store.ready(key, slot)
    copies.drain()
    assert (store.stats.reads, store.stats.host_hits) == (6, 2)
    store.close()


def test_an_expert_that_another_thread_reads_does_not_end_reading_ahead(files: _Files) -> None:
    store = _tiered(files, 4, 6, threads=3, copies=Streams())
    files.gate.clear()
    store.load(2, 0, prefetch=True)
    eventually(lambda: files.begun == [2])
    store.read_ahead([2, 4, 6])
    eventually(lambda: sorted(files.begun) == [2, 4, 6])
    files.gate.set()
    store.close()


def test_loads_from_host_memory_are_one_batch_with_one_mark(files: _Files) -> None:
    class Counting(Streams):
        batches: list[int]

        def copy_all(self, pairs: Any) -> Any:
            self.batches.append(len(pairs))
            return super().copy_all(pairs)

    copies = Counting(seed=3)
    copies.batches = []
    store = _tiered(files, 8, 20, threads=1, copies=copies)
    for key in range(5):
        store.load(key, key, prefetch=False)
        store.ready(key, key)
        store.computed([key])
    store.load_together([(10, 5), (0, 6), (3, 7), (1, 2)])  # the first of them has to be read
    assert copies.batches == [3]
    for key, slot in ((10, 5), (0, 6), (3, 7), (1, 2)):
        store.ready(key, slot)
    copies.drain()
    assert all(_holds(store, key, slot) for key, slot in ((10, 5), (0, 6), (3, 7), (1, 2)))
    store.close()


@pytest.mark.follows("moetool.runtime.experts.source ExpertSource.__init__")
def test_pools_keep_to_their_budgets(files: _Files) -> None:
    for memory, expected in ((None, 0), (500, 0), (1024, 1024), (10_000, 9 * 1024), (10**9, 200 * 1024)):
        store = ExpertStore(files, 4, host_memory_bytes=memory)  # type: ignore[arg-type]
        assert (store.pool_bytes, store.host_pool_bytes) == (4 * 1024, expected)
        store.close()
    for options, least in (({"hosts": True}, 3), ({"copies": Streams()}, 3), ({"hosts": True, "copies": Streams()}, 4)):
        store = _tiered(files, 4, None, **options)
        assert store.host_pool_bytes == (200 if "copies" in options else least) * 1024  # a ring of at most 1 GiB
        store.close()
        with pytest.raises(CapacityError, match=f"expected at least {least}, .* set it to {least * 1024:,}"):
            _tiered(files, 4, least - 1, **options)
        ExpertStore(files, 4, host_memory_bytes=least * 1024, **options).close()  # type: ignore[arg-type]


def test_with_room_for_all_nothing_is_read_twice(files: _Files) -> None:
    store = _tiered(files, 3, 200)
    draw = random.Random(1)
    for _ in range(500):
        key, slot = draw.randrange(30), draw.randrange(3)
        store.load(key, slot, prefetch=draw.random() < 0.3)
        assert _holds(store, key, slot)
    assert sorted(files.reads) == list(range(30))
    stats = store.stats
    assert (stats.reads, stats.reads + stats.host_hits) == (30, 500)
    assert stats.host_bytes == 1000 * stats.host_hits
    assert 0 < stats.host_stall_seconds < stats.stall_seconds
    store.close()


def test_the_tier_keeps_what_was_loaded_or_given_up_last(files: _Files) -> None:
    store = _tiered(files, 2, 3, threads=1)

    def load(key: int, slot: int) -> None:
        store.load(key, slot, prefetch=False)
        assert _holds(store, key, slot)

    load(1, 0)  # the tier: 1
    load(2, 1)  # 1 2
    load(3, 1)  # 1 2 3
    load(4, 0)  # gives up 1, the tier is 2 3 1, and 4 takes the place of 2
    files.reads.clear()
    load(1, 1)
    assert files.reads == []
    load(2, 0)
    assert files.reads == [2]
    store.close()


@pytest.mark.parametrize("experts", [0, 1, 2, 5, 60])
def test_random_programs_with_a_host_tier(files: _Files, experts: int) -> None:
    store = _tiered(files, 4, experts)
    draw = random.Random(experts)
    held: dict[int, int] = {}
    for _ in range(2000):
        slot = draw.randrange(4)
        if draw.random() < 0.02 and (broken := draw.randrange(60)) not in held.values():
            files.failures[broken] = 1  # the next read of it; a second in a row would be an error
        if slot not in held or draw.random() < 0.6:
            held[slot] = draw.randrange(60)
            store.load(held[slot], slot, prefetch=draw.random() < 0.5)
        else:
            assert _holds(store, held[slot], slot)
    store.close()


def test_a_failed_read_leaves_nothing_in_the_host_tier(files: _Files) -> None:
    store = _tiered(files, 2, 4)
    files.failures[7] = 2
    store.load(7, 0, prefetch=False)
    with refused(MoetoolError, "expert 7", "layer 3"):
        store.ready(7, 0)
    assert store.stats.host_hits == 0
    for slot in (0, 1):
        store.load(7, slot, prefetch=False)
        assert _holds(store, 7, slot)
    assert (store.stats.reads, store.stats.host_hits) == (1, 1)
    store.close()


def test_other_errors_of_a_read_are_no_wrong_weights(files: _Files, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_stored(key: int, slot: torch.Tensor) -> int:
        raise RuntimeError("CUDA error: device-side assert")

    monkeypatch.setattr(files, "read_stored", read_stored)
    store = _tiered(files, 2, 0)
    store.load(1, 0, prefetch=False)
    with refused(MoetoolError, "expert 1", "layer 3", "CUDA"):
        store.ready(1, 0)
    store.close()


@pytest.mark.parametrize("experts", [None, 3, 50])
def test_weights_on_the_host(files: _Files, experts: int | None) -> None:
    store = _tiered(files, 2, experts, hosts=True)
    files.failures[1] = 1
    for key in (1, 150, 1, 40, 41, 42, 1):
        store.load(10 + key, 0, prefetch=True)
        with store.host(key) as (first, second):
            assert bool((first == key).all() and (second == key).all())
        assert _holds(store, 10 + key, 0)
    assert store.stats.retried == 1
    hits = store.stats.host_hits
    copy = store.host_copy(1)
    assert copy is not None and store.host_copy(120) is None  # only what is there
    with copy as (first, second):
        assert bool((first == 1).all() and (second == 1).all())
    assert store.stats.host_hits == hits + 1
    files.failures[77] = 2
    with refused(MoetoolError, "expert 77"), store.host(77):
        pass
    with store.host(77) as (first, second):
        assert bool((first == 77).all() and (second == 77).all())
    store.close()


# -- a device of queues -----------------------------------------------------------------------------------------


class _Device:
    """Runs programs on a store over `Streams`: the 'computation' looks at what its slot holds when its turn comes."""

    def __init__(self, files: _Files, slots: int, experts: int | None, seed: int) -> None:
        self.streams = Streams(seed)
        self.store = _tiered(files, slots, experts, copies=self.streams)
        self.wrong: list[tuple[int, int]] = []
        self.computed = 0

    def compute(self, key: int, slot: int) -> None:
        weights = self.store.ready(key, slot)

        def look() -> None:
            self.computed += 1
            if any(bool((part != key).any()) for part in weights):
                self.wrong.append((key, slot))

        self.streams.compute(look)
        self.store.computed([slot])


@pytest.mark.parametrize("experts", [None, 3, 8, 60])
@pytest.mark.parametrize("seed", range(3))
def test_computing_finds_the_right_bytes_whenever_the_queues_run(files: _Files, experts: int | None, seed: int) -> None:
    device = _Device(files, 4, experts, seed)
    draw = random.Random(seed)
    held: dict[int, int] = {}
    asked = 0
    for _ in range(1500):
        slot = draw.randrange(4)
        if draw.random() < 0.02 and (broken := draw.randrange(60)) not in held.values():
            files.failures[broken] = 1  # the next read of it; a second in a row would be an error
        if slot not in held or draw.random() < 0.5:
            held[slot] = draw.randrange(60)
            device.store.load(held[slot], slot, prefetch=draw.random() < 0.5)
        else:
            device.compute(held[slot], slot)
            asked += 1
        if draw.random() < 0.3:
            device.streams.advance(draw.randrange(4))
    device.streams.drain()
    assert (device.wrong, device.computed) == ([], asked)
    device.store.close()


def test_the_made_up_device_catches_a_slot_that_is_refilled_too_early(files: _Files) -> None:
    """The test of the test: without the mark after computing, a copy overtakes it."""
    caught = False
    for seed in range(20):
        device = _Device(files, 1, 8, seed)
        device.store.computed = lambda slot: None  # type: ignore[method-assign]
        for key in range(8):
            device.store.load(key, 0, prefetch=False)
            device.compute(key, 0)
        device.streams.drain()
        caught |= bool(device.wrong)
        device.store.close()
    assert caught


def test_a_hit_in_host_memory_never_blocks_the_models_thread(files: _Files) -> None:
    device = _Device(files, 2, 8, seed=0)
    for key in (1, 2):
        device.store.load(key, 0, prefetch=False)
        device.compute(key, 0)
    device.streams.drain()
    files.gate.clear()  # from here a read would hang
    finishes = device.streams.finishes
    for key in (1, 2, 1, 2):
        device.store.load(key, key % 2, prefetch=False)
        device.compute(key, key % 2)
    assert device.streams.finishes == finishes
    assert device.computed == 2  # nothing has run yet
    device.streams.drain()
    assert (device.wrong, device.computed) == ([], 6)
    device.store.close()


def test_a_prefetch_is_late_while_its_copy_is_under_way(files: _Files) -> None:
    device = _Device(files, 2, 8, seed=0)
    device.store.load(5, 0, prefetch=False)
    device.compute(5, 0)
    device.streams.drain()
    held = threading.Event()
    device.streams.finish = lambda mark: held.wait(PATIENCE_S) and None  # type: ignore[method-assign]
    device.store.load(5, 1, prefetch=True)
    eventually(lambda: device.store.stats.host_hits == 1)
    device.compute(5, 1)
    assert device.store.stats.late == 1
    held.set()
    device.streams.drain()
    assert device.wrong == []
    device.store.close()
