"""The copy of an expert that a rank's rows go to, and placements after the loss of ranks."""

import numpy as np
import pytest

from moetool.placement.latency import flows
from moetool.placement.replica_routing import destinations, holders_of, placed_of, without
from tests.clusters import make_cluster
from tests.placements import random_placement


def test_rows_go_to_the_nearest_holder_and_evenly_as_planners_reckon() -> None:
    rng = np.random.default_rng(0)
    placed_GLE = random_placement(rng, 4, 3, 8, 9)
    server_G = (0, 0, 1, 1)
    to_GLE = destinations(placed_GLE, server_G)
    for g, layer, expert in np.ndindex(to_GLE.shape):
        holders = np.flatnonzero(placed_GLE[:, layer, expert]).tolist()
        near = [h for h in holders if server_G[h] == server_G[g]] or holders
        assert to_GLE[g, layer, expert] in ([g] if g in holders else near)
    cluster = make_cluster([[9, 9], [9, 9]])
    for layer in range(3):
        tokens_GE = rng.random((4, 8))
        single_E = placed_GLE[:, layer].sum(axis=0) == 1  # where there is a choice, sources take turns
        flow_GG = flows(cluster, tokens_GE * single_E, placed_GLE[:, layer])
        mine_GG = np.zeros((4, 4))
        for g in range(4):
            for expert in np.flatnonzero(single_E):
                mine_GG[g, to_GLE[g, layer, expert]] += tokens_GE[g, expert]
        assert mine_GG == pytest.approx(flow_GG)


def test_sources_take_turns_among_holders() -> None:
    placed_GLE = np.zeros((6, 1, 6), bool)
    placed_GLE[:2] = True  # every expert on the first two of six
    to_GLE = destinations(placed_GLE, range(6))
    assert np.bincount(to_GLE[2:].ravel()).tolist() == [12, 12]


def test_without_a_gpu_its_experts_are_shared_out_and_nothing_else_moves() -> None:
    placed_GLE = random_placement(np.random.default_rng(1), 4, 2, 8, 5)
    left_GLE = without(placed_GLE, np.ones((2, 8), bool), [0, 1, 3])
    assert left_GLE.any(axis=0).all()
    assert not left_GLE[2].any()
    assert (left_GLE[[0, 1, 3]] >= placed_GLE[[0, 1, 3]]).all()
    assert left_GLE.sum() == placed_GLE[[0, 1, 3]].sum() + (~placed_GLE[[0, 1, 3]].any(axis=0)).sum()


def test_a_placement_survives_its_lists() -> None:
    placed_GLE = random_placement(np.random.default_rng(3), 3, 2, 6, 6)
    assert (placed_of(holders_of(placed_GLE), 3) == placed_GLE).all()
