"""Machines and models by name, and the costs derived from them."""

import json
from dataclasses import replace

import pytest

from moetool.base import assets
from moetool.base.errors import UsageError
from moetool.bench.paper.assumed_machine import AssumedMachine
from moetool.bench.paper.claims import names, read_paper
from moetool.bench.paper.named_machine import MachineChoice, changed, simulated_costs
from moetool.costing.machines import read_named_machine, read_named_model, recipe_names
from tests.refusals import refused


def test_every_model_costs_something_on_a_machine() -> None:
    assert {"deepseek-v2-lite", "qwen3-30b-a3b", "mixtral-8x7b"} <= set(recipe_names("models"))
    for name in recipe_names("models"):
        assert MachineChoice(machine="h200-node", model=name).assumed().load_s > 0, name
        assert assets.path("recipes", "models", f"{name}.toml").read_text().startswith("# ")
    with refused(UsageError, "no GPU"):
        MachineChoice(machine="laptop-16gb", model="mixtral-8x7b").assumed()


def test_sizes_are_those_of_the_published_configs() -> None:
    for name in ("deepseek-v2-lite", "qwen3-30b-a3b"):
        config = json.loads(assets.path("recipes", "shapes", name, "config.json").read_text())
        model = read_named_model(name)
        assert (model.hidden, model.expert_width) == (config["hidden_size"], config["moe_intermediate_size"])
        assert model.top_k == config["num_experts_per_tok"]
        assert model.experts == config.get("n_routed_experts", config.get("num_experts"))
        assert model.layers == config["num_hidden_layers"] - config.get("first_k_dense_replace", 0)


def test_costs_follow_from_machine_and_model() -> None:
    choice = MachineChoice(machine="h200-node", model="deepseek-v2-lite")
    numbers = 3 * 2048 * 1408
    costs = choice.assumed()
    assert costs.load_s == pytest.approx(2 * numbers / (0.8 * 63e9))
    assert costs.expert_s == pytest.approx(2 * numbers / 4.8e12)
    assert costs.expert_token_s == pytest.approx(2 * numbers / (0.5 * 989e12))
    attention = 2048 * 3072 + 2048 * 576 + 512 * 4096 + 2048 * 2048 + 2048 * 64  # and the router
    assert costs.dense_s == pytest.approx(2 * attention / 4.8e12, rel=1e-3)
    with refused(UsageError, "shared_parameters"):
        replace(read_named_model("deepseek-v2-lite"), shared_parameters=10**9)
    assert (costs.shared_s, costs.shared_token_s) == pytest.approx((2 * costs.expert_s, 2 * costs.expert_token_s))
    assert choice.gpu_link_bytes_s() == pytest.approx(0.8 * 450e9)
    with refused(UsageError, "no link"):
        MachineChoice(machine="rtx-3080", model="deepseek-v2-lite").gpu_link_bytes_s()


def test_a_given_cost_replaces_a_derived_one() -> None:
    choice = MachineChoice(machine="rtx-a5000", model="mixtral-8x7b-int4", memory_share=0.6, dense_s=1e-3)
    assert choice.assumed().dense_s == 1e-3
    assert choice.assumed().load_s == pytest.approx(3.565e-3, rel=1e-3)  # 90 MB over PCIe 4.0
    assert MachineChoice().assumed() == AssumedMachine()
    other = changed(choice.assumed(), {"machine": "rtx-a6000", "model": "mixtral-8x7b-int4"})
    assert other.expert_token_s < choice.assumed().expert_token_s
    assert changed(other, {"load_s": 1.0}).load_s == 1.0
    with pytest.raises(UsageError, match="name both"):
        MachineChoice(machine="rtx-a5000")
    with refused(UsageError, "rtx-a5000"):
        MachineChoice(machine="rtx-a500", model="mixtral-8x7b").assumed()


def test_slower_links_slow_loads_and_moves_alone() -> None:
    one, half = (
        MachineChoice(machine="h200-node", model="deepseek-v2-lite", links=rate).assumed() for rate in (1.0, 0.5)
    )
    assert half.load_s == pytest.approx(2 * one.load_s)
    assert (half.expert_s, half.dense_s, half.links) == (one.expert_s, one.dense_s, 0.5)
    other = {"machine": "rtx-a6000", "model": "mixtral-8x7b-int4"}
    assert changed(half, other).load_s == pytest.approx(2 * changed(one, other).load_s)
    node = read_named_machine("h200-node").linked(0.5)
    assert (node.gpu_link_bytes_s, node.node_link_bytes_s, node.host_bytes_s) == (225e9, 200e9, 31.5e9)
    with refused(UsageError, "links"):
        MachineChoice(links=0.0)


def test_costs_of_a_token_that_represents_a_batch() -> None:
    machine = AssumedMachine(
        expert_s=5.0, expert_token_s=1.0, dense_s=4.0, dense_token_s=1.5, shared_s=3.0, shared_token_s=0.5
    )
    costs = simulated_costs(machine, 3)
    assert (costs.expert_s, costs.expert_token_s, costs.dense_s, costs.dense_token_s) == (7.0, 3.0, 11.0, 6.0)


def test_prism_simulates_the_named_models_expert_size() -> None:
    sizes = {read_named_model(name).expert_bytes for name in ("deepseek-v2-lite", "mixtral-8x7b")}
    options = [claim.options["simulation"] for claim in read_paper("prism").claim if "simulation" in claim.options]
    assert {one["expert_bytes"] for one in options if "expert_bytes" in one} == sizes


def test_every_paper_names_its_machine() -> None:
    for name in names():
        assert read_paper(name).machine.machine in recipe_names("machines"), name
