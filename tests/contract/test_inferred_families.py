"""Families that the table does not list: inferred where they can be, refused in one line where they cannot."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from moetool.base.errors import MismatchError, MoetoolError
from moetool.base.families import FAMILIES, INFERRED, known
from moetool.base.types import ForwardInfo, Phase
from moetool.caching.policy import build_policy
from moetool.caching.residency import Residency
from moetool.models.checkpoint import Checkpoint
from moetool.models.experts.moe_layers import moe_layers
from moetool.models.loading import load_full, load_lazy
from moetool.models.tested_formats import (
    BY_EXPERT,
    BY_EXPERT_FORMATS,
    INFERRED_AND_RUN,
    NVFP4_RELEASED,
    RELEASED,
    format_table,
)
from moetool.runtime.experts.forward import ExpertRuntime
from moetool.runtime.experts.store import ExpertStore
from moetool.runtime.loop.own_caches import open_batcher
from moetool.runtime.request import Output, SamplingParams
from tests import families, gguf_oracle
from tests.contract.test_quantized import FORMATS as QUANTIZED
from tests.contract.test_quantized import PUBLISHED
from tests.greedy import generated, prompts, served
from tests.refusals import refused

TOKENS = torch.tensor([[(7 * i + 3) % 60 + 3 for i in range(24)]])
_EXPERTS = re.compile("expert|moe", re.IGNORECASE)


def _opened(model_type: str, folder: Path) -> str | None:
    """Result for the default config of a type: `spec`, or the error; None if it has no experts."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        config: Any = CONFIG_MAPPING[model_type]()
        named = _EXPERTS.search(f"{model_type} {config.to_json_string(use_diff=False)}")
    except Exception:  # it has no default that transformers accepts
        return None
    if not named:
        return None
    config.save_pretrained(folder)
    try:
        spec = Checkpoint.open(folder, weights=False).spec
        assert spec.num_layers > 0 and min(spec.expert_bytes_L) > 0
        return "spec"
    except MoetoolError as error:
        return str(error)


def test_no_config_of_transformers_ends_in_a_traceback(tmp_path: Path) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    found = {name: _opened(name, tmp_path / name) for name in CONFIG_MAPPING}
    assert sum(outcome == "spec" for outcome in found.values()) > 50
    assert all("\n" not in (outcome or "") for outcome in found.values())
    assert [name for name in INFERRED if name in found and found[name] != "spec"] == []


@pytest.mark.parametrize("name", ["qwen4_exp", "step3p5", "dots1", "deepseek_v2"])
def test_what_cannot_be_built_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    outcome = _opened(name, tmp_path)
    assert outcome not in ("spec", None) and "\n" not in outcome
    assert name.removesuffix("_exp") in outcome.lower().replace("deepseekv2", "deepseek_v2"), outcome


@pytest.mark.parametrize(
    "name",
    ["aria", "dots3_note", "glm5_next", "inkling2", "minimax_m3_vl", "kimi_k25", "mistral_large4", "qwen3_vl_moe"],
)
def test_the_text_part_is_taken_out(name: str, tmp_path: Path) -> None:
    families.require_known(name)
    assert _opened(name, tmp_path) == "spec"


@pytest.mark.parametrize("name", INFERRED_AND_RUN)
def test_an_inferred_family_computes_what_transformers_does(name: str, tmp_path: Path) -> None:
    families.save(name, tmp_path)
    _require_same_logits(tmp_path)
    family = known(name)
    assert family is not None and family.inferred and family.own_cache
    assert bool(family.exception) == (name == "inkling_text")  # whose router takes more than hidden states


def _require_same_logits(path: Path) -> None:
    """Fail unless experts from disk give the logits of transformers' modules."""
    full = load_full(Checkpoint.open(path), torch.float32)
    full.model.set_experts_implementation("eager")
    loaded = load_lazy(Checkpoint.open(path), torch.float32)
    assert loaded.files is not None
    runtime = ExpertRuntime(
        loaded, Residency(build_policy("lru", loaded.spec, {}, 4)), ExpertStore(loaded.files, 4, num_threads=1)
    )
    count = TOKENS.shape[1]
    runtime.begin_forward(
        ForwardInfo(
            forward_id=0, request_T=(0,) * count, phase_T=(Phase.PREFILL,) * count, position_T=tuple(range(count))
        )
    )
    with torch.inference_mode():
        theirs = full.model(TOKENS, use_cache=False).logits[0]
        ours = loaded.model(TOKENS, use_cache=False).logits[0]
    runtime.close()
    loaded.close()
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-6 * float(theirs.abs().max()))


def test_a_layout_to_compute_is_refused_with_a_way_that_works(tmp_path: Path) -> None:
    families.require_known("inkling2_text")
    families.save("inkling2_text", tmp_path / "published")
    with refused(MismatchError, "gate_up_proj", "Interleave", "save_original_format=False"):
        _ = Checkpoint.open(tmp_path / "published").spec
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "published")
    model.save_pretrained(tmp_path / "as modules", save_original_format=False)
    _require_same_logits(tmp_path / "as modules")


@pytest.mark.parametrize("built_as", ["deepseek_v3", "glm4_moe"])
def test_a_type_with_a_listed_familys_modules_is_of_that_family(built_as: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(families.config(built_as))
    model.config.model_type = f"like_{built_as}"
    moe_layers(model)
    assert known(f"like_{built_as}") == replace(FAMILIES[built_as], name=f"like_{built_as}", notes="")


@pytest.mark.parametrize(("name", "built_as"), [("sarvam_mla", "deepseek_v3"), ("sarvam_moe", "glm4_moe")])
def test_such_a_type_is_served_from_pages(name: str, built_as: str, tmp_path: Path) -> None:
    families.require_known(name)
    families.save(name, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    generated(model, prompts(3)).require_same(served(tmp_path, "lru", prompts(3)))
    family = known(name)
    assert family is not None and family == replace(FAMILIES[built_as], name=name, notes="") and not family.own_cache


@pytest.mark.parametrize("name", ["aria_text", "granitemoe_swa", "kolibri1"])
def test_a_prompt_goes_on_from_a_cache_of_keys_and_values(name: str, tmp_path: Path) -> None:
    families.save(name, tmp_path, **({"sliding_window": 16} if name == "granitemoe_swa" else {}))
    model = load_full(Checkpoint.open(tmp_path), torch.float32).model
    prompt, answers = TOKENS[0].tolist(), []
    for caching in (False, True):
        batcher = open_batcher(model, max_requests=1, kv_tokens=256, prefix_caching=caching)
        chat, reused = prompt, []
        for _ in range(3):
            batcher.add(0, chat, SamplingParams(max_tokens=4, ignore_eos=True))
            outputs: list[Output] = []
            while not batcher.idle:
                outputs += batcher.step()
            reused.append(outputs[0].reused)
            chat = [*chat, *(output.token for output in outputs if output.token is not None), *prompt[3:9]]
        batcher.close()
        answers.append(chat)
        first = len(prompt) + 4 - 1
        assert reused == ([0, first, first + 10] if caching else [0, 0, 0])
    assert answers[0] == answers[1]


def test_the_table_of_formats_names_what_is_tested() -> None:
    tested = {(family, format) for family, row in format_table().items() for format, done in row.items() if done}
    short = {"gptq_act_order": "gptq", "fp8_tensor": "fp8_scaled", "fp8_channel": "fp8_scaled", "mixed": "fp8_scaled"}
    short |= {"int4_asymmetric": "int4"}
    cases = {tuple(name.split("-")) for name in [*QUANTIZED, *PUBLISHED, "gpt_oss-mxfp4"]}
    cases |= {(family, format) for family in BY_EXPERT for format in BY_EXPERT_FORMATS} | {("qwen3_moe", "mxfp4")}
    cases |= {(family, "gguf") for family, _ in gguf_oracle.MODELS.values()}
    # see `tests/contract/test_released_layouts.py`
    cases |= {(family, "fp8_block") for family in RELEASED} | {(family, "nvfp4") for family in NVFP4_RELEASED}
    assert {(family, short.get(format, format)) for family, format in cases} == {
        pair for pair in tested if pair[1] != "dense"
    }
