"""ExpertMLP as DuoServe prints it: widths, state (Eqs. 4, 5) and loss (Eq. 6)."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from moetool.base.errors import UsageError
from moetool.training.predictor import build
from moetool.training.tokens import Tokens
from tests.synthetic_routes import make_routes, make_spec

SMALL = {"hidden": [16, 8]}


def test_widths_are_as_printed() -> None:
    network = build("expert_mlp", make_spec(num_layers=8, num_experts=32, top_k=4)).get_submodule("network")
    linear = [module for module in network.children() if isinstance(module, nn.Linear)]
    assert [layer.out_features for layer in linear] == [2048, 1024, 512, 256, 128, 64, 32]
    assert linear[0].in_features == 7 * 32 + 32 + 4 * 32 + 7
    kinds = [type(module) for module in network.children()]
    assert kinds == [nn.Linear, nn.BatchNorm1d, nn.ReLU, nn.Dropout] * 6 + [nn.Linear]
    assert {module.p for module in network.children() if isinstance(module, nn.Dropout)} == {0.1}


def test_the_last_hidden_layer_can_be_as_wide_as_the_experts() -> None:
    options = {"hidden": [64, 32, 128]}
    network = build("expert_mlp", make_spec(num_experts=128), options).get_submodule("network")
    assert [m.out_features for m in network.children() if isinstance(m, nn.Linear)] == [64, 32, 128, 128]


def test_state_is_history_popularity_affinity_and_layer() -> None:
    predictor = build("expert_mlp", make_spec(num_layers=3, num_experts=3, top_k=1), SMALL)
    predictor.get_buffer("popularity_LE").copy_(torch.arange(9).view(3, 3) / 10)
    predictor.get_buffer("affinity_MEE").copy_(torch.arange(18).view(2, 3, 3) / 100)
    experts_NLK = torch.tensor([[[0], [2], [1]], [[0], [2], [1]]])
    state = predictor.state(experts_NLK, torch.tensor([1, 2]))  # type: ignore[operator]
    expected = [
        # h_l                  p_l                a_{l-1,l}            l
        [*(1, 0, 0, 0, 0, 0), *(0.3, 0.4, 0.5), *(0.0, 0.01, 0.02), *(1, 0)],
        [*(1, 0, 0, 0, 0, 1), *(0.6, 0.7, 0.8), *(0.15, 0.16, 0.17), *(0, 1)],
    ]
    torch.testing.assert_close(state, torch.tensor(expected))


def test_padding_is_not_expert_zero() -> None:
    predictor = build("expert_mlp", make_spec(num_layers=3, num_experts=4, top_k=1), SMALL)
    layer = torch.tensor([2])
    zero = predictor.state(torch.tensor([[[0], [1]]]), layer)  # type: ignore[operator]
    other = predictor.state(torch.tensor([[[3], [1]]]), layer)  # type: ignore[operator]
    assert zero[0, :4].tolist() == [1, 0, 0, 0]
    assert other[0, :4].tolist() == [0, 0, 0, 1]


def test_loss_is_equation_6_averaged() -> None:
    spec = make_spec()
    predictor = build("expert_mlp", spec, SMALL).eval()
    routes_NLK = make_routes(spec, 6, 0, np.random.default_rng(0))
    predictor.count(Tokens(experts_TPK=torch.from_numpy(routes_NLK)))
    layer_N = [1, 2, 3, 1, 2, 3]
    total = 0.0
    for experts_LK, layer in zip(routes_NLK, layer_N, strict=True):
        logits_E = predictor.layer_scores(Tokens(experts_TPK=torch.from_numpy(experts_LK[None, :layer])), layer)[
            0
        ].tolist()
        for expert, logit in enumerate(logits_E):
            probability = 1 / (1 + math.exp(-logit))
            total -= math.log(probability if expert in experts_LK[layer] else 1 - probability)
    loss = predictor.loss(Tokens(experts_TPK=torch.from_numpy(routes_NLK)), torch.tensor(layer_N))
    assert loss.item() == pytest.approx(total / (6 * spec.num_experts), rel=1e-5)


def test_loss_sees_only_earlier_layers() -> None:
    spec = make_spec()
    predictor = build("expert_mlp", spec, SMALL)
    routes_NLK = torch.from_numpy(make_routes(spec, 4, 0, np.random.default_rng(0)))
    changed_NLK = routes_NLK.clone()
    changed_NLK[:, 2:] = (changed_NLK[:, 2:] + 1) % spec.num_experts
    layer_N = torch.full((4,), 2)
    states = [predictor.state(routes, layer_N) for routes in (routes_NLK, changed_NLK)]  # type: ignore[operator]
    assert torch.equal(*states)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden": []}, "hidden is"),
        ({"hidden": [8, 0]}, "hidden is"),
        ({"hidden": [8, "wide"]}, "hidden.1 is 'wide'"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"droput": 0.2}, "did you mean 'dropout'"),
    ],
)
def test_wrong_options_are_refused(options: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build("expert_mlp", make_spec(), options)
