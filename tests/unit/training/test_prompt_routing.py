"""Transformers that predict a prompt before it runs: what they may see, what they add up to, what they learn."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from moetool.base import durable
from moetool.base.errors import MismatchError, UsageError
from moetool.base.types import GateEvent
from moetool.capture.run import CaptureOptions, capture
from moetool.prompts import gather
from moetool.trace.events import to_events
from moetool.trace.reader import Trace
from moetool.trace.writer import TraceWriter
from moetool.training.predictor import build
from moetool.training.tokens import Tokens, read
from tests.refusals import refused
from tests.synthetic_routes import make_rows, make_spec

SPEC = make_spec()
NAMES = ("single_transformer", "cascade")
both = pytest.mark.parametrize("name", NAMES)


def _built(name: str, seed: int = 0, **options: Any) -> Any:
    torch.manual_seed(seed)
    predictor = build(name, SPEC, {"width": 16, "heads": 2, "vocabulary": 32} | options).eval().requires_grad_(False)
    rng = np.random.default_rng(0)
    predictor.count(
        Tokens(experts_TPK=torch.from_numpy(rng.integers(0, 8, (64, 4, 2))), token_id_T=torch.arange(64) % 10)
    )
    return predictor


def _events(ids: list[int], start: int = 0, request: int = 0, phase: int = 0) -> list[GateEvent]:
    """A forward of some tokens of a request, of which nothing but the ids and the positions tells anything."""
    rows = make_rows(SPEC, len(ids), 0, request=request, first_forward=0, rng=np.random.default_rng(1))
    rows.token_id_T[:] = ids
    rows.position_T += start
    rows.phase_T[:] = phase
    return to_events(SPEC, rows, 0)[1]


def _said(predictor: Any, events: list[GateEvent]) -> torch.Tensor:
    predictor.observe(events[0])
    return torch.from_numpy(np.stack([predictor.scores(layer) for layer in range(4)], axis=1))


@both
def test_no_token_sees_a_later_one(name: str) -> None:
    predictor = _built(name)
    first_SLE = predictor.logits(torch.tensor([[1, 2, 3, 4, 5]]))[0]
    other_SLE = predictor.logits(torch.tensor([[1, 2, 3, 7, 8]]))[0]
    torch.testing.assert_close(first_SLE[:3], other_SLE[:3])
    assert (first_SLE[3:] - other_SLE[3:]).abs().amax(dim=(1, 2)).min() > 1e-3
    earlier_SLE = predictor.logits(torch.tensor([[9, 2, 3, 4, 5]]))[0]
    assert (first_SLE - earlier_SLE).abs().amax(dim=(1, 2)).min() > 1e-3  # all of them see the first


@both
def test_a_prompt_in_chunks_is_predicted_as_in_the_whole_and_decode_by_its_mean(name: str) -> None:
    predictor, ids = _built(name), [1, 2, 3, 4, 5, 6]
    whole_SLE = _said(predictor, _events(ids))
    torch.testing.assert_close(whole_SLE, predictor.logits(torch.tensor([ids]))[0])
    parts = [_said(predictor, _events(ids[a:b], start=a)) for a, b in ((0, 2), (2, 5), (5, 6))]
    torch.testing.assert_close(torch.cat(parts), whole_SLE)
    mean_LE = whole_SLE.sigmoid().mean(dim=0)
    for token in (3, 8):  # whichever the new token is, only the prompt tells of it
        torch.testing.assert_close(_said(predictor, _events([token], 6, phase=1))[0].sigmoid(), mean_LE)
    torch.testing.assert_close(_said(predictor, _events([3], 6, request=5, phase=1))[0], predictor.base_LE)


def test_a_stage_sees_the_routing_that_the_one_before_it_predicted_and_no_other() -> None:
    predictor = _built("cascade", stages=3, boundaries=(1, 3))
    assert predictor.blocks == ((0, 1), (1, 3), (3, 4))
    assert [stage.routing and stage.routing.in_features for stage in predictor.stages] == [None, 8, 16]
    prompt_1S = torch.tensor([[1, 2, 3]])
    before_SLE = predictor.logits(prompt_1S)[0]
    predictor.stages[1].output.bias[0] += 3.0  # of layer 1
    change_L = (predictor.logits(prompt_1S)[0] - before_SLE).abs().amax(dim=(0, 2))
    assert change_L[0] == 0 and change_L[2] == 0
    assert change_L[1] == pytest.approx(3.0, abs=1e-5) and change_L[3] > 1e-3
    predictor = _built("cascade", stages=3, boundaries=(1, 3))
    predictor.stages[0].output.bias[0] += 3.0  # of layer 0: reaches the last stage through the one between
    assert ((predictor.logits(prompt_1S)[0] - before_SLE).abs().amax(dim=(0, 2)) > 1e-4).all()
    predictor.stages[1].routing.weight.zero_()
    cut_SLE = predictor.logits(prompt_1S)[0]
    predictor.stages[0].output.bias[0] -= 3.0
    torch.testing.assert_close(predictor.logits(prompt_1S)[0][:, 1:], cut_SLE[:, 1:])


def test_a_cascade_of_one_stage_is_the_single_transformer() -> None:
    one, single = _built("cascade", stages=1), _built("single_transformer")
    prompt_1S = torch.tensor([[1, 2, 3]])
    assert torch.equal(one.logits(prompt_1S), single.logits(prompt_1S))


@pytest.mark.parametrize(
    ("num_layers", "stages", "blocks"),
    [(5, 2, ((0, 3), (3, 5))), (7, 3, ((0, 3), (3, 5), (5, 7))), (3, 3, ((0, 1), (1, 2), (2, 3)))],
)
def test_blocks_are_as_equal_as_they_can_be(num_layers: int, stages: int, blocks: Any) -> None:
    predictor: Any = build("cascade", make_spec(num_layers), {"stages": stages})
    assert predictor.blocks == blocks


@both
def test_a_workload_is_the_sum_over_the_tokens_and_counts_all_of_them(name: str) -> None:
    predictor, prompt = _built(name), [1, 2, 3, 4, 5]
    load_LE = predictor.workload(prompt)
    assert load_LE.shape == (4, 8) and load_LE.min() >= 0
    np.testing.assert_allclose(load_LE.sum(axis=1), 5 * 2)
    expected_LE = np.zeros((4, 8))
    for chance_LE in predictor.logits(torch.tensor([prompt]))[0].double().sigmoid().numpy():
        for layer in range(4):
            expected_LE[layer] += 2 * chance_LE[layer] / chance_LE[layer].sum()
    np.testing.assert_allclose(load_LE, expected_LE)
    np.testing.assert_allclose(predictor.workload(prompt, new_tokens=10), 3 * load_LE)
    with refused(UsageError, "no tokens"):
        predictor.workload([])


@both
def test_counted_are_the_most_frequent_ids_and_how_often_an_expert_is_chosen(name: str) -> None:
    predictor = _built(name, vocabulary=3)
    ids_T = torch.tensor([9, 9, 4, 4, 7, 2, 2, 30])
    experts_TPK = torch.tensor([[0, 1]] * 6 + [[0, 2]] * 2)[:, None].repeat(1, 4, 1).to(torch.int16)
    predictor.count(Tokens(experts_TPK=experts_TPK, token_id_T=ids_T))
    assert predictor.id_V.tolist() == [2, 4, 9]
    share_E = predictor.base_LE[3].sigmoid()
    smoothed = [(n + 0.25) / 9 for n in (8, 6, 2, 0)]
    torch.testing.assert_close(share_E[:4], torch.tensor(smoothed))
    unknown = [predictor.logits(torch.tensor([[token]])) for token in (0, 7, 30, 1 << 40)]
    assert all(torch.equal(logits, unknown[0]) for logits in unknown)
    assert not torch.equal(predictor.logits(torch.tensor([[9]])), unknown[0])


@both
def test_the_loss_is_of_what_is_said_of_every_request(name: str) -> None:
    """Requests of unlike length, padded together in training, one by one when they run."""
    predictor = _built(name)
    ids, lengths = torch.tensor([1, 2, 3, 4, 5, 6, 7]), (2, 5)
    experts_TPK = torch.from_numpy(np.random.default_rng(2).integers(0, 8, (7, 4, 2)))
    request_T = torch.tensor([3, 3, 1, 1, 1, 1, 1])
    loss = predictor.loss(Tokens(experts_TPK=experts_TPK, token_id_T=ids, request_T=request_T), torch.ones(7))
    logits_TLE = torch.cat([predictor.logits(part[None])[0] for part in ids.split(lengths)])
    chosen_TLE = torch.zeros(7, 4, 8).scatter_(2, experts_TPK, 1.0)
    assert loss.item() == pytest.approx(F.binary_cross_entropy_with_logits(logits_TLE, chosen_TLE).item(), rel=1e-5)


@both
def test_it_learns_a_rule_of_this_token_and_the_one_before(name: str) -> None:
    """Each layer uses the expert of the token and that of the one before it, shifted by the layer."""
    torch.manual_seed(0)
    predictor: Any = build(name, SPEC, {"width": 32, "vocabulary": 8, "dropout": 0.0})

    def draw(seed: int) -> Tokens:
        ids_RS = torch.randint(0, 4, (32, 6), generator=torch.Generator().manual_seed(seed))
        before_RS = torch.cat([ids_RS[:, :1], ids_RS[:, :-1]], dim=1)
        shift_L = torch.arange(4)
        experts = torch.stack([(ids_RS[..., None] + shift_L) % 4, 4 + (before_RS[..., None] + shift_L) % 4], dim=3)
        return Tokens(
            experts_TPK=experts.flatten(0, 1),
            token_id_T=ids_RS.flatten(),
            request_T=torch.arange(32).repeat_interleave(6),
        )

    train, held_out = draw(1), draw(2)
    predictor.count(train)
    optimizer = torch.optim.Adam(predictor.parameters(), 5e-3)
    for _ in range(60):
        optimizer.zero_grad()
        predictor.loss(train, torch.ones(1)).backward()
        optimizer.step()
    predictor.eval().requires_grad_(False)
    assert held_out.token_id_T is not None
    best_TLK = predictor.logits(held_out.token_id_T.view(32, 6)).flatten(0, 1).topk(2).indices
    right = (best_TLK.sort().values == held_out.experts_TPK.sort().values).double().mean()
    assert right > 0.95  # by the token alone it would be 0.5 + 1/8


@pytest.mark.follows("moetool.training.prompt_routing PromptPredictor.logits")
@pytest.mark.follows("moetool.training.tokens _with_ids")
@both
def test_withheld_ids_are_refused(name: str, tmp_path: Path) -> None:
    predictor = _built(name)
    with refused(MismatchError, name):
        predictor.workload([3, -1])
    with refused(MismatchError, "some", "withheld"):
        predictor.observe(_events([-1, -1])[0])
    with durable.staged_directory(tmp_path / "trace") as staged:
        writer = TraceWriter(staged, SPEC, ["topk"], 0)
        rows = make_rows(SPEC, 2, 2, request=0, first_forward=0, rng=np.random.default_rng(0))
        writer.add_request(0, dataset="d", task="t", prompt_id="0", prompt_tokens=2, new_tokens=2)
        writer.append(replace(rows, token_id_T=np.array([1, 2, -1, 3], np.int32)))
        writer.finish(composition={"kind": "sequential"}, provenance={})
    with refused(MismatchError, "withholds", "token", "ids"):
        read(Trace(tmp_path / "trace"), predictor.needs, [0], tmp_path)
    assert read(Trace(tmp_path / "trace"), {"experts"}, [0], tmp_path).token_id_T is None
    options = CaptureOptions(max_new_tokens=1)
    capture("reference", list(gather.load(["arithmetic"], max_prompts=1)), tmp_path / "captured", options)
    token_id_T = read(Trace(tmp_path / "captured"), predictor.needs, [0], tmp_path).token_id_T
    assert token_id_T is not None
    predictor.workload(token_id_T.tolist())


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("single_transformer", {"width": 30}, "width is 30, expected an even multiple of heads, which is 4"),
        ("single_transformer", {"vocabulary": 0}, "vocabulary is 0"),
        ("single_transformer", {"stages": 2}, "unknown option of single_transformer"),
        ("cascade", {"epochs": 3}, "unknown option of cascade 'epochs': did you mean 'fit.max_epochs'"),
        ("cascade", {"dropout": 1.0}, "dropout is 1.0"),
        ("cascade", {"stages": 0}, "stages is 0"),
        ("cascade", {"stages": 5}, "stages is 5, expected at most the 4 MoE layers"),
        ("cascade", {"boundaries": [1, 2]}, "2 boundaries for 2 stages, expected 1"),
        ("cascade", {"stages": 3, "boundaries": [2, 2]}, "ascend between 1 and 3"),
        ("cascade", {"boundaries": [4]}, "ascend between 1 and 3"),
    ],
)
def test_wrong_options_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build(name, SPEC, options)
