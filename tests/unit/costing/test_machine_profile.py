"""Profiles of named machines: against the measured times of an H100, and their own arithmetic."""

from dataclasses import replace

import numpy as np
import pytest

from moetool.base.errors import MismatchError, UsageError
from moetool.base.types import UNKNOWN_BYTES, ModelSpec, Phase
from moetool.caching.machine_split import MachineSplit
from moetool.caching.policy import build_policy
from moetool.caching.residency import Residency
from moetool.costing.machine_profile import assumption, machine_profile
from moetool.costing.machines import read_named_machine, read_named_model
from moetool.costing.pricing import Prices, TimelineOptions
from moetool.costing.timeline import Timeline
from tests.synthetic import make_forward


def _spec(name: str, layers: int = 0) -> ModelSpec:
    model = read_named_model(name)
    return replace(model, layers=layers or model.layers).spec()


@pytest.mark.parametrize(
    ("name", "milliseconds", "bound"),
    [
        ("deepseek-v2-lite", 4.5, 0),
        ("deepseek-v2-lite", 11.8, 5.2),
        ("deepseek-v2-lite", 13.3, 4.6),
        ("deepseek-v2-lite", 14.0, 8.3),
        ("deepseek-v2-lite", 17.9, 11.7),
        ("deepseek-v2-lite", 22.6, 15.5),
        ("qwen3-30b-a3b", 3.8, 0),
        ("qwen3-30b-a3b", 9.3, 2.8),
        ("qwen3-30b-a3b", 10.5, 4.0),
        ("qwen3-30b-a3b", 15.2, 8.5),
    ],
)
def test_times_of_the_h100_table(name: str, milliseconds: float, bound: float) -> None:
    # eight MoE layers in `moetool guide speed`: time per token, and the time of the moved bytes on the link
    profile = machine_profile(read_named_machine("h100"), _spec(name, layers=8))
    seconds = profile.decode_s(32, "cuda") + 1e-3 * bound + (8 * profile.miss_s if bound else 0.0)
    assert milliseconds / 1.3 < 1e3 * seconds < milliseconds * 1.3


def test_link_and_host_share_the_bandwidth_of_host_memory() -> None:
    spec = _spec("deepseek-v2-lite")
    for name in ("pc-rtx-3090-ddr4", "pc-rtx-4090-ddr5", "h100"):
        machine = read_named_machine(name)
        profile = machine_profile(machine, spec)
        rates = [
            spec.slot_bytes / profile.on("cpu").expert(1),
            spec.slot_bytes / profile.tier("pinned").seconds(spec.slot_bytes),
        ]
        assert profile.link_share * sum(rates) == pytest.approx(0.75 * machine.host_memory_bytes_s)
        costs = Prices(profile, spec, TimelineOptions(device="cuda", tier="pinned")).split_costs()
        assert costs is not None and costs.link_share == profile.link_share
        assert (costs.load_s, costs.host_s) == pytest.approx(
            [spec.slot_bytes / rate for rate in reversed(rates)], rel=1e-3
        )
        on_disk = Prices(profile, spec, TimelineOptions(device="cuda", tier="disk")).split_costs()
        assert on_disk is not None and on_disk.load_s == pytest.approx(costs.load_s)
        assert on_disk.disk_s == pytest.approx(spec.slot_bytes / machine.disk_bytes_s, rel=1e-3)


def test_a_split_of_prompts_knows_what_each_number_of_tokens_costs() -> None:
    for name in ("deepseek-v2-lite", "gpt-oss-20b", "qwen3-30b-a3b"):
        spec = _spec(name)
        profile = machine_profile(read_named_machine("pc-rtx-4090-ddr5"), spec)
        costs = Prices(profile, spec, TimelineOptions(device="cuda", tier="pinned")).split_costs()
        assert costs is not None
        for tokens in (1, 2, 8, 30, 512, 5000):
            assert costs.host(tokens) == pytest.approx(profile.on("cpu").expert(tokens), rel=1e-3)
            assert costs.device(tokens) == pytest.approx(profile.on("cuda").expert(tokens), rel=1e-3)


@pytest.mark.parametrize("tokens", [64, 1024])
def test_a_split_prompt_is_no_slower_than_its_loads_or_the_host_alone(tokens: int) -> None:
    spec = _spec("deepseek-v2-lite", layers=2)
    profile = machine_profile(read_named_machine("pc-rtx-4090-ddr5"), spec)
    prices = Prices(profile, spec, TimelineOptions(device="cuda", tier="pinned"))
    experts_LTE = np.random.default_rng(0).random((2, tokens, 64)).argsort(axis=2)
    info, events = make_forward(spec, experts_LTE[..., :6].swapaxes(0, 1), phase=Phase.PREFILL)
    seconds = {}
    for mode in ("load", "host", "both"):
        costs = prices.split_costs()
        split = None if costs is None or mode == "load" else MachineSplit(spec, costs, mode)
        residency, line = Residency(build_policy("lru", spec, {}, 32), split=split), Timeline(prices)
        line.begin_forward(info, residency.begin_forward(info))
        for event in events:
            line.event(event, residency.event(event))
        line.end_forward(info)
        seconds[mode] = line.timing().ttft_p50_s or 0.0
    assert 0 < seconds["both"] <= 1.01 * min(seconds.values()), seconds


def test_a_model_without_a_recipe_is_assumed_to_be_in_16_bits() -> None:
    machine, spec = read_named_machine("pc-rtx-4090-ddr5"), _spec("qwen3-30b-a3b")
    known, unknown = (machine_profile(machine, replace(spec, name=name)) for name in (spec.name, "nobody/else"))
    assert known.on("cuda").expert(1) == unknown.on("cuda").expert(1)
    assert known.on("cuda").attention(1) != unknown.on("cuda").attention(1)


def test_a_model_without_a_recipe_is_told_what_is_assumed() -> None:
    spec = _spec("gpt-oss-20b")
    other = replace(spec, name="unnamed model")
    assert not assumption(spec) and "unnamed model" in assumption(other)
    assert not assumption(_spec("gpt-oss-20b", layers=3))  # counts of some layers
    known, assumed = (
        machine_profile(read_named_machine("h100-node"), each).on("cuda").expert(4096) for each in (spec, other)
    )
    assert known / assumed == pytest.approx(2 / 0.532, rel=0.01)  # bytes of a parameter: assumed, and of MXFP4


def test_machines_and_models_without_figures_are_refused() -> None:
    spec = _spec("deepseek-v2-lite")
    for name in ("laptop-16gb", "rtx-3090"):
        with pytest.raises(UsageError, match="host"):
            machine_profile(read_named_machine(name), spec)
    desktop = read_named_machine("pc-rtx-4090-ddr5")
    with pytest.raises(UsageError, match="host_memory_bytes"):
        machine_profile(replace(desktop, host_memory_bytes=0.0), spec)
    assert machine_profile(replace(desktop, host_memory_bytes=0.0, disk_bytes_s=0.0), spec).tier("disk")
    with pytest.raises(MismatchError, match="DeepSeek-V2-Lite"):
        machine_profile(read_named_machine("h100"), replace(spec, expert_bytes_L=(UNKNOWN_BYTES,) * spec.num_layers))
