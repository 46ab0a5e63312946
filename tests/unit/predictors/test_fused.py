"""Inputs of fused from a request, from others and from itself; both forms of its network agree."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from moetool.base.errors import UsageError
from moetool.base.types import ForwardInfo, GateEvent, ModelSpec
from moetool.prediction.path_signals import GIVEN, SIGNALS
from moetool.prediction.path_trust import ALONE, DISTANCES, HitRecord, Offset
from moetool.trace.events import to_events
from moetool.trace.reader import KEEP, Trace
from moetool.training.evaluate import evaluate
from moetool.training.predictor import Predictor, build, save
from moetool.training.tokens import Tokens, from_rows
from moetool.training.training import options_for
from tests.refusals import refused
from tests.synthetic_routes import make_rows, make_spec, write_trace

OWN, MEMORY, PATH, LAST, STATES = (SIGNALS.index(name) for name in ("own", "memory", "path", "last", "states"))


def tokens_of(spec: ModelSpec, requests: int, seed: int = 0) -> Tokens:
    """Requests of a prompt of six tokens and four new ones, in order."""
    rng = np.random.default_rng(seed)
    parts = [from_rows(spec, make_rows(spec, 6, 4, request=r, first_forward=0, rng=rng)) for r in range(requests)]
    joined = {
        name: torch.cat([getattr(part, name) for part in parts])
        for name in ("experts_TPK", "weights_TPK", "hidden_TPD", "ahead_TPAE", "request_T", "iteration_T", "phase_T")
    }
    return Tokens(**joined)


def counted(spec: ModelSpec, **options: object) -> Predictor:
    torch.manual_seed(0)
    predictor = build("fused", spec, {"hidden": 16, **options}).eval().requires_grad_(False)
    predictor.count(tokens_of(spec, 4))
    return predictor


def show(predictor: Predictor, path: list[tuple[int, ...]], request: int, position: int) -> None:
    """One new token of a request that uses `path`, seen to its last layer."""
    info = ForwardInfo(forward_id=0, request_T=(request,), phase_T=(1,), position_T=(position,))
    for layer, experts in enumerate(path):
        weights = np.full((1, len(experts)), 0.5, np.float32)
        predictor.observe(GateEvent(forward=info, layer=layer, experts_TK=(experts,), weights_TK=weights))


def said(predictor: Predictor, path: list[tuple[int, ...]], request: int, position: int) -> np.ndarray:
    """f_ES of layer 2 once a token has used the first two of `path`."""
    show(predictor, path[:2], request, position)
    f_TES: np.ndarray = predictor.path.signals.signals(2)[0]  # type: ignore[union-attr]
    return f_TES[0]


PATH_LK = [(0, 5), (3, 4), (2, 7), (1, 6)]


def test_the_network_says_layer_by_layer_what_it_says_at_once() -> None:
    spec = make_spec(num_layers=6)
    predictor = counted(spec)
    rng = np.random.default_rng(3)
    rows = make_rows(spec, 1, 2, request=0, first_forward=0, rng=rng)
    tokens = from_rows(spec, rows)
    net = predictor.net
    before_TLE = torch.zeros(3, 6, spec.num_experts)
    before_TLE[1:] = torch.zeros(2, 6, spec.num_experts).scatter_(2, tokens.experts_TPK[:2], 1.0)
    hidden_PTH = net.hidden(net.marks(tokens.experts_TPK, tokens.weights_TPK), before_TLE)
    for token in range(3):
        _, events = to_events(spec, rows.select(slice(token, token + 1)), token)
        for event in events:
            predictor.observe(event)
            for coming in range(event.layer + 1, 6):
                expected_ME = net.logits(hidden_PTH, coming - event.layer)[event.layer, token]
                path_E = predictor.path.signals.signals(coming)[0][0, :, PATH]
                np.testing.assert_allclose(path_E, expected_ME.numpy(), rtol=1e-4, atol=1e-5)


def test_a_request_knows_its_own_paths_at_once_and_those_of_others_when_they_are_over() -> None:
    predictor = counted(make_spec())
    show(predictor, PATH_LK, request=1, position=0)
    own_ES = said(predictor, PATH_LK, request=1, position=1)
    assert own_ES[:, OWN].tolist() == [0, 0, 1, 0, 0, 0, 0, 1]
    assert own_ES[:, LAST].tolist() == [0, 0, 1, 0, 0, 0, 0, 1]
    other_ES = said(predictor, PATH_LK, request=2, position=0)  # the first one is over, since this forward lacks it
    assert not other_ES[:, [OWN, LAST]].any()
    assert other_ES[[2, 7], MEMORY].min() > 0.9


def test_requests_that_run_together_do_not_know_each_others_paths() -> None:
    predictor = counted(make_spec())
    weights_TK = np.full((2, 2), 0.5, np.float32)
    for position, layers in ((0, 4), (1, 2)):
        info = ForwardInfo(forward_id=0, request_T=(1, 2), phase_T=(1, 1), position_T=(position, position))
        for layer in range(layers):
            first = PATH_LK[layer]
            second = first if position else ((first[0] + 1) % 8, (first[1] + 1) % 8)
            predictor.observe(GateEvent(forward=info, layer=layer, experts_TK=(first, second), weights_TK=weights_TK))
    f_2ES = predictor.path.signals.signals(2)[0]
    assert f_2ES[0, [2, 7], OWN].tolist() == [1, 1]
    assert f_2ES[1, [2, 7], OWN].tolist() != [1, 1]
    assert f_2ES[1, [2, 7], MEMORY].max() < 0.9


def test_without_room_and_haste_nothing_is_learned() -> None:
    fixed, learning = counted(make_spec(), recent=0, haste=0.0), counted(make_spec())
    first = {p: said(p, PATH_LK, request=1, position=0) for p in (fixed, learning)}
    for predictor in first:
        for position in range(3):
            show(predictor, PATH_LK, request=2, position=position)
    assert np.array_equal(said(fixed, PATH_LK, request=3, position=0), first[fixed])
    assert not np.array_equal(said(learning, PATH_LK, request=3, position=0), first[learning])


def test_a_record_names_who_leads_where_and_in_what() -> None:
    record, ahead = HitRecord(3), ALONE.index("ahead")
    assert record.leader(1, 0, 2) is None  # nothing is known
    right_TR = np.full((60, 1 + len(ALONE)), 0.5)
    right_TR[:, 1 + ahead] = 0.7
    record.count(1, 0, 2, right_TR)
    assert record.leader(1, 0, 2) == record.leader(1, 0, 1) == ahead  # where a layer has told nothing, the others do
    assert record.leader(0, 0, 2) is record.leader(1, 1, 2) is None  # of prompts, and from farther: nothing
    began, common = HitRecord(3), HitRecord(3)
    common.add(began, record)
    assert common.leader(1, 0, 2) == ahead
    record.count(1, 0, 2, 1.2 - right_TR.repeat(60, axis=0))  # of late it is the worse
    assert record.leader(1, 0, 2) is None
    common.add(record, began)
    assert common.seen_PDL.min() == 0


def test_experts_are_ranked_as_the_signal_that_leads_ranks_them() -> None:
    """Later gates that are always right and that trust was never fitted for."""
    spec = make_spec()
    following, fixed = counted(spec, ahead=True), counted(spec, ahead=True, haste=0.0)
    for predictor in (following, fixed):
        predictor.trust_DS.zero_()
        predictor.trust_DS[:, SIGNALS.index("popularity")] = 0.25
    rng = np.random.default_rng(0)
    found: dict[Predictor, list[float]] = {following: [], fixed: []}
    for request in range(30):
        path_LK = [tuple(rng.permutation(8)[:2].tolist()) for _ in range(4)]
        for predictor, right in found.items():
            info = ForwardInfo(forward_id=0, request_T=(request,), phase_T=(1,), position_T=(0,))
            for layer, experts in enumerate(path_LK):
                ahead_ATE = np.full((3 - layer, 1, 8), 0.01, np.float32)
                for a in range(3 - layer):
                    ahead_ATE[a, 0, list(path_LK[layer + 1 + a])] = 0.4
                weights_TK = np.full((1, 2), 0.5, np.float32)
                predictor.observe(
                    GateEvent(
                        forward=info, layer=layer, experts_TK=(experts,), weights_TK=weights_TK, ahead_ATE=ahead_ATE
                    )
                )
                if layer < 3:
                    logit_E = predictor.scores(layer + 1)[0]
                    best = set(np.argsort(-logit_E)[:2].tolist())
                    right.append(len(best & set(path_LK[layer + 1])) / 2)
    assert np.mean(found[following][-30:]) == 1.0 and np.mean(found[fixed][-30:]) < 0.5


def test_trust_moves_away_from_what_misleads() -> None:
    offset = Offset(2)
    rng = np.random.default_rng(0)
    for _ in range(200):
        used_E = np.repeat([1.0, 0.0], 4)
        f_ES = np.stack([2 * used_E - 1, rng.normal(size=8)], axis=1)  # one is right, one is noise
        chance_E = 1 / (1 + np.exp(-(f_ES @ (offset.offset_S + np.array([0.0, 1.0])))))
        offset.step((chance_E - used_E) @ f_ES, 0.05)
    assert offset.offset_S[0] > 0.5
    assert offset.offset_S[1] < -0.5


def test_what_is_judged_was_hidden_and_is_not_learned_by_the_network() -> None:
    spec = make_spec(num_layers=3)
    predictor = counted(spec).train().requires_grad_(True)
    tokens = tokens_of(spec, 4)
    prepared = predictor.prepare(tokens)
    part = predictor.parts[0]
    judged_N = part.judged_N >= 0
    assert sorted(set(prepared.request_T[judged_N].tolist())) == [3]  # of fewer than four only the last
    said_DES = part.signals_JLDES[:, 1:].float()
    own = SIGNALS.index("own") - GIVEN
    assert not said_DES[:6, ..., own].any()  # a prompt has no path of its own before it
    index = torch.nonzero(judged_N).flatten()
    predictor.loss(prepared.take(index), torch.full((len(index),), 2)).backward()
    assert all(p.grad is None for p in predictor.net.parameters())
    assert predictor.trust_DS.grad is not None and bool(predictor.trust_DS.grad[0].any())
    assert not predictor.trust_DS.grad[DISTANCES.index(3) :].any()  # there are only three layers


def test_the_gates_are_looked_at_where_they_are_wanted() -> None:
    spec = make_spec()
    predictor = counted(spec, ahead=True)
    assert predictor.needs == {"experts", "weights", "ahead"}
    assert predictor.reach(1) == 4
    ahead = SIGNALS.index("ahead")
    info = ForwardInfo(forward_id=0, request_T=(0,), phase_T=(1,), position_T=(0,))
    weights_TK, ahead_ATE = np.full((1, 2), 0.5, np.float32), np.zeros((1, 1, 8), np.float32)
    ahead_ATE[0, 0, 3] = 0.9
    predictor.observe(
        GateEvent(forward=info, layer=0, experts_TK=((0, 1),), weights_TK=weights_TK, ahead_ATE=ahead_ATE)
    )
    near_ES, far_ES = (predictor.path.signals.signals(layer)[0][0] for layer in (1, 2))
    assert near_ES[:, ahead].argmax() == 3
    assert not far_ES[:, ahead].any()


def test_networks_on_hidden_states_say_the_same_in_fused_as_by_themselves() -> None:
    spec = make_spec(num_layers=6)
    predictor = counted(spec, states=True, stride=2)
    assert predictor.needs == {"experts", "weights", "hidden"}
    rows = make_rows(spec, 3, 0, request=0, first_forward=0, rng=np.random.default_rng(3))
    tokens = from_rows(spec, rows)
    for event in to_events(spec, rows, 0)[1]:
        predictor.observe(event)
        for coming in range(event.layer + 1, 6):
            said_TE = predictor.path.signals.signals(coming)[0][..., STATES]
            if coming - event.layer > 2:
                assert not said_TE.any()
                continue
            expected_TE = predictor.states.layer_scores(tokens.before(event.layer + 1), coming)
            np.testing.assert_allclose(said_TE, expected_TE.numpy(), rtol=1e-4, atol=1e-5)


def test_trust_in_hidden_states_is_fitted_on_each_tokens_own() -> None:
    """Requests that come mixed: trusting the states alone, the loss is that of their logits for the judged tokens."""
    spec = make_spec(num_layers=3)
    predictor = counted(spec, states=True).train().requires_grad_(True)
    tokens = tokens_of(spec, 4)
    mixed = tokens.take(torch.arange(len(tokens)).view(4, -1).T.flatten())  # the first of each, the second of each, ...
    prepared = predictor.prepare(mixed)
    assert prepared.hidden_TPD is None
    predictor.trust_DS.data.zero_()
    predictor.trust_DS.data[:, STATES] = 0.25
    predictor.eval()
    judged_N = torch.nonzero(predictor.parts[0].judged_N >= 0).flatten()
    for row in judged_N.tolist():
        one = prepared.take(slice(row, row + 1))
        own = tokens.take((tokens.request_T == one.request_T) & (tokens.experts_TPK == one.experts_TPK).all(2).all(1))
        chosen_1E = torch.zeros(1, 8).scatter_(1, own.experts_TPK[:, 2], 1.0)
        judged = predictor.judging_loss(
            replace(one, hidden_TPD=predictor.parts[0].hidden(one.example_T)),
            torch.tensor([2]),
            predictor.parts[0].before(one.example_T),
            predictor.parts[0],
            predictor.parts[0].judged_N[[row]],
        )
        expected = [
            torch.nn.functional.binary_cross_entropy_with_logits(
                predictor.states.layer_scores(own.before(3 - distance), 2), chosen_1E
            )
            for distance in (1, 2)
        ]
        torch.testing.assert_close(judged, torch.stack(expected).mean(), rtol=1e-3, atol=1e-4)


def test_columns_that_the_trace_holds_are_looked_at_unless_told_otherwise() -> None:
    assert options_for("fused", KEEP, {"hidden": 8}) == {"ahead": True, "states": True, "hidden": 8}
    assert options_for("fused", KEEP, {"states": False}) == {"ahead": True, "states": False}
    assert options_for("fused", {"experts", "weights", "ahead"}, {}) == {"ahead": True}
    assert options_for("promoe", KEEP, {}) == options_for("fused", {"experts", "weights"}, {}) == {}


def test_options_that_mean_nothing_are_refused() -> None:
    spec = make_spec()
    for options, message in (
        ({"paths": 0}, "paths is 0"),
        ({"haste": -1.0}, r"haste is -1\.0"),
        ({"hidden": 0}, "hidden"),
    ):
        with pytest.raises(UsageError, match=message):
            build("fused", spec, options)
    with refused(UsageError, "forget", "1.0"):
        build("path_mlp", spec, {"forget": 1.0})


def test_path_mlp_learns_from_all_layers_at_once_and_forgets_only_in_training() -> None:
    spec = make_spec(num_layers=5)
    torch.manual_seed(0)
    predictor = build("path_mlp", spec, {"hidden": 16})
    tokens = tokens_of(spec, 2)
    predictor.count(tokens)
    layer_N = torch.ones(len(tokens), dtype=torch.int64)
    assert not torch.equal(predictor.loss(tokens, layer_N), predictor.loss(tokens, layer_N))
    predictor.eval()
    chosen_TLE = torch.zeros(len(tokens), 5, 8).scatter_(2, tokens.experts_TPK, 1.0)
    losses = []
    for distance in (1, 1, 2, 3, 4):  # the next layer counts twice
        each = [
            torch.nn.functional.binary_cross_entropy_with_logits(
                predictor.layer_scores(tokens.before(layer - distance + 1), layer), chosen_TLE[:, layer]
            )
            for layer in range(distance, 5)
        ]
        losses.append(torch.stack(each).mean())
    torch.testing.assert_close(predictor.loss(tokens, layer_N), torch.stack(losses).mean())


def test_what_is_learned_of_one_trace_is_not_known_of_the_next(tmp_path: Path) -> None:
    known = write_trace(tmp_path / "known", num_requests=8)
    strange = write_trace(tmp_path / "strange", num_requests=3, seed=1, first_prompt=100)
    (tmp_path / "out").mkdir()
    facts = {
        "trace": {"sha256": Trace(known).sha256, "tokens": Trace(known).num_tokens},
        "requests": {"train": [0, 1, 2, 3], "validation": [4], "test": [5, 6, 7]},
        "seen_prompts": [],
        "tokens": {"train": 40},
        "fit": {},
        "seconds": 0.0,
    }
    save(counted(make_spec()), tmp_path / "out", facts)
    both = evaluate([tmp_path / "out"], known, unseen_task=strange)
    after = next(e for e in both if e.unseen_task and e.predictor == "fused")
    alone = evaluate([tmp_path / "out"], strange)[0]
    assert after.scores == alone.scores
