"""Foresight: what it predicts, that it learns while it runs, and that what it learned comes back."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from moetool.caching._policy import build_policy
from moetool.caching._residency import Counts, Residency
from moetool.caching.foresight import Policy
from moetool.errors import UsageError
from moetool.learning import next_use_network as next_use
from moetool.learning import past_use
from moetool.learning.next_use_network import NextUse
from moetool.learning.past_use import DISCOUNT, HORIZON, Past, Sample
from moetool.learning.predictor import build
from moetool.learning.tokens import Tokens
from moetool.types import ForwardInfo, GateEvent, Phase
from tests.synthetic import MadeUpPredictor, make_forward, make_spec

SPEC = make_spec(layers=4, experts=16, top_k=2)
SLOTS = 16
SMALL = {"hidden": 32, "refresh": 1, "learn_every": 2, "learning_rate": 1e-2}


def walk(num_tokens: int, seed: int = 0) -> np.ndarray:
    """Routes [T, L, K] that go round: a token's experts say those of the next tokens, with some noise."""
    rng = np.random.default_rng(seed)
    start_T = (np.arange(num_tokens) * 2) % SPEC.num_experts
    first_TL = (start_T[:, None] + 5 * np.arange(SPEC.num_layers)) % SPEC.num_experts
    strays = rng.random(first_TL.shape) < 0.1
    first_TL = np.where(strays, rng.integers(0, SPEC.num_experts, first_TL.shape), first_TL)
    return np.stack([first_TL, (first_TL + 1) % SPEC.num_experts], axis=2)


def forwards(routes_TLK: np.ndarray, request: int = 0) -> Iterator[tuple[ForwardInfo, list[GateEvent]]]:
    for number, experts_LK in enumerate(routes_TLK):
        yield make_forward(SPEC, experts_LK[None], forward_id=number, request=request)


def drive(residency: Residency, routes_TLK: np.ndarray, request: int = 0) -> Counts:
    for info, events in forwards(routes_TLK, request):
        residency.begin_forward(info)
        for event in events:
            residency.event(event)
        residency.end_forward(info)
    return residency.counts


def made(name: str = "foresight", slots: int = SLOTS, **options: object) -> Residency:
    return Residency(build_policy(name, SPEC, options, slots))


def test_it_learns_a_cycle_that_lru_never_hits_in() -> None:
    """Eight tokens go round through more experts than there are slots: the case that recency is worst at."""
    lru, foresight = made("lru"), made(prefetch=False, **SMALL)
    drive(lru, walk(400))
    drive(foresight, walk(400))
    late = walk(200, seed=1)
    before = lru.counts, foresight.counts
    rates = [
        (after.kept - counts.kept) / (after.needed - counts.needed)
        for counts, after in zip(before, (drive(lru, late), drive(foresight, late)), strict=True)
    ]
    assert rates[1] > rates[0] + 0.1


def test_prefetches_are_mostly_used_once_it_has_learned() -> None:
    residency = made(**SMALL)
    drive(residency, walk(400))
    before = residency.counts
    counts = drive(residency, walk(200, seed=1))
    loads, wasted = counts.prefetch_loads - before.prefetch_loads, counts.wasted - before.wasted
    assert loads > 100
    assert wasted < 0.3 * loads


def test_a_price_on_waste_and_a_switch_end_prefetching() -> None:
    assert drive(made(prefetch=False, **SMALL), walk(100)).prefetch_loads == 0
    few, many = (drive(made(waste=waste, **SMALL), walk(150)).prefetch_loads for waste in (1e6, 0.2))
    assert few == 0 < many


def test_what_was_learned_comes_back_and_decides_the_same() -> None:
    first = made(**SMALL)
    drive(first, walk(200))
    state = {name: array.copy() for name, array in first.policy.state().items()}
    later = []
    for _ in range(2):
        residency = made(**SMALL)
        residency.policy.restore(state)
        steps: list = []
        residency.sink = lambda *step, steps=steps: steps.append(step)
        drive(residency, walk(60, seed=2))
        later.append((steps, residency.counts.kept))
    assert later[0] == later[1]
    assert later[0][1] > drive(made(**SMALL), walk(60, seed=2)).kept, "what was learned is of no use"


def test_a_state_of_another_width_is_refused() -> None:
    policy = made(**SMALL).policy
    with pytest.raises(ValueError, match=r"before_AH is .*16.*expected .*32"):
        policy.restore(made(**{**SMALL, "hidden": 16}).policy.state())
    with pytest.raises(ValueError, match="confidence_3 is None"):
        policy.restore({name: array for name, array in policy.state().items() if name != "confidence_3"})


def test_requests_share_forwards_and_forwards_may_break_off() -> None:
    residency = made(**SMALL)
    routes_TLK = walk(90)
    for number in range(40):
        rows = routes_TLK[[number, number + 20, number + 50]]
        info = ForwardInfo(
            forward_id=number,
            request_T=(0, 1, 1) if number % 2 else (2, 0, 1),
            phase_T=(Phase.DECODE,) * 3,
            position_T=(number,) * 3,
        )
        residency.begin_forward(info)
        for layer in range(2 if number % 7 == 6 else SPEC.num_layers):
            experts_TK = tuple(map(tuple, rows[:, layer].tolist()))
            residency.event(GateEvent(forward=info, layer=layer, experts_TK=experts_TK))
        residency.end_forward(info)
    for request in (0, 1, 2):
        residency.end_request(request)
    assert drive(residency, routes_TLK, request=3).needed > 0


def test_a_sample_says_how_far_each_use_is() -> None:
    """By hand: two layers, looked at after layer 0; key 0 of layer 0 and key 8 of layer 1."""
    spec = make_spec(layers=2, experts=8, top_k=1)
    past = Past(spec)
    sample = Sample(0, [3], None, past.features_FA)
    paths = [np.array([3, 8]), np.array([0, 9]), np.array([3, 8])] + [np.array([7, 15])] * (HORIZON - 2)
    sample.settle(paths, spec)
    expected = {0: 1, 3: DISCOUNT, 8: 1, 9: DISCOUNT, 7: DISCOUNT**2, 15: DISCOUNT**3}
    np.testing.assert_allclose(sample.target_A, [expected.get(key, 0) for key in range(16)], rtol=1e-3)


def test_past_use_is_averaged_and_aged() -> None:
    spec = make_spec(layers=2, experts=4, top_k=1)
    past = Past(spec)
    for used in ([1], [2], [1]):
        past.begin_forward()
        past.pass_layers(0, 1, used)
        past.pass_layers(1, 2, [4])
    assert past.use_RA[0].tolist() == [0, 0.625, 0.25, 0, 0.875, 0, 0, 0]
    assert past.age_A[1:5].tolist() == [0, 1, 53, 0]


def network(trained: bool = False) -> NextUse:
    weights = next_use.fresh(SPEC, 8, np.random.default_rng(3))
    for weight in weights.values():
        weight += np.random.default_rng(4).normal(0, 0.1, weight.shape).astype(np.float32)
    return NextUse(SPEC, weights, memory=64, learning_rate=1e-2, batch=8, seed=0, trained=trained)


def samples() -> list[Sample]:
    rng, past, routes_TLK = np.random.default_rng(0), Past(SPEC), walk(40)
    key_TS = (routes_TLK + np.arange(SPEC.num_layers)[:, None] * SPEC.num_experts).reshape(40, -1)
    made_of = []
    for token in range(8):
        past.begin_forward()
        layer = int(rng.integers(0, SPEC.num_layers))
        keys = key_TS[token, : (layer + 1) * 2].tolist()
        past.pass_layers(0, layer + 1, keys)
        made_of.append(Sample(layer, keys, key_TS[token - 1] if token else None, past.features_FA))
        made_of[-1].settle(list(key_TS[token : token + HORIZON + 1]), SPEC)
        past.pass_layers(layer + 1, SPEC.num_layers, key_TS[token, (layer + 1) * 2 :].tolist())
    return made_of


def test_gradients_are_those_of_autograd() -> None:
    net, batch = network(), samples()
    w = {name: torch.tensor(value, requires_grad=True) for name, value in net.weights.items()}
    net.backward(batch, 2)
    A, loss = len(w["value_A"]), torch.zeros(())
    bce = torch.nn.functional.binary_cross_entropy_with_logits
    for sample in batch:
        f_FA, target_A = (torch.tensor(x.astype(np.float32)) for x in (sample.features_FA, sample.target_A))
        use_A = (f_FA[past_use.HABIT].exp() - past_use.FLOOR).clamp(min=0)
        z_H = w["now_AH"][sample.now].sum(0) + use_A.sqrt() @ w["habit_AH"] + w["phase_LH"][sample.layer]
        if sample.before is not None:
            z_H = z_H + w["before_AH"][sample.before].sum(0)
        context_A = torch.relu(z_H) @ w["value_HA"]
        for head, extra in (("value", context_A), ("past", 0)):
            loss = loss + bce(extra + w[f"{head}_A"] + ((w[f"{head}_FA"] + w[f"{head}_F1"]) * f_FA).sum(0), target_A)
        if sample.layer + 1 < SPEC.num_layers:
            use_logit_A = torch.relu(z_H) @ w["use_HA"] + w["use_A"] + (w["use_FA"] * f_FA).sum(0)
            span = torch.arange(A) // SPEC.num_experts == sample.layer + 1
            loss = loss + next_use.USE_WEIGHT * bce(use_logit_A[span], (target_A[span] == 1).float())
    (loss / len(batch)).backward()
    for name, gradient in next_use.split_weights(net.gradient, net.sizes).items():
        np.testing.assert_allclose(gradient, w[name].grad, atol=1e-6, err_msg=name)


def test_what_was_fitted_keeps_its_say_while_it_predicts_better() -> None:
    net, batch = network(trained=True), samples()
    for name in ("value_HA", "value_A"):
        net.weights[name][:] = 30  # what learns is spoilt, and what was fitted is not
    for sample in batch:
        net.remember(sample)
    net.learn()
    learning, _, fitted = net.confidence_3
    assert fitted > learning


def test_a_predictor_of_its_kind_is_taken_and_others_are_left() -> None:
    predictor = build("next_use", SPEC, {"hidden": 8}).eval()
    taken = build_policy("foresight", SPEC, {}, SLOTS, predictor=predictor)
    assert isinstance(taken, Policy)
    np.testing.assert_array_equal(taken.net.weights["now_AH"], predictor.weights()["now_AH"])
    assert Policy.uses() and Policy.uses(predictor) and not Policy.uses(MadeUpPredictor(SPEC))


def test_the_predictor_computes_what_the_policy_does() -> None:
    """One network in two languages: the same values from the same path and past."""
    torch.manual_seed(1)
    predictor = build("next_use", SPEC, {"hidden": 8}).eval()
    routes_TLK = walk(12)
    seen = Tokens(experts_TPK=torch.from_numpy(routes_TLK), request_T=torch.zeros(12, dtype=torch.int64))
    made = predictor.prepare(seen)
    assert made.example_T is not None and made.example_T.tolist() == list(range(12))
    now, before, features, target = predictor.look(torch.tensor([10]), torch.tensor([1]))
    past = Past(SPEC)
    key_TS = (routes_TLK + np.arange(SPEC.num_layers)[:, None] * SPEC.num_experts).reshape(12, -1)
    for token in range(10):
        past.begin_forward()
        past.pass_layers(0, SPEC.num_layers, key_TS[token].tolist())
    past.begin_forward()
    past.pass_layers(0, 2, key_TS[10, :4].tolist())
    np.testing.assert_allclose(features[0], past.features_FA, atol=5e-3)
    assert np.flatnonzero(now[0]).tolist() == sorted(key_TS[10, :4].tolist())
    assert np.flatnonzero(before[0]).tolist() == sorted(key_TS[9].tolist())
    assert all(target[0, key] == 1 for key in key_TS[10, 4:].tolist())

    w = predictor.net
    z_H = now[0] @ w["now_AH"] + before[0] @ w["before_AH"] + w["phase_LH"][1]
    z_H = z_H + (features[0, past_use.HABIT].exp() - past_use.FLOOR).clamp(min=0).sqrt() @ w["habit_AH"]
    own_A = w["value_A"] + ((w["value_FA"] + w["value_F1"]) * features[0]).sum(0)
    expected_A = torch.sigmoid(torch.relu(z_H) @ w["value_HA"] + own_A).detach().numpy()
    net = NextUse(SPEC, predictor.weights(), memory=1, learning_rate=0, batch=1, seed=0, trained=True)
    net.confidence_3[:] = 0, -np.inf, -1
    net.take_in(past)
    own_H = net.begin_path(key_TS[9])
    net.follow_path(own_H, key_TS[10, :4].tolist())
    np.testing.assert_allclose(net.values(net.hidden_RH([own_H], 1), past), expected_A, atol=1e-2)


@pytest.mark.parametrize("option", [{"refresh": 0}, {"hidden": 0}, {"learning_rate": 0}, {"waste": -1}])
def test_bad_options_are_refused(option: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="policy foresight"):
        build_policy("foresight", SPEC, option, SLOTS)


def test_the_order_in_which_requests_end_decides_nothing() -> None:
    kept = []
    for ends in ([0, 1], [1, 0]):
        residency = Residency(build_policy("foresight", SPEC, {}, SLOTS))
        routes_TLK = walk(40)
        for token in range(0, 38, 2):
            forward, events = make_forward(SPEC, routes_TLK[token : token + 2], forward_id=token)
            info = replace(forward, request_T=(0, 1))
            residency.begin_forward(info)
            for event in events:
                residency.event(replace(event, forward=info))
            residency.end_forward(info)
        for request in ends:
            residency.end_request(request)
        for token in range(40):
            info, events = make_forward(SPEC, routes_TLK[token][None], forward_id=40 + token, request=2)
            residency.begin_forward(info)
            for event in events:
                residency.event(event)
            residency.end_forward(info)
        kept.append(residency.counts)
    assert kept[0] == kept[1]
