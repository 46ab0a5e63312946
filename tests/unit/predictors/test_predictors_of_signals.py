"""The predictors that look at hidden states, gates, embeddings and requests, against numbers worked out another way."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from moetool.base.errors import MismatchError, UsageError
from moetool.base.types import GateEvent, ModelSpec
from moetool.trace.events import to_events
from moetool.trace.rows import TokenBatch
from moetool.training.predictor import Predictor, build
from moetool.training.tokens import Tokens, from_rows
from tests.refusals import refused
from tests.synthetic_routes import AHEAD, make_rows, make_spec

SPEC = make_spec()


def _rows(num_requests: int = 1, prompt: int = 3, new: int = 2) -> list[TokenBatch]:
    rng = np.random.default_rng(0)
    return [make_rows(SPEC, prompt, new, request=r, first_forward=0, rng=rng) for r in range(num_requests)]


def _events(rows: TokenBatch, embedding_TD: np.ndarray | None = None, spec: ModelSpec = SPEC) -> list[GateEvent]:
    return to_events(spec, rows, 0, embedding_TD=embedding_TD)[1]


def _built(name: str, **options: Any) -> Predictor:
    torch.manual_seed(0)
    return build(name, SPEC, options).eval().requires_grad_(False)


def test_gate_ahead_says_what_the_gates_said() -> None:
    predictor = _built("gate_ahead")
    events = _events(_rows()[0])
    for event in events[:-1]:
        predictor.observe(event)
        assert event.ahead_ATE is not None
        for a, row_TE in enumerate(event.ahead_ATE):
            np.testing.assert_array_equal(predictor.scores(event.layer + 1 + a), row_TE)
    assert predictor.reach(AHEAD) == AHEAD and predictor.reach(20) == 8


def test_gates_that_are_not_known_so_far_ahead_are_refused() -> None:
    predictor = _built("gate_ahead")
    event = _events(_rows()[0])[0]
    assert event.ahead_ATE is not None
    predictor.observe(replace(event, ahead_ATE=event.ahead_ATE[:1]))
    predictor.scores(1)
    with refused(MismatchError, "2 layers ahead", "1"):
        predictor.scores(2)


def test_promoe_reads_one_layer_and_its_loss_is_that_of_every_layer_and_distance() -> None:
    predictor: Any = _built("promoe", stride=2, hidden=5)
    tokens = from_rows(SPEC, _rows()[0])
    predictor.count(tokens)
    assert tokens.hidden_TPD is not None
    losses = []
    for last in range(3):
        x_TD = tokens.hidden_TPD[:, last].double()
        x_TD = (x_TD - x_TD.mean(dim=0)) / x_TD.std(dim=0, unbiased=False)
        inner_TH = (x_TD @ predictor.in_MDH[last].double() + predictor.in_MH[last]).clamp(min=0)
        logits_TSE = (inner_TH @ predictor.out_MHF[last].double() + predictor.out_MF[last]).view(-1, 2, 8)
        for layer in range(last + 1, min(last + 3, 4)):
            expected_TE = logits_TSE[:, layer - last - 1]
            scores_TE = predictor.layer_scores(tokens.before(last + 1), layer)
            torch.testing.assert_close(scores_TE.double(), expected_TE, rtol=1e-4, atol=1e-4)
            chosen_TE = torch.zeros_like(expected_TE).scatter_(1, tokens.experts_TPK[:, layer], 1.0)
            losses.append(F.binary_cross_entropy_with_logits(expected_TE, chosen_TE))
    assert len(losses) == 2 + 2 + 1
    loss = predictor.loss(tokens, torch.ones(len(tokens), dtype=torch.int64))
    assert loss.item() == pytest.approx(torch.stack(losses).mean().item(), rel=1e-4)


def test_the_lstm_learns_by_the_steps_that_it_takes_while_it_watches() -> None:
    """Requests of unlike length, padded together in training, one forward at a time when they run."""
    predictor: Any = _built("lstm", hidden=6)
    rng = np.random.default_rng(1)
    parts, targets, logits = [], [], []
    for request, new in enumerate((3, 1)):
        rows = make_rows(SPEC, 4, new, request=request, first_forward=0, rng=rng)
        embedding_TD = np.empty((len(rows), SPEC.hidden_size), np.float32)
        for iteration in range(new + 1):
            mine = rows.iteration_T == iteration
            embedding_TD[mine] = rng.normal(size=SPEC.hidden_size)
            events = _events(rows.select(mine), embedding_TD[mine])
            for event in events:
                predictor.observe(event)
                said_TLE = [predictor.scores(layer) for layer in range(4)]  # nothing more is known later
                logits.append(torch.from_numpy(np.stack(said_TLE)[:, 0]))
                used_E = torch.zeros(4, len(event.experts_TK), 8)
                for layer in range(4):
                    used_E[layer].scatter_(1, torch.tensor(events[layer].experts_TK), 1.0)
                targets.append(used_E.mean(dim=1))
        parts.append(from_rows(SPEC, rows, embedding_TD))
    joined = {f: torch.cat([getattr(p, f) for p in parts]) for f in ("experts_TPK", "embedding_TD")}
    joined |= {f: torch.cat([getattr(p, f) for p in parts]) for f in ("request_T", "iteration_T")}
    loss = predictor.loss(Tokens(**joined), torch.ones(12))
    expected = F.binary_cross_entropy_with_logits(torch.stack(logits), torch.stack(targets))
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


def test_the_activation_matrix_follows_the_request_most_alike() -> None:
    spec = make_spec(num_layers=2, num_experts=4, top_k=1)
    predictor = build("activation_matrix", spec)
    experts_TPK = torch.tensor([[[0], [3]], [[0], [2]], [[1], [1]], [[1], [0]], [[1], [1]]])
    predictor.count(Tokens(experts_TPK=experts_TPK, request_T=torch.tensor([7, 7, 9, 9, 9])))

    def token(request: int, expert: int, position: int = 0) -> list[float]:
        rows = make_rows(spec, 1, 0, request=request, first_forward=0, rng=np.random.default_rng(0))
        rows.position_T[:] = position
        predictor.observe(replace(_events(rows, spec=spec)[0], experts_TK=((expert,),)))
        return predictor.scores(1)[0].tolist()

    # The unit row of counts 1, 1 as shares is a half each; of counts 1, 2 it is a third and two thirds.
    assert token(1, 0) == pytest.approx([0, 0, 0.5, 0.5])
    assert token(2, 1) == pytest.approx([1 / 3, 2 / 3, 0, 0])
    assert token(2, 0, position=1) == pytest.approx([0, 0, 0.5, 0.5])  # a tie goes to the earlier one
    assert token(2, 0, position=0) == pytest.approx([0, 0, 0.5, 0.5])  # begun again
    assert token(2, 1, position=1) == pytest.approx([0, 0, 0.5, 0.5])
    assert token(2, 1, position=2) == pytest.approx([1 / 3, 2 / 3, 0, 0])


def test_affinity_farther_ahead_goes_through_the_layers_between() -> None:
    spec = make_spec(num_layers=3, num_experts=3, top_k=1)
    predictor = build("affinity", spec)
    predictor.get_buffer("affinity_MEE").copy_(torch.rand(2, 3, 3))
    first_EE, second_EE = predictor.get_buffer("affinity_MEE")
    scores_TE = predictor.layer_scores(Tokens(experts_TPK=torch.tensor([[[1]]])), 2)
    expected_E = [sum(first_EE[1, i] * second_EE[i, j] for i in range(3)) for j in range(3)]
    torch.testing.assert_close(scores_TE[0], torch.stack(expected_E))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("promoe", {"stride": 0}, "stride is 0"),
        ("promoe", {"dropout": 1.0}, "dropout is 1.0"),
        ("lstm", {"hidden": 0}, "hidden is 0"),
        ("activation_matrix", {"history": 0}, "history is 0"),
        ("gate_ahead", {"distance": 2}, "unknown option of gate_ahead"),
    ],
)
def test_wrong_options_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build(name, SPEC, options)
