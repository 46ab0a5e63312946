"""mixtral_offloading and promoe: what they prefetch, whom they give up, and how far they look."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moetool.base.errors import UsageError
from moetool.base.types import ModelSpec
from moetool.caching.policy import Policy, build_policy
from moetool.caching.residency import Residency, StepKind
from moetool.trace.reader import Trace
from moetool.training.predictor import build
from moetool.training.tokens import read
from moetool.tuning.replay import ReplaySetup, replay
from tests import synthetic_routes
from tests.refusals import refused
from tests.synthetic import MadeUpPredictor, make_forward, make_spec

SPEC = make_spec(layers=3, experts=8, top_k=2)


def _mixtral(slots: int, **options: Any) -> tuple[Any, Residency]:
    policy = build_policy("mixtral_offloading", SPEC, options, slots)
    return policy, Residency(policy)


def _token(residency: Residency, *experts_LK: tuple[int, ...], guesses: dict[int, tuple[int, ...]]) -> list[list[int]]:
    """One new token; `guesses` are what the gate of a layer says one layer early. Gives what each event prefetched."""
    info, events = make_forward(SPEC, np.array([experts_LK]), rng=np.random.default_rng(0))
    prefetched = []
    residency.begin_forward(info)
    for event in events:
        ahead_ATE = np.zeros((2 - event.layer, 1, 8), np.float32)
        for rank, expert in enumerate(guesses.get(event.layer + 1, ())):
            ahead_ATE[0, 0, expert] = 1 - rank / 8
        steps = residency.event(replace(event, ahead_ATE=ahead_ATE))
        prefetched.append([step.key for step in steps if step.kind == StepKind.PREFETCH])
    residency.end_forward(info)
    return prefetched


def test_the_next_gates_top_k_are_loaded_and_a_wrong_guess_goes_first() -> None:
    policy, residency = _mixtral(8)  # a share of 2 a layer, and K beside them
    prefetched = _token(residency, (0, 1), (2, 3), (4, 5), guesses={1: (3, 6), 2: (4, 5)})
    assert prefetched == [[8 + 3, 8 + 6], [16 + 4, 16 + 5], []]
    assert (residency.counts.prefetched, residency.counts.missed) == (3, 3)
    assert len(residency.slot_of) == 7 and 8 + 6 in residency.slot_of
    _token(residency, (0, 2), (2, 3), (4, 5), guesses={1: (2, 3), 2: (4, 5)})
    assert 2 in residency.slot_of and len(residency.slot_of) == 8  # into the last free slot
    _token(residency, (3, 2), (2, 3), (4, 5), guesses={1: (2, 3), 2: (4, 5)})
    assert set(residency.slot_of) >= {2, 3, 10, 11, 20, 21} and 8 + 6 not in residency.slot_of
    assert policy.guessed == {}


def test_each_layer_gives_up_its_own_least_recently_used() -> None:
    _, residency = _mixtral(8)
    for pair in ((0, 1), (2, 3), (4, 5)):
        _token(residency, pair, (2, 3), (4, 5), guesses={})
        _token(residency, pair, (2, 3), (4, 5), guesses={1: (2, 3), 2: (4, 5)})
    kept = set(residency.slot_of)
    assert {4, 5, 8 + 2, 8 + 3, 16 + 4, 16 + 5} <= kept  # the other layers lost nothing to a layer that changes


def test_a_guess_takes_no_place_within_a_share() -> None:
    policy, _ = _mixtral(8)
    for key in (0, 1, 8, 9, 16, 17):
        policy.admit(key, False)
    assert policy.evict_for_prefetch(10, set()) is None
    policy.admit(18, False)  # one above its share
    assert policy.evict_for_prefetch(10, set()) == 16
    policy.admit(2, True)
    _, events = make_forward(SPEC, np.zeros((1, 3, 2), int))
    policy.gate(events[0], [], [])  # layer 0 has chosen without it
    assert policy.evict_for_prefetch(10, set()) == 2
    assert policy.evict({2}) == 0  # layer 0 has its share already


def test_slots_per_layer_must_be_some() -> None:
    with refused(UsageError, "slots_per_layer", "0"):
        _mixtral(8, slots_per_layer=0)
    assert _mixtral(11, slots_per_layer=1)[0].share == 1
    assert _mixtral(11, slots_per_layer=9)[0].share == 3


class _Fixed(MadeUpPredictor):
    """Always names the same experts."""

    def scores(self, layer: int) -> Any:
        assert self._event is not None and 0 < layer - self._event.layer <= self.lookahead
        row = np.zeros((len(self._event.experts_TK), 8), np.float32)
        row[:, [layer, layer + 1]] = 1
        return row


def _promoe(spec: ModelSpec, *, lookahead: int = 9, **options: Any) -> Policy:
    predictor = _Fixed(spec)
    predictor.lookahead = lookahead
    return build_policy("promoe", spec, options, 40, predictor=predictor)


@pytest.mark.parametrize(("distance", "lookahead", "stride"), [(2, 9, 2), (3, 9, 3), (3, 1, 1)])
def test_each_layer_is_predicted_once_a_stride_ahead(distance: int, lookahead: int, stride: int) -> None:
    spec = make_spec(layers=6, experts=8, top_k=2)
    policy = _promoe(spec, distance=distance, lookahead=lookahead)
    assert policy.distance == stride
    _, events = make_forward(spec, np.zeros((1, 6, 2), int))
    for event in events:
        policy.gate(event, [], [])
        layers = range(1, stride + 1) if event.layer == 0 else range(event.layer + stride, event.layer + stride + 1)
        expected = [layer * 8 + layer + i for layer in layers if layer < 6 for i in (0, 1)]
        assert policy.after_first_expert(event) == expected


def test_promoe_gives_up_what_it_prefetched_for_coming_layers_last_and_looks_somewhere() -> None:
    policy = _promoe(SPEC)
    policy.admit(0, False)
    policy.admit(9, True)
    _, events = make_forward(SPEC, np.zeros((1, 3, 2), int))
    policy.gate(events[0], [0], [])
    assert policy.evict(set()) == 0
    policy.removed(0)
    assert policy.evict_for_prefetch(17, set()) is None
    policy.gate(events[1], [], [])  # now layer 1 has its experts
    assert policy.evict_for_prefetch(17, set()) == 9
    with refused(UsageError, "distance", "0"):
        _promoe(SPEC, distance=0)


def test_a_predictor_that_remembers_is_not_shared_between_policies(tmp_path: Path) -> None:
    """duoserve shows it new tokens only, promoe prompts too: side by side they decide as each does alone."""
    trace = Trace(synthetic_routes.write_trace(tmp_path / "trace", num_requests=8))
    predictor = build("activation_matrix", trace.spec).eval()
    predictor.count(read(trace, {"experts"}, range(4), tmp_path))
    names = ["duoserve", "promoe"]
    together = replay(trace, names, [16 * 1024], ReplaySetup(predictor=predictor))
    alone = [replay(trace, [name], [16 * 1024], ReplaySetup(predictor=predictor))[0] for name in names]
    assert [row.digest for row in together] == [row.digest for row in alone]
