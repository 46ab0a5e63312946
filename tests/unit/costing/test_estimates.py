"""Estimated seconds of tokens and prompts against published measurements and simple bounds."""

from dataclasses import replace

import pytest

from moetool.costing.estimates import (
    ASSUMED_DISK_BYTES_S,
    LINK_SHARE,
    ModelTraffic,
    Rates,
    host_rates,
    prompt_seconds,
    rates_of,
    together_share,
    token_estimate,
)
from moetool.costing.machines import read_named_machine


def _traffic(layers: int, experts: int, top_k: int, expert_bytes: int, dense_bytes: float) -> ModelTraffic:
    """Eight MoE layers of a shape, as in the table of `moetool guide speed`."""
    return ModelTraffic(
        num_layers=layers,
        num_moe_layers=8,
        num_experts=8 * experts,
        token_experts=8 * top_k,
        dense_bytes=dense_bytes,
        slot_bytes=expert_bytes,
        stored_bytes=expert_bytes,
        kv_token_bytes=1e4,
        active_parameters=1e9,
    )


DEEPSEEK = _traffic(9, 64, 6, 17_301_504, 6e8)
QWEN = _traffic(8, 128, 8, 9_437_184, 8e8)


@pytest.mark.parametrize(
    ("model", "milliseconds", "bound"),
    [
        (DEEPSEEK, 4.5, 0),
        (DEEPSEEK, 11.8, 5.2),
        (DEEPSEEK, 13.3, 4.6),
        (DEEPSEEK, 14.0, 8.3),
        (DEEPSEEK, 17.9, 11.7),
        (DEEPSEEK, 22.6, 15.5),
        (QWEN, 3.8, 0),
        (QWEN, 5.5, 1.0),
        (QWEN, 9.3, 2.8),
        (QWEN, 9.2, 2.4),
        (QWEN, 10.5, 4.0),
        (QWEN, 11.0, 4.4),
        (QWEN, 15.2, 8.5),
    ],
)
def test_times_of_the_h100_table(model: ModelTraffic, milliseconds: float, bound: float) -> None:
    # rows of `moetool guide speed`: time per token, and the time of the moved bytes on the link
    rates = rates_of(read_named_machine("h100"))
    misses = 1e-3 * bound * rates.link_bytes_s / (model.token_experts * model.stored_bytes)
    found = token_estimate(model, rates, context=32, device_misses=misses, disk_misses=0.0)
    assert found.link_s == pytest.approx(bound * 1e-3)
    assert milliseconds / 1.3 < found.seconds * 1e3 < milliseconds * 1.3


def test_link_of_the_h100_is_as_measured() -> None:
    assert rates_of(read_named_machine("h100")).link_bytes_s == pytest.approx(53.5e9, rel=0.07)
    assert pytest.approx(25 / 31.5, rel=0.01) == LINK_SHARE


def test_a_token_adds_reads_layers_and_loads() -> None:
    rates = Rates(
        device="cuda",
        memory_bytes_s=1e9,
        flops=1e12,
        layer_s=1e-3,
        miss_layer_s=1e-3,
        link_bytes_s=1e8,
        disk_bytes_s=1e7,
    )
    every = token_estimate(DEEPSEEK, rates, context=0, device_misses=0.0, disk_misses=0.0)
    assert every.seconds == pytest.approx(9e-3 + (6e8 + 48 * 17_301_504) / 1e9)
    assert (every.link_bytes, every.disk_bytes, every.limit) == (0, 0, "memory bandwidth")
    half = token_estimate(DEEPSEEK, rates, context=0, device_misses=0.5, disk_misses=0.25)
    assert half.link_bytes == 2 * half.disk_bytes == 24 * 17_301_504
    assert half.seconds == pytest.approx(
        every.seconds + (1 - 0.5**6) * 8e-3 + half.link_bytes / 1e8 + half.disk_bytes / 1e7
    )
    assert half.limit == "disk"
    alone = token_estimate(DEEPSEEK, replace(rates, link_bytes_s=0.0), context=0, device_misses=0.5, disk_misses=0.5)
    assert (alone.link_bytes, alone.disk_bytes, alone.load_s) == (0, half.link_bytes, 0.0)
    known = replace(rates, link_bytes_s=0.0, load_bytes_s=1e9)
    loading = token_estimate(DEEPSEEK, known, context=0, device_misses=0.5, disk_misses=0.5)
    assert loading.load_s == pytest.approx(alone.disk_bytes / 1e9)
    assert loading.seconds == alone.seconds  # other threads load


def test_a_prompt_loads_each_missing_expert_once_a_chunk() -> None:
    rates = replace(rates_of(read_named_machine("laptop-16gb")), layer_s=0.0, memory_bytes_s=1e15, flops=1e20)
    whole = prompt_seconds(DEEPSEEK, rates, tokens=1000, chunk=1000, slots=12, host_experts=0)
    assert whole == pytest.approx(500 * 17_301_504 / rates.disk_bytes_s, rel=1e-3)
    assert prompt_seconds(DEEPSEEK, rates, tokens=1000, chunk=500, slots=12, host_experts=0) == pytest.approx(2 * whole)
    assert prompt_seconds(DEEPSEEK, rates, tokens=1000, chunk=1000, slots=512, host_experts=0) < 1e-3 * whole


def test_packed_weights_are_read_in_less_time_but_at_a_lower_rate() -> None:
    for name in ("h100", "laptop-16gb"):
        rates = rates_of(read_named_machine(name))
        seconds = [rates.read_s(bits * 1e6, bits) for bits in (16, 8, 4.25)]
        assert seconds == sorted(seconds, reverse=True)
        assert rates.read_s(1e6, 16) < rates.read_s(1e6, 8) < rates.read_s(1e6, 4) < rates.read_s(1e6, 2)


def test_a_machine_keeps_its_link_and_has_an_assumed_disk_without_a_figure() -> None:
    alone, whole = rates_of(read_named_machine("rtx-3090")), rates_of(read_named_machine("pc-rtx-3090-ddr4"))
    assert (alone.link_bytes_s, alone.disk_bytes_s) == (whole.link_bytes_s, ASSUMED_DISK_BYTES_S)
    shared = rates_of(read_named_machine("jetson-agx-orin"))  # the GPU's memory is the host's
    assert (shared.link_bytes_s, shared.disk_bytes_s) == (0.0, 7.9e9)


@pytest.mark.parametrize(("link", "host", "together"), [(25.1, 65.8, 65.0), (13.1, 30.0, 30.3), (25.2, 65.9, 86.3)])
def test_link_and_host_together_reach_what_users_measured(link: float, host: float, together: float) -> None:
    # the machines of `together_share`, by their own rates alone
    rates = replace(host_rates(read_named_machine("laptop-16gb")), memory_bytes_s=host)
    assert together_share(link, rates, 16.0) * (link + host) == pytest.approx(together, rel=0.25)
