"""FineMoE's Eqs. 4 to 8 and its redundancy scores, by hand and by brute force."""

import itertools

import numpy as np
import pytest

from moetool.base.errors import UsageError
from moetool.prediction.expert_maps import MapSearch, MapStore, capacity_of, distribution, select, threshold, top_mass
from tests.refusals import refused


def _search(store: MapStore, map_LE: np.ndarray, embedding_D: np.ndarray | None = None) -> MapSearch:
    search = MapSearch(store, embedding_D)
    for chance_E in map_LE:
        search.observe(chance_E)
    return search


def _random_maps(count: int, layers: int, experts: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).dirichlet([0.4] * experts, (count, layers)).astype(np.float32)


def _cosine(a: np.ndarray, b: np.ndarray) -> float:
    a, b = a.ravel().astype(np.float64), b.ravel().astype(np.float64)
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def test_sizings() -> None:
    assert capacity_of("2LJ", 2, 4) == 16
    assert capacity_of("LJlnLJ/2", 2, 4) == 9  # 8 ln 8 / 2 = 8.32
    assert capacity_of(7, 2, 4) == 7
    with refused(UsageError, "0 expert maps"):
        capacity_of(0, 2, 4)


def test_distributions() -> None:
    sigmoid_TE = np.array([[0.8, 0.4, 0.4], [0, 0, 0]], np.float32)
    np.testing.assert_allclose(distribution(sigmoid_TE), [[0.5, 0.25, 0.25], [1 / 3, 1 / 3, 1 / 3]], rtol=1e-6)
    mass_TE = top_mass(np.array([[3, 1]]), np.array([[0.6, 0.2]], np.float32), 4)
    np.testing.assert_allclose(mass_TE, [[0, 0.25, 0, 0.75]], rtol=1e-6)
    np.testing.assert_allclose(top_mass(np.array([[3, 1]]), None, 4), [[0, 0.5, 0, 0.5]])


def test_likeness_by_hand() -> None:
    store = MapStore(2, 2, 8, 2, 1)
    first = _search(store, np.array([[0.6, 0.4], [0, 1]], np.float32), np.array([3, 4], np.float32))
    second = _search(store, np.array([[0, 1], [1, 0]], np.float32), np.array([1, 0], np.float32))
    assert store.add([first, second], [-1, -1]) == [0, 1]

    search = MapSearch(store, np.array([4, 3], np.float32))
    np.testing.assert_allclose(search.semantic_C(), [24 / 25, 4 / 5], rtol=1e-6)  # Eq. 4
    assert search.by_embedding() == (0, pytest.approx(0.96))
    assert search.by_trajectory() is None
    search.observe(np.array([0.6, 0.4], np.float32))
    np.testing.assert_allclose(search.trajectory_C(), [1, 0.4 / 0.52**0.5], rtol=1e-6)  # Eq. 5, one layer
    search.observe(np.array([1, 0], np.float32))
    np.testing.assert_allclose(search.trajectory_C(), [0.52 / 1.52, 1.4 / (1.52 * 2) ** 0.5], rtol=1e-6)  # and both
    assert search.by_trajectory() == (1, pytest.approx(1.4 / 3.04**0.5))
    # RDY = d/L Eq. 4 + (L-d)/L Eq. 5 with d = 1 of L = 2.
    expected = [0.96 / 2 + 0.52 / 1.52 / 2, 0.8 / 2 + 1.4 / 3.04**0.5 / 2]
    np.testing.assert_allclose(store.redundancy([search])[0], expected, rtol=1e-6)


def test_equal_maps_are_found_at_the_lower_row() -> None:
    store = MapStore(1, 2, 8, 0, 1)
    for _ in range(3):
        store.add([_search(store, np.array([[0.5, 0.5]], np.float32))], [-1])
    found = _search(store, np.array([[0.9, 0.1]], np.float32)).by_trajectory()
    assert found is not None and found[0] == 0


def test_threshold_is_clipped() -> None:
    assert [threshold(score) for score in (1.2, 0.75, -0.5)] == [0, 0.25, 1]


def test_selection_by_hand() -> None:
    chance_E = np.array([0.1, 0.4, 0.2, 0.3], np.float32)
    assert select(chance_E, 0.3, 1) == [1]
    assert select(chance_E, 0.4, 1) == [1]  # Eq. 7 asks for no more
    assert select(chance_E, 0.5, 1) == [1, 3]
    assert select(chance_E, 0.75, 1) == [1, 3, 2]
    assert select(chance_E, 1.0, 1) == [1, 3, 2, 0]
    assert select(chance_E, 0.0, 2) == [1, 3]  # Eq. 8
    assert select(np.array([0.25] * 4, np.float32), 0.5, 1) == [0, 1]


@pytest.mark.parametrize("seed", range(8))
def test_selection_is_the_smallest_that_will_do(seed: int) -> None:
    rng = np.random.default_rng(seed)
    chance_E = rng.dirichlet([0.5] * 7)
    mass, at_least = float(rng.random()), int(rng.integers(1, 4))
    sizes = [
        size
        for size in range(at_least, 8)
        if any(sum(chance_E[list(of)]) >= mass for of in itertools.combinations(range(7), size))
    ]
    chosen = select(chance_E, mass, at_least)
    assert len(chosen) == min(sizes)
    assert chance_E[chosen].sum() >= mass - 1e-6


def test_searching_layer_by_layer_is_searching_the_prefix_anew() -> None:
    maps = _random_maps(40, 6, 9, 0)
    store = MapStore(6, 9, 100, 0, 2)
    for map_LE in maps[:30]:
        store.add([_search(store, map_LE)], [-1])
    for map_LE in maps[30:]:
        search = MapSearch(store)
        for layer in range(6):
            search.observe(map_LE[layer])
            expected = [_cosine(map_LE[: layer + 1], old[: layer + 1]) for old in maps[:30]]
            np.testing.assert_allclose(search.trajectory_C(), expected, rtol=1e-5)
        assert search.complete


@pytest.mark.parametrize("width", [0, 5])
def test_a_full_store_replaces_what_is_most_redundant(width: int) -> None:
    """Against a list of maps and float64 cosines of everything."""
    layers, experts, capacity, distance = 4, 6, 7, 1
    maps = _random_maps(50, layers, experts, 1)
    embeddings = np.random.default_rng(2).normal(size=(50, width)).astype(np.float32)
    store = MapStore(layers, experts, capacity, width, distance)
    held: list[int] = []
    rng = np.random.default_rng(3)
    new = 0
    while new < 50:
        batch = list(range(new, min(50, new + int(rng.integers(1, 4)))))
        new = batch[-1] + 1
        before, taken = list(held), set()
        for i in batch:
            if len(held) < capacity:
                held.append(i)
                continue

            def rdy(row: int, i: int = i, before: list[int] = before) -> float:
                path = _cosine(maps[i], maps[before[row]])
                if not width:
                    return path
                meaning = _cosine(embeddings[i], embeddings[before[row]])
                return distance / layers * meaning + (layers - distance) / layers * path

            row = max((row for row in range(len(before)) if row not in taken), key=rdy)
            taken.add(row)
            held[row] = i
        store.add([_search(store, maps[i], embeddings[i] if width else None) for i in batch], [-1] * len(batch))
    assert store.size == capacity
    np.testing.assert_array_equal(store.maps_LCE[:, :capacity], maps[held].transpose(1, 0, 2))


def test_a_forward_of_more_requests_than_maps_keeps_some() -> None:
    store = MapStore(1, 2, 2, 0, 1)
    searches = [_search(store, map_LE) for map_LE in _random_maps(3, 1, 2, 0)]
    assert store.add(searches, [-1] * 3) == [0, 1, -1]
    searches = [_search(store, map_LE) for map_LE in _random_maps(3, 1, 2, 1)]
    assert sorted(store.add(searches, [-1] * 3)) == [-1, 0, 1]


def test_links_lead_to_the_next_iteration_until_it_is_replaced() -> None:
    maps = np.eye(4, dtype=np.float32)[:, None, :]  # four maps of one layer, each sure of another expert
    store = MapStore(1, 4, 3, 0, 1)
    last = -1
    for map_LE in maps[:3]:
        (last,) = store.add([_search(store, map_LE)], [last])
    assert store.next_C[:3].tolist() == [1, 2, -1]
    (row,) = store.add([_search(store, maps[1])], [-1])  # makes the middle one redundant
    assert row == 1
    assert store.next_C[:3].tolist() == [-1, -1, -1]
    (row,) = store.add([_search(store, maps[2])], [1])
    assert row == 2
    assert store.next_C[:3].tolist() == [-1, 2, -1]
    (row,) = store.add([_search(store, maps[2])], [2])  # replaces its own predecessor
    assert row == 2
    assert store.next_C[:3].tolist() == [-1, -1, -1]


def test_a_store_is_its_arrays() -> None:
    store = MapStore(3, 4, 9, 2, 1)
    last = -1
    for map_LE in _random_maps(6, 3, 4, 5):
        (last,) = store.add([_search(store, map_LE, np.array([1, 2], np.float32))], [last])
    copy = store.copy()
    probe = _random_maps(1, 3, 4, 6)[0]
    np.testing.assert_array_equal(_search(copy, probe).trajectory_C(), _search(store, probe).trajectory_C())
    before = {name: array.copy() for name, array in store.arrays().items()}
    for map_LE in _random_maps(9, 3, 4, 7):
        copy.add([_search(copy, map_LE, np.array([2, 1], np.float32))], [-1])
    assert all(np.array_equal(array, before[name]) for name, array in store.arrays().items())
    with refused(ValueError, "room for 5"):
        MapStore.of(**before, capacity=5, distance=1)
    with refused(ValueError, "links"):
        MapStore.of(**{**before, "next_C": before["next_C"] + 9}, capacity=9, distance=1)
