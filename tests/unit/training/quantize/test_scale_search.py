"""Which scales are chosen, from tokens and weights made by hand; and the replica as a predictor."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from moetool.base.errors import MismatchError, UsageError
from moetool.base.types import ForwardInfo, GateEvent, Phase
from moetool.models.checkpoint import Checkpoint
from moetool.models.loading import load_full
from moetool.models.router_hooks import watch
from moetool.models.weights.packed import Scheme, round_weight
from moetool.prompts.gather import Prompt
from moetool.training.predictor import Predictor, load_predictor
from moetool.training.quantize.activations import round_tokens
from moetool.training.quantize.calibration import Calibration, from_prompts
from moetool.training.quantize.folding import ScaleFold
from moetool.training.quantize.replica import make_replica
from moetool.training.quantize.replica_layers import ReplicaOptions
from moetool.training.quantize.scale_search import Inputs, SearchOptions, round_clipped, scale_of, search
from tests import families
from tests.refusals import refused

SCHEME = Scheme(group=16)


def _layer(width: int = 32) -> torch.nn.Module:
    torch.manual_seed(2)
    return torch.nn.ModuleDict({"proj": torch.nn.Linear(width, 24, bias=False)})


def _inputs(x_TI: torch.Tensor) -> Inputs:
    return Inputs(calls={"proj": [((x_TI,), {})]}, mean={"proj": x_TI.abs().mean(0)})


FOLD = ScaleFold(name="proj", before=(), readers=("proj.weight",), inspect="proj")


def _error(layer: torch.nn.Module, x_TI: torch.Tensor, scale_I: torch.Tensor) -> float:
    weight = layer.get_parameter("proj.weight").detach()
    near = round_weight(weight * scale_I, SCHEME, torch.float32).dense() / scale_I
    return float((x_TI @ (near - weight).T).square().sum())


def test_the_scale_is_the_best_of_the_grid() -> None:
    layer = _layer()
    x_TI = torch.randn(64, 32)
    x_TI[:, ::7] *= 30  # a few channels carry nearly everything, and their weights are small
    layer.get_parameter("proj.weight").data[:, ::7] /= 8
    found, (alpha,) = search(layer, FOLD, _inputs(x_TI), {"proj.weight": SCHEME}, torch.float32, SearchOptions(grid=10))
    mean = x_TI.abs().mean(0)
    errors = {i / 10: _error(layer, x_TI, scale_of(mean, i / 10)) for i in range(11)}
    assert alpha == min(errors, key=errors.__getitem__) > 0
    assert torch.equal(found, scale_of(mean, alpha))
    assert errors[alpha] < 0.7 * errors[0.0]


def test_no_grid_means_no_scale() -> None:
    found, alphas = search(
        _layer(), FOLD, _inputs(torch.randn(8, 32)), {"proj.weight": SCHEME}, torch.float32, SearchOptions(grid=0)
    )
    assert alphas == [0.0] and bool((found == 1).all())


def test_experts_that_saw_too_few_tokens_keep_their_columns() -> None:
    layer = torch.nn.Module()
    layer.down = torch.nn.Parameter(torch.randn(2, 24, 32))
    x_TI = torch.randn(40, 32) * torch.logspace(-1, 1, 32)
    inputs = Inputs(
        mean={"down": x_TI.abs().mean(0).expand(2, -1)},
        tokens_E=torch.tensor([40, 3]),
        middle={0: x_TI, 1: x_TI[:3]},
    )
    fold = ScaleFold(name="down", before=(), readers=("down",), inspect="experts")
    found, alphas = search(layer, fold, inputs, {"down": SCHEME}, torch.float32, SearchOptions(grid=5))
    assert alphas[0] > 0 and alphas[1] == 0
    assert bool((found[1] == 1).all()) and not bool((found[0] == 1).all())


@pytest.mark.parametrize("symmetric", [True, False])
def test_cut_ranges_err_less_where_it_counts(symmetric: bool) -> None:
    weight = torch.randn(40, 32, generator=torch.Generator().manual_seed(1)) ** 3  # outliers
    square_I = torch.linspace(0.1, 5, 32)
    scheme = replace(SCHEME, symmetric=symmetric)

    def error(near: torch.Tensor) -> torch.Tensor:
        return ((near - weight).square() * square_I).unflatten(-1, (-1, 16)).sum(-1)

    plain, cut = (error(round_clipped(weight, scheme, torch.float32, s).dense()) for s in (None, square_I))
    assert bool((cut <= plain).all()) and cut.sum() < plain.sum()


def test_a_shared_value_head_has_the_mean_of_its_readers() -> None:
    fold = ScaleFold(name="o", before=(), readers=(), channel_I=torch.tensor([0, 1, 0, 1, 2, 2]), inspect="o")
    assert fold.gather(torch.tensor([1.0, 2, 3, 4, 5, 6])).tolist() == [2.0, 3.0, 5.5]
    assert fold.spread(torch.tensor([7.0, 8, 9])).tolist() == [7, 8, 7, 8, 9, 9]


def test_activations_are_rounded_by_token() -> None:
    x = torch.tensor([[7.0, 3.4, -0.6], [70.0, 34.0, -6.0]])
    assert torch.allclose(round_tokens(x, 4), torch.tensor([[7.0, 3, -1], [70, 30, -10]]))
    assert round_tokens(torch.zeros(1, 3), 8).tolist() == [[0, 0, 0]]


class _Words:
    """A tokenizer of one token a word."""

    eos_token_id = 0

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [len(word) for word in text.split()]}


def _prompts(count: int) -> list[Prompt]:
    return [Prompt(dataset="d", task="t", prompt_id=str(i), text="a bb ccc " * (i + 1)) for i in range(count)]


def test_no_prompt_both_chooses_and_judges() -> None:
    made = from_prompts(_prompts(30), _Words(), 100, length=16, max_tokens=512, seed=0)
    assert made.ids_NS.shape == (32, 16) and made.judged_NS.shape[1] == 16
    assert 0 < len(made.judged_NS) <= 8 and 5 < len(made.seen_prompts) <= 24
    again = from_prompts(_prompts(30), _Words(), 100, length=16, max_tokens=512, seed=0)
    assert torch.equal(made.ids_NS, again.ids_NS)
    with refused(UsageError, 128, 16):
        from_prompts(_prompts(5), _Words(), 100, length=16, max_tokens=512, seed=0)
    with refused(UsageError, "max_tokens", 100, 128):
        from_prompts(_prompts(30), _Words(), 100, length=16, max_tokens=100, seed=0)


@pytest.fixture(scope="module")
def replica(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replica")
    families.save("deepseek_v3", folder / "model")  # its choice is not the top of its scores
    ids = torch.randint(3, 64, (3, 16), generator=torch.Generator().manual_seed(8))
    make_replica(
        Checkpoint.open(folder / "model"),
        folder / "out",
        Calibration(ids_NS=ids, judged_NS=ids),
        ReplicaOptions(group=16, grid=0),
    )
    return folder / "out"


def _event(predictor: Predictor, ids: Sequence[int], start: int, request: int, phase: Phase) -> GateEvent:
    info = ForwardInfo(
        forward_id=0,
        request_T=(request,) * len(ids),
        phase_T=(phase,) * len(ids),
        position_T=tuple(range(start, start + len(ids))),
        token_id_T=tuple(ids),
    )
    return GateEvent(forward=info, layer=0, experts_TK=((0, 1),) * len(ids))


def _chosen(predictor: Predictor, layer: int) -> list[set[int]]:
    return [set(row.tolist()) for row in torch.from_numpy(predictor.scores(layer)).topk(2, dim=1).indices]


def test_predicts_what_its_routers_choose(replica: Path) -> None:
    predictor = load_predictor(replica)
    ids = [(5 * i + 3) % 60 + 3 for i in range(14)]
    plain = load_full(Checkpoint.open(replica), torch.float32)
    routes: dict[int, torch.Tensor] = {}
    for layer in plain.layers:
        watch(layer, lambda index, _, layer=layer: routes.update({layer.index: index}))  # type: ignore[misc]
    with torch.inference_mode():
        plain.model(torch.tensor([ids]), use_cache=False)
    expected = [set(row.tolist()) for row in routes[1]]
    found: list[set[int]] = []
    for start, end in ((0, 6), (6, 12), (12, 13), (13, 14)):  # a prompt in chunks, then two tokens
        predictor.observe(_event(predictor, ids[start:end], start, 7, Phase.PREFILL if end <= 12 else Phase.DECODE))
        found += _chosen(predictor, 1)
        predictor.observe(_event(predictor, [9, 9], 0, 8, Phase.PREFILL))  # another request between them
    assert found == expected
    scores = predictor.scores(1)
    assert scores.dtype == np.float32 and ((scores >= 1).sum(1) == 2).all() and (scores < 2).all()
    chance = predictor.probabilities(torch.from_numpy(scores))
    assert torch.allclose(chance.sum(1), torch.tensor(2.0), atol=1e-2)
    told_SLE, new_LE = predictor.predict_prompt(ids)
    assert [set(row.tolist()) for row in told_SLE[:, 1].topk(2, dim=1).indices] == expected
    assert torch.equal(new_LE, told_SLE.mean(0))
    load_LE = predictor.workload(ids, new_tokens=len(ids))
    np.testing.assert_allclose(load_LE.sum(1), 2 * 2 * len(ids))


def test_rounded_activations_change_what_it_says_and_nothing_after(replica: Path) -> None:
    rounded, plain = load_predictor(replica, {"awq_replica": {"activation_bits": 4}}), load_predictor(replica)
    assert rounded.options.activation_bits == 4
    unpacked = load_predictor(replica, {"awq_replica": {"unpacked": True}})
    assert plain.num_bytes < sum(file.stat().st_size for file in replica.glob("*.safetensors")) < unpacked.num_bytes
    event = _event(plain, list(range(3, 40)), 0, 0, Phase.PREFILL)
    for predictor in (rounded, plain, unpacked):
        predictor.observe(event)
    np.testing.assert_allclose(unpacked.scores(1), plain.scores(1), atol=1e-5)
    assert not np.array_equal(rounded.scores(1), plain.scores(1))
    rounded.bits = 16
    rounded.observe(event)
    np.testing.assert_array_equal(rounded.scores(1), plain.scores(1))
    with refused(UsageError, "awq_replica", "activations_bits"):
        load_predictor(replica, {"awq_replica": {"activations_bits": 4}})


def test_withheld_tokens_are_refused(replica: Path) -> None:
    predictor = load_predictor(replica)
    with refused(MismatchError, "some", "withheld"):
        predictor.observe(_event(predictor, [5, -1], 0, 0, Phase.PREFILL))


def test_tokens_that_the_replica_does_not_embed_are_refused(replica: Path) -> None:
    predictor = load_predictor(replica)
    with refused(MismatchError, 1000000):
        predictor.observe(_event(predictor, [5, 1_000_000], 0, 0, Phase.PREFILL))
    with refused(MismatchError, 1000000):
        predictor.predict_prompt([5, 1_000_000])


def test_another_replica_than_its_card_is_refused(replica: Path, tmp_path: Path) -> None:
    shutil.copytree(replica, tmp_path / "r")
    file = tmp_path / "r" / "config.json"
    file.write_text(file.read_text() + "\n")
    with refused(MismatchError, "replica", "card"):
        load_predictor(tmp_path / "r")
