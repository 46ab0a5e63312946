"""The memory of paths, against plain sums over all of them."""

import numpy as np
import pytest

from moetool.prediction.route_memory import (
    EVERYONE,
    FADE,
    LAST,
    NEIGHBOURS,
    SHARPNESS,
    Neighbours,
    RouteMemory,
    RouteSearch,
    roots,
)

L, E, K = 4, 8, 2


def paths(num: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    experts_CLK = rng.random((num, L, E)).argsort(axis=2)[:, :, :K].astype(np.int16)
    return experts_CLK, rng.random((num, L, K)).astype(np.float16), np.full(num, -1)


def search(
    memory: RouteMemory, experts_LK: np.ndarray, weights_LK: np.ndarray, layers: int, hidden: tuple[int, ...] = ()
) -> RouteSearch:
    """One token without paths of its own after some layers."""
    found = RouteSearch(memory, 1, np.zeros(0, np.int64), np.array(hidden, np.int64), None)
    for experts_K, weights_K in zip(experts_LK[:layers], weights_LK[:layers], strict=True):
        found.observe([experts_K.tolist()], roots(weights_K[None]))
    return found


@pytest.mark.parametrize("layers", [1, 2, 4])
def test_alike_is_the_cosine_of_faded_marks(layers: int) -> None:
    (experts_CLK, weights_CLK, before_C), (experts_1LK, weights_1LK, _) = paths(41), paths(1, seed=1)
    experts_CLK[40], weights_CLK[40] = experts_1LK[0], weights_1LK[0]
    similarity_C = search(
        RouteMemory((experts_CLK, weights_CLK, before_C), E, 8), experts_1LK[0], weights_1LK[0], layers
    ).similarities(0)
    mark_CLE = np.zeros((41, layers, E))
    np.put_along_axis(mark_CLE, experts_CLK[:, :layers].astype(int), np.sqrt(weights_CLK[:, :layers]), axis=2)
    mark_CLE *= np.sqrt(FADE ** (layers - 1 - np.arange(layers)))[:, None]
    flat_CF = mark_CLE.reshape(41, -1)
    flat_CF /= np.linalg.norm(flat_CF, axis=1, keepdims=True)
    np.testing.assert_allclose(similarity_C, flat_CF @ flat_CF[40], rtol=1e-3, atol=1e-4)
    assert similarity_C.argmax() == 40


def test_the_vote_is_of_the_nearest_by_their_cosine() -> None:
    similarity_C = np.array([0.9, 0.1, 0.8, 0.85], np.float32)
    memory = RouteMemory(paths(4), E, 0)
    near = Neighbours(None, similarity_C)
    assert near.best == np.float32(0.9)
    assert near.rows_N.tolist() == [0, 2, 3]  # the other one is too far off to matter
    expected_E = np.zeros(E)
    for row in (0, 2, 3):
        expected_E[memory.experts_CLK[row, 2]] += np.exp(SHARPNESS * (similarity_C[row] - 0.9))
    expected_E /= np.exp(SHARPNESS * (similarity_C[[0, 2, 3]] - 0.9)).sum()
    np.testing.assert_allclose(near.vote(memory, 2, E), expected_E, rtol=1e-5)


def test_many_neighbours_are_cut_and_none_say_nothing() -> None:
    near = Neighbours(np.arange(200) + 7, np.linspace(0.9, 1, 200, dtype=np.float32))
    assert sorted(near.rows_N.tolist()) == list(range(207 - NEIGHBOURS, 207))
    none = Neighbours(None, np.zeros(0, np.float32))
    assert (none.best, none.vote(RouteMemory(paths(3), E, 0), 1, E).tolist()) == (0.0, [0.0] * E)


def test_a_path_is_its_owners_until_it_is_released() -> None:
    experts_2LK, weights_2LK, _ = paths(2, seed=3)
    memory = RouteMemory(paths(5), E, 4)
    memory.add(experts_2LK, roots(weights_2LK), owner=9, last=-1)
    assert memory.rows_of(9).tolist() == [5, 6]
    hidden = tuple(np.flatnonzero(memory.owner_C[: memory.size] != EVERYONE).tolist())
    similarity_C = search(memory, experts_2LK[0], weights_2LK[0], 3, hidden).similarities(0)
    assert similarity_C[5:].tolist() == [-1, -1]
    memory.release(9)
    assert (memory.owner_C[: memory.size] == EVERYONE).all()
    assert search(memory, experts_2LK[0], weights_2LK[0], 3).similarities(0)[5] == pytest.approx(1, abs=1e-5)


def test_a_path_counts_more_where_what_came_before_is_alike() -> None:
    stored = paths(4)
    memory = RouteMemory((*stored[:2], np.array([-1, 0, 1, -1])), E, 0)
    nobody = np.zeros(0, np.int64)
    last_C = np.array([0.5, -0.2, 0.9, 0.9], np.float32)
    one, plain = (RouteSearch(memory, 1, nobody, nobody, last) for last in (last_C, None))
    for searched in (one, plain):
        searched.observe([stored[0][2, 0].tolist()], roots(stored[1][2, :1]))
    np.testing.assert_allclose(one.similarities(0) - plain.similarities(0), [0, LAST * 0.5, 0, 0], atol=1e-6)
    assert np.array_equal(one.similarities(0, alone=True), plain.similarities(0))


def test_the_ring_overwrites_its_oldest_and_nothing_that_was_learned() -> None:
    learned, (experts_6LK, weights_6LK, _) = paths(3), paths(6, seed=3)
    row = -1
    memory = RouteMemory(learned, E, 4)
    for token in range(6):
        row = memory.add(experts_6LK[token : token + 1], roots(weights_6LK[token : token + 1]), owner=1, last=row)
    assert memory.size == 7
    assert memory.before_C[:7].tolist() == [-1, -1, -1, 6, 3, -1, 5]  # the oldest one follows what is no more
    assert np.array_equal(memory.experts_CLK[:3], learned[0])
    assert np.array_equal(memory.experts_CLK[3:7], experts_6LK[[4, 5, 2, 3]])
    similarity_C = search(memory, experts_6LK[4], weights_6LK[4], 4).similarities(0)
    fresh_C = search(
        RouteMemory(
            (memory.experts_CLK[:7], np.concatenate([learned[1], weights_6LK[[4, 5, 2, 3]]]), np.full(7, -1)), E, 0
        ),
        experts_6LK[4],
        weights_6LK[4],
        4,
    ).similarities(0)
    np.testing.assert_allclose(similarity_C, fresh_C, rtol=1e-5)  # nothing is left of the overwritten ones
    memory.forget()
    assert memory.size == 3
