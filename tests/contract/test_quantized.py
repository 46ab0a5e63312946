"""Checkpoints in every weight format are served as plain transformers runs what their writers say they stand for."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from moetool.base.errors import MismatchError, UsageError
from moetool.models.checkpoint import Checkpoint
from moetool.models.experts.slot_unpacking import SlotUnpacking
from moetool.models.loading import load_full, load_lazy
from moetool.runtime.experts.copies import stride_of
from tests import families, quantized
from tests.greedy import Greedy, forward_logits, generated, prompts, require_same_under_every_policy, served
from tests.quantized import GROUP, compressed, compressed_config, where_whole
from tests.refusals import refused

_FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
FP8_BLOCK = {"quant_method": "fp8", "weight_block_size": [16, 16], "activation_scheme": "dynamic"}
_UNEVEN = "kv_a_proj_with_mqa"  # 24 rows, where transformers wants whole blocks
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
_MIXED = {
    **compressed_config("mixed-precision", {}),
    "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": {**_FP8, "strategy": "channel"}, "format": "float-quantized"},
        "group_1": {
            "targets": [r"re:.*layers\.1\.mlp\.experts.*"],
            "weights": {**INT4, "symmetric": True},
            "format": "pack-quantized",
        },
    },
    "ignore": ["lm_head", r"re:.*layers\.2\.mlp.*", "re:.*v_proj"],
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True},
}


def _mixed(name: str) -> quantized.Writer | None:
    if "layers.2.mlp" in name or "v_proj" in name:
        return None
    if "layers.1.mlp.experts" in name:
        return compressed("pack-quantized", {**INT4, "symmetric": True})
    return compressed("float-quantized", {**_FP8, "strategy": "channel"}, torch.bfloat16)


def _everywhere(writer: quantized.Writer) -> Callable[[str], quantized.Writer]:
    return lambda name: writer


FORMATS: dict[str, tuple[str, dict[str, Any], Callable[[str], quantized.Writer | None]]] = {
    "deepseek_v3-fp8_block": (
        "deepseek_v3",
        {**FP8_BLOCK, "modules_to_not_convert": [_UNEVEN, "lm_head"]},
        lambda name: None if _UNEVEN in name else quantized.fp8_block(16),
    ),
    "qwen3_moe-fp8_block": ("qwen3_moe", FP8_BLOCK, _everywhere(quantized.fp8_block(16))),
    "mixtral-gptq": ("mixtral", {**GPTQ, "desc_act": False}, _everywhere(quantized.gptq(act_order=False))),
    "qwen3_moe-gptq_act_order": (
        "qwen3_moe",
        {**GPTQ, "desc_act": True},
        _everywhere(quantized.gptq(act_order=True, symmetric=False)),
    ),
    "mixtral-awq": ("mixtral", AWQ, _everywhere(quantized.awq())),
    **{
        f"qwen3_moe-{name}": (
            "qwen3_moe",
            compressed_config(form, weights),
            _everywhere(compressed(form, weights, torch.bfloat16 if name == "fp8_channel" else torch.float32)),
        )
        for name, form, weights in (
            ("fp8_tensor", "float-quantized", {**_FP8, "strategy": "tensor"}),
            ("fp8_channel", "float-quantized", {**_FP8, "strategy": "channel"}),
            ("nvfp4", "nvfp4-pack-quantized", NVFP4),
            ("int4", "pack-quantized", {**INT4, "symmetric": True}),
            ("int4_asymmetric", "pack-quantized", {**INT4, "symmetric": False}),
        )
    },
    "qwen3_moe-mixed": ("qwen3_moe", _MIXED, _mixed),
}
NAMES = [*FORMATS, "gpt_oss-mxfp4"]
_INT4_EXPERTS = {
    **compressed_config("pack-quantized", {**INT4, "symmetric": True}),
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"],
}
FP8_CHANNEL = {**_FP8, "strategy": "channel"}


def _int4_experts(name: str) -> quantized.Writer | None:
    return compressed("pack-quantized", {**INT4, "symmetric": True}) if ".experts." in name else None


PUBLISHED: dict[str, tuple[str, dict[str, Any], Callable[[str], quantized.Writer | None]]] = {
    # Kimi-K2-Thinking: the routed experts alone
    "deepseek_v3-int4": (
        "deepseek_v3",
        _INT4_EXPERTS,
        _int4_experts,
    ),
    # DeepSeek-V3.2
    "deepseek_v32-fp8_block": ("deepseek_v32", FP8_BLOCK, _everywhere(where_whole(quantized.fp8_block(16), 16))),
    # GLM-4.5-FP8 and GLM-4.6-FP8
    "glm4_moe-fp8_scaled": (
        "glm4_moe",
        compressed_config("float-quantized", FP8_CHANNEL),
        _everywhere(compressed("float-quantized", FP8_CHANNEL, torch.bfloat16)),
    ),
    # MiniMax-M2
    "minimax_m2-fp8_block": ("minimax_m2", FP8_BLOCK, _everywhere(where_whole(quantized.fp8_block(16), 16))),
    # Qwen3-Next-80B-A3B-Instruct-FP8
    "qwen3_next-fp8_block": ("qwen3_next", FP8_BLOCK, _everywhere(where_whole(quantized.fp8_block(16), 16))),
    # GLM-5-FP8, MiMo-V2-Flash and Qwen3.5-35B-A3B-FP8
    **{
        f"{family}-fp8_block": (family, FP8_BLOCK, _everywhere(where_whole(quantized.fp8_block(16), 16)))
        for family in ("glm_moe_dsa", "mimo_v2_flash", "qwen3_5_moe_text")
    },
    # community quantizations
    **{
        f"{family}-awq": (family, AWQ, _everywhere(quantized.awq()))
        for family in ("deepseek_v3", "glm4_moe", "minimax_m2", "qwen3_moe")
    },
    **{f"{family}-int4": (family, _INT4_EXPERTS, _int4_experts) for family in ("glm4_moe", "qwen3_next")},
}
"""Layouts of published checkpoints, by family and format."""
ALL_POLICIES = ("deepseek_v3-fp8_block", "gpt_oss-mxfp4", "mixtral-gptq", "qwen3_moe-mixed")
PROMPTS = prompts(3)


@dataclass
class Case:
    """A quantized checkpoint, its twin, and what plain transformers makes of the twin."""

    path: Path
    twin: Path
    expected: Greedy


@pytest.fixture(scope="module", params=NAMES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    path, twin = written(request.param, tmp_path_factory.mktemp(request.param))
    return Case(path, twin, generated(load_full(Checkpoint.open(twin), torch.float32).model, PROMPTS))


def written(name: str, folder: Path) -> tuple[Path, Path]:
    """A tiny checkpoint in a format, and its twin."""
    if name == "gpt_oss-mxfp4":
        families.save("gpt_oss", folder / "dense", intermediate_size=32)
        return folder / "m", quantized.mxfp4_experts(folder / "dense", folder / "m")
    family, config, writer = (FORMATS | PUBLISHED)[name]
    sizes = {} if name in FORMATS else {"moe_intermediate_size": 32}
    families.save(family, folder / "dense", intermediate_size=48 if family != "mixtral" else 32, **sizes)
    twin = quantized.quantize(folder / "dense", folder / "m", config, writer)
    if name == "qwen3_moe-mixed":  # scales of an FP8 KV cache
        scales = {f"model.layers.0.self_attn.{leaf}_scale": torch.tensor([0.5]) for leaf in ("k", "v")}
        quantized.add_tensors(folder / "m", scales)
    return folder / "m", twin


def test_every_policy_generates_what_transformers_does(case: Case) -> None:
    if case.path.parent.name.startswith(tuple(ALL_POLICIES)):
        require_same_under_every_policy(case.path, case.expected, PROMPTS)
        return
    for policy in ("lru", "promoe"):
        case.expected.require_same(served(case.path, policy, PROMPTS))


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_layouts_are_served_as_transformers_runs_them(name: str, tmp_path: Path) -> None:
    path, twin = written(name, tmp_path)
    theirs = load_full(Checkpoint.open(twin), torch.float32)
    ours = load_full(Checkpoint.open(path), torch.float32)
    expected, found = theirs.model.state_dict(), ours.model.state_dict()
    assert [key for key in expected if not torch.equal(found[key], expected[key])] == []
    assert ours.spec.all_experts_bytes < 0.5 * theirs.spec.all_experts_bytes
    generated(theirs.model, PROMPTS).require_same(served(path, "lru", PROMPTS))


def test_kimi_k2_is_read_as_the_family_that_it_is(tmp_path: Path) -> None:
    """Its config names a type and code of its own; no code is run."""
    path, twin = written("deepseek_v3-int4", tmp_path)
    raw = json.loads((path / "config.json").read_text())
    code = {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}
    (path / "config.json").write_text(json.dumps(raw | {"model_type": "kimi_k2", "auto_map": code}))
    with Checkpoint.open(path) as checkpoint:
        assert checkpoint.config.model_type == "deepseek_v3" and checkpoint.spec.name.startswith("deepseek_v3")
        assert load_full(checkpoint, torch.float32).spec == checkpoint.spec
    expected = generated(load_full(Checkpoint.open(twin), torch.float32).model, PROMPTS)
    expected.require_same(served(path, "lru", PROMPTS))
    raw = json.loads((twin / "config.json").read_text())
    (twin / "config.json").write_text(json.dumps(raw | {"model_type": "kimi_k2"}))
    assert generated(load_full(Checkpoint.open(twin), torch.float32).model, PROMPTS) == expected


def test_a_tokenizer_that_is_code_is_read_from_the_file_beside_it(reference: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(reference / name, tmp_path)
    settings = json.loads((reference / "tokenizer_config.json").read_text())
    code = {"tokenizer_class": "TikTokenTokenizer", "auto_map": {"AutoTokenizer": ["own.TikTokenTokenizer", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | code))
    expected = Checkpoint.open(reference).tokenizer("Hello 123 world<|user|>")["input_ids"]
    assert Checkpoint.open(tmp_path, weights=False).tokenizer("Hello 123 world<|user|>")["input_ids"] == expected
    (tmp_path / "tokenizer.json").write_text("{")
    with refused(UsageError, "tokenizer.json"):
        _ = Checkpoint.open(tmp_path, weights=False).tokenizer
    (tmp_path / "tokenizer.json").unlink()
    with refused(UsageError, "auto_map", "tokenizer.json") as caught:
        _ = Checkpoint.open(tmp_path, weights=False).tokenizer
    assert "\n" not in str(caught.value)


def test_files_with_an_index_and_a_tied_head(tmp_path: Path) -> None:
    """A quantized embedding does not exist: the head that is tied to it stays plain too."""
    families.save("qwen3_moe", tmp_path / "dense", tie_word_embeddings=True)
    twin = quantized.quantize(
        tmp_path / "dense", tmp_path / "m", FP8_BLOCK, _everywhere(where_whole(quantized.fp8_block(16), 16))
    )
    quantized.shard(tmp_path / "m", 3)
    theirs = load_full(Checkpoint.open(twin), torch.float32).model
    generated(theirs, PROMPTS).require_same(served(tmp_path / "m", "hybrimoe", PROMPTS, host_experts=12))
    with Checkpoint.open(tmp_path / "m") as checkpoint:
        assert len(checkpoint.index.files) == 3
        assert load_lazy(checkpoint, torch.float32).model.lm_head.weight.dtype == torch.float32


@pytest.mark.slow
def test_fifty_prompts_under_every_policy(case: Case) -> None:
    """The whole matrix, format by format; every policy has its smallest pool."""
    many = prompts(50)
    expected = generated(load_full(Checkpoint.open(case.twin), torch.float32).model, many)
    ties = require_same_under_every_policy(case.path, expected, many)
    print(f"{case.path.parent.name}: {len(ties)} policies, {sum(ties.values())} ties of {len(ties) * len(many)}")


def test_logits_are_as_near_as_transformers_experts_to_each_other(case: Case) -> None:
    """Within twice the difference between transformers' own eager and grouped experts, or a rounding of float32."""
    tokens = torch.tensor([prompts(12)[-1] * 2])
    theirs = load_full(Checkpoint.open(case.twin), torch.float32).model
    logits = {}
    with torch.inference_mode():
        for kind in ("eager", "grouped_mm"):
            theirs.set_experts_implementation(kind)
            logits[kind] = theirs(tokens, use_cache=False).logits[0]
    found = forward_logits(case.path, tokens)
    bound = 2 * float((logits["eager"] - logits["grouped_mm"]).abs().max())
    rounding = 4 * torch.finfo(torch.float32).eps * float(logits["eager"].abs().max())
    assert float((found - logits["eager"]).abs().max()) <= max(bound, rounding)


def test_one_product_over_packed_slots_gives_the_same_bits_from_any_pool(case: Case) -> None:
    """As on a GPU: experts are unpacked together, in waves where the pool is too small."""
    tokens = torch.tensor([prompts(12)[-1] * 2])
    found = [forward_logits(case.path, tokens, slots, pooled=True) for slots in (3, 8, 16)]
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    one_by_one = forward_logits(case.path, tokens)
    assert torch.allclose(found[0], one_by_one, rtol=0, atol=1e-5 * float(one_by_one.abs().max()))


def test_slots_are_unpacked_together_to_the_weights_of_each(case: Case) -> None:
    loaded = load_lazy(Checkpoint.open(case.path), torch.bfloat16)
    assert loaded.files is not None
    pool = torch.zeros(9, stride_of(loaded.files.slot_bytes), dtype=torch.uint8)
    slots = [row[: loaded.files.slot_bytes] for row in pool]
    operations = []
    for layer in loaded.layers:
        for slot, expert in ((7, 2), (1, 0), (4, 5)):
            loaded.files.read_into(loaded.spec.expert_key(layer.index, expert), slots[slot])
        unpacking = SlotUnpacking(loaded.files, slots, torch.bfloat16)
        expected = loaded.files.stacked(layer, torch.bfloat16).values()
        for chosen, experts in (([7], [2]), ([7, 1, 4], [2, 0, 5])):
            with Operations() as counted:
                found = unpacking.unpack(layer.index, chosen)
            operations.append(counted.number)
            for part, weights in zip(found, expected, strict=True):
                assert torch.equal(part[: len(chosen)], weights[experts])
    loaded.close()
    by_rows = not any(name in str(case.path) for name in ("gptq", "awq", "nvfp4", "fp8_tensor"))
    assert (operations[0] == operations[1]) == by_rows


class Operations(TorchDispatchMode):
    """Counts what torch is asked for."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        return func(*args, **(kwargs or {}))


def test_slots_as_stored_and_host_memory_change_nothing(case: Case) -> None:
    case.expected.require_same(served(case.path, "lru", PROMPTS, products=False))
    case.expected.require_same(served(case.path, "lru", PROMPTS, host_experts=12))
    case.expected.require_same(served(case.path, "hybrimoe", PROMPTS, host_experts=12))


def test_weights_in_memory_are_those_of_the_writer(case: Case) -> None:
    """To the bit: those that capture runs, and those of every expert that serve reads."""
    theirs = load_full(Checkpoint.open(case.twin), torch.float32)
    ours = load_full(Checkpoint.open(case.path), torch.float32)
    expected, found = theirs.model.state_dict(), ours.model.state_dict()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    loaded = load_lazy(Checkpoint.open(case.path), torch.float32, products=True)
    assert loaded.files is not None
    for layer in loaded.layers:
        for name, stacked in loaded.files.stacked(layer, torch.float32).items():
            assert torch.equal(stacked, ours.layers[layer.index].experts.get_parameter(name))
    loaded.close()
    assert loaded.spec == ours.spec
    assert loaded.spec.all_experts_bytes < theirs.spec.all_experts_bytes


def test_an_expert_moves_the_bytes_of_its_tensors(case: Case) -> None:
    """By the names and sizes that the safetensors library finds in the file."""
    sizes = {name: t.nbytes for name, t in load_file(case.path / "model.safetensors").items()}
    with Checkpoint.open(case.path) as checkpoint:
        files = checkpoint.expert_files()
        memory = torch.empty(files.stored_bytes, dtype=torch.uint8)
        for layer in checkpoint.layers:
            root = f"layers.{layer.layer_id}."
            names = [name for name in sizes if root in name and ".experts." in name and "shape" not in name]
            each = sum(sizes[name] for name in names) // layer.num_experts
            for expert in range(layer.num_experts):
                assert files.read_stored(checkpoint.spec.expert_key(layer.index, expert), memory) == each
            assert checkpoint.spec.expert_bytes_L[layer.index] == each


def test_bytes_are_known_by_config_alone(case: Case, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Profile and plan count these bytes before any weight is there."""
    whole = Checkpoint.open(case.path)
    shutil.copy(case.path / "config.json", tmp_path)
    alone = Checkpoint.open(tmp_path, weights=False)
    if "mixed" in str(whole.raw["quantization_config"]):
        return  # by layer, which the config says by patterns of names that only files have
    for found, expected in zip(alone.spec.expert_bytes_L, whole.spec.expert_bytes_L, strict=True):
        assert found == pytest.approx(expected, rel=0.15)  # the type of scales is not in the config
    assert "are estimated from its config" in caplog.text
    for dtype in (torch.float32, torch.bfloat16):
        files = whole.expert_files(fastest=dtype)
        assert whole.slot_bytes(dtype) == files.slot_bytes
        assert files.stored_bytes == whole.spec.slot_bytes
    whole.close()


def test_headers_of_weights_that_are_there_count_by_config_alone_too(case: Case, tmp_path: Path) -> None:
    whole, alone = Checkpoint.open(case.path), Checkpoint.open(case.path, weights=False)
    assert alone.sizes_by_headers and alone.spec.expert_bytes_L == whole.spec.expert_bytes_L
    assert alone.slot_bytes(torch.bfloat16) == whole.slot_bytes(torch.bfloat16)
    shutil.copy(case.path / "config.json", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"half of a download")
    assert not Checkpoint.open(tmp_path, weights=False).sizes_by_headers


@pytest.mark.parametrize("name", ["deepseek_v3-fp8_block", "gpt_oss-mxfp4"])
def test_transformers_reads_the_same_checkpoint(name: str, tmp_path: Path) -> None:
    """Plain transformers with `dequantize`, which gives the weights that the writer meant."""
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config

    path, _ = written(name, tmp_path)
    kind = Mxfp4Config if "mxfp4" in name else FineGrainedFP8Config
    config = kind(dequantize=True, **({} if "mxfp4" in name else {"weight_block_size": (16, 16)}))
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, quantization_config=config).state_dict()
    ours = load_full(Checkpoint.open(path), torch.float32).model.state_dict()
    assert [key for key in ours if not torch.equal(ours[key], theirs[key])] == []


def _damaged(case: Case, to: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    shutil.copytree(case.path, to)
    tensors = load_file(to / "model.safetensors")
    change(tensors)
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    return to


def test_a_missing_tensor_of_a_weight_is_refused_by_file_and_name(case: Case, tmp_path: Path) -> None:
    tensors = load_file(case.path / "model.safetensors")
    last = max(
        int(name.split(".experts.")[0].rpartition(".layers.")[2].split(".")[0])
        for name in tensors
        if ".experts." in name
    )
    suffixes = {name.rpartition(".")[2] for name in tensors if f".{last}." in name and ".experts." in name}
    optional = {"weight_shape", "g_idx"}
    for number, suffix in enumerate(sorted(suffixes - optional)):
        name = max(n for n in tensors if ".experts." in n and n.endswith(f".{suffix}"))
        path = _damaged(case, tmp_path / str(number), lambda tensors, name=name: tensors.pop(name))
        with pytest.raises(MismatchError) as caught:
            load_lazy(Checkpoint.open(path), torch.float32)
        stem = name.rpartition(".")[0]
        assert stem in str(caught.value) and "\n" not in str(caught.value), (name, caught.value)
        assert str(path) in str(caught.value)


def test_a_wrong_group_size_is_refused(case: Case, tmp_path: Path) -> None:
    shutil.copytree(case.path, tmp_path / "m")
    file = tmp_path / "m" / "config.json"
    config = json.loads(file.read_text())
    quantization = config["quantization_config"]
    text = json.dumps(quantization)
    changed = text.replace('"group_size": 16', '"group_size": 8').replace("[16, 16]", "[8, 8]")
    changed = changed.replace('"strategy": "tensor"', '"strategy": "channel"') if changed == text else changed
    changed = changed.replace('"strategy": "channel"', '"strategy": "tensor"') if changed == text else changed
    if changed == text or "tensor_group" in text:
        pytest.skip("its groups are fixed by the format")
    file.write_text(json.dumps(config | {"quantization_config": json.loads(changed)}))
    with refused(MismatchError, "model.safetensors", "model.layers"):
        load_lazy(Checkpoint.open(tmp_path / "m"), torch.float32)
