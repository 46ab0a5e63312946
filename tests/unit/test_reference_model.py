"""The fast experts are transformers' own, gradients and all; the losses, the divergence and the recipe are right."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moetool import assets
from moetool.errors import UsageError
from moetool.reference.card import divergences, jensen_shannon
from moetool.reference.model import EXPERTS, losses, ready
from moetool.reference.training_recipe import GradientOptions, Recipe, learning_rate, read_recipe, same_so_far


def tiny() -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        moe_intermediate_size=12,
        num_experts=6,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(config).double()


def gradients(model: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def test_sorted_experts_equal_transformers_forward_and_gradients() -> None:
    model = tiny()
    with torch.no_grad():
        model.model.layers[0].mlp.gate.weight[1] = 0  # an uneven load, and in the next layer an expert without any
        model.model.layers[1].mlp.gate.weight[3:] = -model.model.layers[1].mlp.gate.weight[:3]
    ids = torch.randint(0, 50, (3, 21))

    def run() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        out = model(ids, use_cache=False)
        return out.logits.detach(), gradients(model, (out.logits**2).mean())

    model.set_experts_implementation("eager")  # an expert at a time, by autograd
    model.set_attn_implementation("eager")
    expected, expected_grads = run()
    ready(model)
    assert model.config._experts_implementation == EXPERTS
    found, found_grads = run()
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert expected_grads.keys() == found_grads.keys()
    for name, grad in expected_grads.items():
        torch.testing.assert_close(found_grads[name], grad, rtol=1e-8, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


def test_one_expert_may_take_every_token_and_others_none() -> None:
    model = ready(tiny())
    experts = model.model.layers[0].mlp.experts
    hidden_TD = torch.randn(5, 16, dtype=torch.float64, requires_grad=True)
    index_TK, weights_TK = torch.tensor([[4, 2]] * 5), torch.rand(5, 2, dtype=torch.float64)
    gate, up = (hidden_TD @ experts.gate_up_proj[4].T).chunk(2, -1)
    one_TD = (experts.act_fn(gate) * up) @ experts.down_proj[4].T
    gate, up = (hidden_TD @ experts.gate_up_proj[2].T).chunk(2, -1)
    two_TD = (experts.act_fn(gate) * up) @ experts.down_proj[2].T
    expected_TD = one_TD * weights_TK[:, :1] + two_TD * weights_TK[:, 1:]
    found_TD = experts(hidden_TD, index_TK, weights_TK)
    torch.testing.assert_close(found_TD, expected_TD)
    parameters = [hidden_TD, experts.gate_up_proj, experts.down_proj]
    expected = torch.autograd.grad((expected_TD**3).sum(), parameters)
    found = torch.autograd.grad((found_TD**3).sum(), parameters)
    torch.testing.assert_close(found, expected)
    assert [bool(grad.any()) for grad in found[1]] == [False, False, True, False, True, False]


def test_losses_are_cross_entropy_and_the_mean_balancing_loss_of_the_layers() -> None:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    model = ready(tiny())
    rows_BL = torch.randint(0, 50, (30, 22))  # more tokens than are scored together
    out = model(rows_BL[:, :-1], use_cache=False, output_router_logits=True)
    plain = torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), rows_BL[:, 1:].flatten())
    expected = gradients(model, 3 * plain)
    loss, uneven = losses(model, rows_BL)
    found = gradients(model, 3 * loss)
    assert float(loss.detach()) == pytest.approx(float(plain.detach()), rel=1e-5)
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-7)
    by_layer = [float(load_balancing_loss_func((logits.detach(),), 6, 2)) for logits in out.router_logits]
    assert float(uneven.detach()) == pytest.approx(sum(by_layer) / 2, rel=1e-5)


def test_divergence_is_scipys() -> None:
    from scipy.spatial.distance import jensenshannon

    rng = np.random.default_rng(0)
    p, q = rng.dirichlet(np.ones(8), 5), rng.dirichlet(np.ones(8), 5)
    p[:, 0], q[:, 1] = 0, 0
    p, q = p / p.sum(-1, keepdims=True), q / q.sum(-1, keepdims=True)
    assert jensen_shannon(p, q) == pytest.approx(jensenshannon(p, q, base=2, axis=-1) ** 2)


def test_domains_that_share_no_expert_differ_by_a_bit_and_their_like_halves_by_nothing() -> None:
    use_DHLE = np.zeros((3, 2, 1, 4))
    use_DHLE[0, :, 0, :2] = [[3, 3], [5, 5]]
    use_DHLE[1, :, 0, 2:] = [[1, 1], [9, 9]]
    use_DHLE[2, 0, 0, 2:] = [5, 5]  # a domain of one row: it has no other half
    between_L, within_L = divergences(use_DHLE)
    assert between_L == pytest.approx([2 / 3]) and within_L == pytest.approx([0])
    assert divergences(use_DHLE[:1])[0] == [0]


def test_the_rate_rises_then_falls_to_nothing() -> None:
    cosine = GradientOptions(max_steps=100, warm_up=0.1, learning_rate=1.0)
    assert [learning_rate(cosine, step) for step in (0, 9, 10, 55, 99)] == pytest.approx(
        [0.1, 1, 1, 0.5, 0.5 * (1 + math.cos(math.pi * 89 / 90))]
    )
    wsd = GradientOptions(max_steps=100, warm_up=0.1, decay=0.5, learning_rate=1.0, schedule="wsd")
    assert [learning_rate(wsd, step) for step in (0, 9, 50, 75, 99)] == pytest.approx([0.1, 1, 1, 0.5, 0.02])
    whole = GradientOptions(max_steps=10, warm_up=0.0, decay=1.0, learning_rate=1.0, schedule="wsd")
    assert [learning_rate(whole, step) for step in (0, 5, 9)] == pytest.approx([1, 0.5, 0.1])


def test_a_run_may_be_made_longer_only_before_its_rate_falls() -> None:
    short = GradientOptions(max_steps=100, warm_up=0.1, decay=0.5, schedule="wsd")
    long = GradientOptions(max_steps=200, warm_up=0.05, decay=0.5, schedule="wsd", save_every=7)
    assert same_so_far(short, long, 51) and not same_so_far(short, long, 52)
    assert not same_so_far(short, GradientOptions(max_steps=100, warm_up=0.1, decay=0.5, schedule="wsd", clip=2.0), 51)


def test_the_recipe_of_the_reference_model_describes_it(reference: Path, tokenizer: Any) -> None:
    from moetool.reference.model import new_config, open_checkpoint
    from moetool.reference.train import require_same_architecture

    recipe = read_recipe(assets.path("recipes", "reference", "model.toml"), {"fit": {"max_steps": 7}})
    assert recipe.fit.max_steps == 7 and recipe.fit.batch_size == 16
    found = open_checkpoint(reference).config
    require_same_architecture(reference, found, new_config(recipe.model, tokenizer))
    assert Recipe() == Recipe(sources={})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fit": {"max_step": 3}}, "did you mean 'max_steps'"),
        ({"fits": {"max_steps": 3}}, "did you mean 'fit'"),
        ({"fit": {"max_steps": "many"}}, "fit: max_steps"),
        ({"fit": 3}, "fit is 3"),
        ({"fit": {"max_steps": 0}}, "fit.max_steps is 0"),
        ({"fit": {"learning_rate": float("nan")}}, "fit.learning_rate is nan"),
        ({"fit": {"schedule": "linear"}}, "schedule"),
        ({"fit": {"sequence_length": 2048}}, "at most model.max_positions, 1024"),
        ({"model": {"top_k": 33}}, "model.top_k is 33"),
        ({"model": {"num_kv_heads": 4}}, "a multiple of model.num_kv_heads"),
        ({"data": {"held_out": 2}}, "data.held_out is 2"),
    ],
)
def test_a_wrong_recipe_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_recipe(assets.path("recipes", "reference", "model.toml"), settings)
