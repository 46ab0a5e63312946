"""Estimates of a model on a machine: sizes, memory as `serve` divides it, and speed."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from transformers import AutoConfig

from moetool.base import assets, families
from moetool.base.errors import UsageError
from moetool.base.machine import memory_bytes
from moetool.costing.estimates import CPU_LAYER_S, STEP_SHARE, rates_of
from moetool.costing.machines import read_named_machine
from moetool.measuring.fit import SERVER_BYTES, Fit, fit, spoken
from moetool.measuring.fit_machine import FitOptions
from moetool.models.checkpoint import Checkpoint
from moetool.runtime.automatic import choose
from moetool.runtime.expected_reads import LEAST_TOKENS
from moetool.runtime.warm_start import WarmStart
from tests.gguf_models import written
from tests.refusals import refused

GB = 10**9
LAPTOP = FitOptions(machine="laptop-16gb", disk_bytes_s=3e9)


@pytest.mark.parametrize(
    ("family", "changes", "parameters", "active"),
    [
        # published: openai/gpt-oss-120b "117B parameters with 5.1B active", DeepSeek-V3 "671B, 37B activated",
        # GLM-5 "744B, 40B active", Qwen3-30B-A3B "30.5B, 3.3B activated" with its embedding of 0.3B
        ("gpt_oss", {}, 116.8e9, 5.1e9),
        ("deepseek_v3", {}, 671.0e9, 37e9),
        ("glm_moe_dsa", {}, 744.0e9, 40.5e9),
    ],
)
def test_parameters_are_those_that_the_publishers_name(
    tmp_path: Path, family: str, changes: dict[str, int], parameters: float, active: float
) -> None:
    AutoConfig.for_model(family, **changes).save_pretrained(tmp_path)
    checkpoint = Checkpoint(tmp_path, weights=False)
    assert checkpoint.num_parameters == pytest.approx(parameters, rel=1e-3)
    assert checkpoint.num_active_parameters == pytest.approx(active, rel=0.02)


@pytest.fixture(scope="module")
def qwen() -> Checkpoint:
    return Checkpoint.open("qwen3-30b-a3b", weights=False)


def test_a_shape_on_a_laptop(qwen: Checkpoint) -> None:
    found = fit(qwen, LAPTOP)
    assert found.parameters == pytest.approx(30.5e9, rel=2e-3)
    assert found.budget is not None and found.token is not None
    assert 0.1 < found.budget.slots / 6144 < 0.25
    assert found.token.limit == "disk"
    assert found.tokens_s_range[0] <= found.tokens_s <= found.tokens_s_range[1]
    assert found.tokens_s == pytest.approx(1 / found.token.seconds)
    assert found.command == "moetool serve MODEL"
    assert json.loads(json.dumps(found.to_json()))["memory_bytes"]["dense weights"] == found.budget.dense_bytes
    assert {fact[0] for fact in found.facts} >= {"memory bandwidth", "disk", "loads", "misses", "sizes"}
    assert found.token.load_s == pytest.approx(
        found.token.disk_bytes / rates_of(read_named_machine("laptop-16gb")).load_bytes_s
    )


def test_more_memory_and_a_faster_disk_help(qwen: Checkpoint) -> None:
    found = fit(qwen, LAPTOP)
    assert [row.tokens_s for row in found.sizes] == sorted(row.tokens_s for row in found.sizes)
    assert found.sizes[-1].share == 1 > found.sizes[0].share
    assert found.worth is not None and found.worth.memory_bytes > 16 * GB
    slower = fit(qwen, replace(LAPTOP, disk_bytes_s=1e9))
    assert slower.tokens_s < found.tokens_s and slower.prompt_s > found.prompt_s
    gpu = fit(qwen, replace(LAPTOP, machine="pc-rtx-4090-ddr5"))
    assert gpu.has_gpu and gpu.tokens_s > 2 * found.tokens_s
    assert {row.name for row in found.forms} == {form.name for form in found.forms} and len(found.forms) == 5
    assert all(row.model_bytes < found.model_bytes for row in found.forms)


def test_a_long_wait_for_the_first_word_counts_in_the_verdict(qwen: Checkpoint) -> None:
    found = fit(qwen, replace(LAPTOP, machine="h100"))
    assert "fast enough for any chat" in found.verdict
    assert "too slow for a conversation" in replace(found, prompt_s=300.0).verdict


def test_too_little_memory_names_what_is_missing(qwen: Checkpoint) -> None:
    found = fit(qwen, replace(LAPTOP, host_bytes=SERVER_BYTES + 2 * GB))
    assert (found.budget, found.tokens_s) == (None, 0.0)
    assert "does not fit" in found.verdict and "weights outside the experts take" in found.verdict
    assert found.to_json()["fits"] is False
    assert found.worth is not None  # some larger memory runs it


def test_the_division_of_memory_is_that_of_serve() -> None:
    checkpoint = Checkpoint.open("reference")
    found = fit(checkpoint, replace(LAPTOP, host_bytes=3 * GB))
    served = choose(checkpoint, {"device": "cpu"}, process_memory_bytes=3 * GB)
    assert found.budget is not None
    assert (found.budget.slots, found.budget.kv_tokens) == (served.budget.slots, served.budget.kv_tokens)
    assert found.command == "moetool serve reference --process-memory 3GB"


def test_this_machine_is_measured(qwen: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found: Fit = fit(qwen, FitOptions(host_bytes=8 * GB))
    origins = {what: origin for what, _, origin in found.facts}
    assert origins["disk"] == f"measured in {tmp_path}" and origins["memory bandwidth"] == "measured here"
    assert found.machine == "this machine"
    assert not list(tmp_path.iterdir())


def test_loads_of_weights_that_are_here_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("moetool.measuring.machine_rates.scratch_shards", pytest.fail)
    folder = assets.path("data", "reference-moe")
    for disk_bytes_s, origin in ((None, f"measured in {folder}"), (2e9, "as given")):
        found = fit("reference", FitOptions(host_bytes=8 * GB, disk_bytes_s=disk_bytes_s))
        origins = {what: origin for what, _, origin in found.facts}
        assert (origins["disk"], origins["loads"]) == (origin, "measured here")


def test_a_gpu_that_is_not_here_is_assumed(qwen: Checkpoint) -> None:
    found = fit(qwen, FitOptions(gpu_bytes=24 * GB, disk_bytes_s=3e9, host_bytes=32 * GB))
    assert found.has_gpu
    assert any("assumed" in origin for what, _, origin in found.facts if what == "memory bandwidth")
    assert found.command == "moetool serve MODEL --device cuda --host-memory 32GB"


def test_a_gpu_that_is_not_here_has_this_machine_s_memory_and_disk(
    qwen: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = fit(qwen, FitOptions(gpu_bytes=8 * GB))
    assert {what: origin for what, _, origin in found.facts}["disk"] == f"measured in {tmp_path}"
    assert found.budget is not None and found.budget.host_bytes <= memory_bytes()[0]
    assert found.command == "moetool serve MODEL --device cuda"


def test_recorded_steps_take_a_share_of_the_fixed_time_of_modules(
    qwen: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = fit(qwen, LAPTOP)
    modules = replace(families.find("qwen3_moe"), unrecorded="a test")
    monkeypatch.setattr(families, "known", lambda model_type: modules)
    slower = fit(qwen, LAPTOP)
    assert found.token is not None and slower.token is not None
    fixed = slower.token.fixed_s - found.token.fixed_s
    assert fixed == pytest.approx((1 - STEP_SHARE) * CPU_LAYER_S * qwen.config.num_hidden_layers)
    assert found.prompt_s == slower.prompt_s  # prompts run module by module
    assert "decode steps" in {what for what, *_ in found.facts} - {what for what, *_ in slower.facts}


def test_a_gguf_header_gives_exact_sizes(tmp_path: Path) -> None:
    file, _ = written("qwen3_moe", tmp_path)
    found = fit(str(file), LAPTOP)
    assert ("sizes", "exact", "file headers") in found.facts
    assert found.tokens_s > 0


def test_seconds_in_words() -> None:
    assert [spoken(s) for s in (0.42, 45.2, 99.7, 138, 6000)] == ["0.42 s", "45 s", "100 s", "2.3 minutes", "1.7 hours"]


def test_a_dense_model_is_refused_before_the_machine_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    AutoConfig.for_model("llama", num_hidden_layers=2, hidden_size=64).save_pretrained(tmp_path)
    monkeypatch.setattr("moetool.measuring.fit.fit_machine", pytest.fail)
    with refused(UsageError, "LlamaForCausalLM", "moetool models"):
        fit(str(tmp_path))


def test_misses_of_the_model_s_last_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    on = replace(LAPTOP, host_bytes=SERVER_BYTES + GB)
    origins = {what: origin for what, _, origin in fit("reference", on).facts}
    assert "routes" in origins["misses"]
    spec = Checkpoint.open("reference").spec
    token_N = np.concatenate([spec.num_experts * layer + np.arange(k) for layer, k in enumerate(spec.top_k_L)])
    routes_NP = np.tile(token_N, (LEAST_TOKENS, 1))
    learned = SimpleNamespace(spec=spec, state=lambda: {"path_RP": routes_NP}, restore=lambda state: None)
    WarmStart(spec, "foresight", learned, lambda: []).save()
    found = fit(Checkpoint.open("reference", weights=False), on)
    assert {what: origin for what, _, origin in found.facts}["misses"] == "misses of this model's last tokens"
