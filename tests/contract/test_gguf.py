"""Models in GGUF files are served as plain transformers runs what the gguf package says is in them."""

import contextlib
import inspect
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridRMSNormGated

from moetool.base.errors import MismatchError, UsageError
from moetool.models.checkpoint import Checkpoint
from moetool.models.files.gguf_header import read_gguf_header
from moetool.models.gguf.architectures import ARCHITECTURES as READ
from moetool.models.gguf.architectures import UNREAD, find_architecture
from moetool.models.gguf.blocks import GgmlCodec
from moetool.models.gguf.metadata import Metadata
from moetool.models.loading import load_full, load_lazy
from moetool.runtime.budget import footprint
from moetool.runtime.serve_options import ServeOptions
from tests import families, gguf_oracle, llama_cpp_logits
from tests.gguf_models import ARCHITECTURES, rewritten, written
from tests.greedy import generated, prompts, require_same_under_every_policy, served
from tests.refusals import refused

GOLDEN = Path(__file__).parents[1] / "golden" / "gguf"
gguf = pytest.importorskip("gguf")


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_weights_are_those_of_the_gguf_package(family: str, tmp_path: Path) -> None:
    """To the bit, in memory and as serve reads each expert; with them serve gives transformers' tokens."""
    path, twin = written(family, tmp_path)
    ours, theirs = load_full(Checkpoint.open(path), torch.float32), load_full(Checkpoint.open(twin), torch.float32)
    expected, found = theirs.model.state_dict(), ours.model.state_dict()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    for products in (True, False):
        loaded = load_lazy(Checkpoint.open(path), torch.float32, products=products)
        assert loaded.files is not None
        for layer in loaded.layers:
            for name, stacked in loaded.files.stacked(layer, torch.float32).items():
                assert torch.equal(stacked, theirs.layers[layer.index].experts.get_parameter(name))
        slot = torch.empty(loaded.files.slot_bytes, dtype=torch.uint8)
        assert loaded.files.read_into(3, slot) == loaded.spec.slot_bytes < theirs.spec.slot_bytes
        loaded.close()
    assert ours.spec.num_experts_L == theirs.spec.num_experts_L and ours.spec.top_k_L == theirs.spec.top_k_L
    greedy = generated(theirs.model, prompts(3))
    require_same_under_every_policy(path, greedy, prompts(3))
    greedy.require_same(served(path, "lru", prompts(3), host_experts=12))


@pytest.mark.slow
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_fifty_prompts_under_every_policy(family: str, tmp_path: Path) -> None:
    """Every policy has its smallest pool."""
    path, twin = written(family, tmp_path)
    many = prompts(50)
    expected = generated(load_full(Checkpoint.open(twin), torch.float32).model, many)
    ties = require_same_under_every_policy(path, expected, many)
    print(f"{family}: {len(ties)} policies, {sum(ties.values())} ties of {len(ties) * len(many)}")


@pytest.mark.parametrize("name", gguf_oracle.MODELS)
def test_what_llama_cpp_converts_is_the_model_it_came_from(name: str) -> None:
    """Weights to the bit, logits, and the tokens that serve gives out of the smallest pool."""
    families.require_known(gguf_oracle.MODELS[name][0])
    if _refused_for_its_groups(name):
        return
    dense, path = gguf_oracle.build(name), GOLDEN / f"{name}.gguf"
    full = load_full(Checkpoint.open(path), torch.float32)
    expected, found = dense.state_dict(), full.model.state_dict()
    assert expected.keys() == found.keys()
    for key, weight in expected.items():
        if key.endswith("A_log"):  # stored as its exponential
            assert torch.allclose(found[key], weight, rtol=0, atol=1e-6)
        else:
            assert torch.equal(found[key], weight), key
    tokens = torch.tensor([prompts(12)[-1] * 3])
    with torch.inference_mode():
        theirs, ours = (model(tokens, use_cache=False).logits for model in (dense, full.model))
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-5)
    generated(dense, prompts(3)).require_same(served(path, "lru", prompts(3)))


@pytest.mark.parametrize("name", llama_cpp_logits.FILES)
def test_logits_are_those_of_llama_cpp(name: str) -> None:
    """Of its own library: the converter's tensors and header may mean what no reader of ours thinks of."""
    families.require_known(gguf_oracle.MODELS[name][0])
    if not _refused_for_its_groups(name):
        assert max(_from_llama_cpp(name, name, llama_cpp_logits.TOKENS)) < 1e-5


def _refused_for_its_groups(name: str) -> bool:
    """Whether this transformers normalizes all groups of its state-space layers together; then it must be refused."""
    if name != "granitehybrid" or "group_size" in inspect.signature(GraniteMoeHybridRMSNormGated).parameters:
        return False
    with refused(UsageError, f"{name}.gguf", "mamba_n_groups: found 2", "use transformers 5.23 or newer"):
        load_full(Checkpoint.open(GOLDEN / f"{name}.gguf"), torch.float32)
    return True


def _from_llama_cpp(name: str, kept: str, tokens: Sequence[int]) -> list[float]:
    """By token, the largest difference to logits of llama.cpp, as a share of their largest."""
    with np.load(llama_cpp_logits.LOGITS) as stored:
        theirs = torch.from_numpy(stored[kept])
    full = load_full(Checkpoint.open(GOLDEN / f"{name}.gguf"), torch.float32)
    with torch.inference_mode():
        ours = full.model(torch.tensor([tokens]), use_cache=False).logits[0]
    return ((ours - theirs[:, : ours.shape[1]]).abs().amax(dim=1) / theirs.abs().max()).tolist()


def test_attention_to_chosen_blocks_is_that_of_llama_cpp() -> None:
    """Of minimax-m3 up to 16 bits for keys and values; attention to every token differs by more than 0.05."""
    families.require_known("minimax_m3_vl_text")
    found = _from_llama_cpp("minimax-m3", "minimax-m3 sparse", llama_cpp_logits.MORE_TOKENS)
    assert max(found) < 5e-3


def test_chosen_blocks_that_llama_cpp_does_not_fill_up_give_its_logits() -> None:
    """Budget 8, blocks of 4. Token 18 is left out: two blocks with the score 0 compete for its last place."""
    families.require_known("qwen4_exp_text")
    found = _from_llama_cpp("qwen4exp", "qwen4exp sparse", llama_cpp_logits.MORE_TOKENS)
    whole = [place for place in range(40) if place < 8 + 4 - 1 or place % 4 == 2]
    assert max(found[place] for place in whole if place != 18) < 1e-5
    assert min(found[place] for place in range(40) if place not in whole) > 1e-3


def test_a_window_over_the_answer_alone_is_that_of_transformers(tmp_path: Path) -> None:
    """Of Unlimited-OCR: 3 tokens of its answer and all of its prompt; without the window answers differ."""
    families.require_known("unlimited_ocr")
    path = rewritten(GOLDEN / "deepseek2-ocr.gguf", tmp_path / "m.gguf", {"deepseek2-ocr.attention.sliding_window": 3})
    dense = gguf_oracle.build("deepseek2-ocr")
    whole = generated(dense, prompts(3), 12)
    dense.config.text_config.layer_types = ["reference_sliding_attention"] * 2
    dense.config.text_config.sliding_window = 3
    greedy = generated(dense, prompts(3), 12)
    assert greedy.tokens != whole.tokens
    greedy.require_same(served(path, "lru", prompts(3), max_tokens=12))


def test_every_architecture_with_experts_is_read_or_refused_by_name() -> None:
    """Those of the gguf package. The other format helps where transformers has the family."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    experts = gguf.MODEL_TENSOR.FFN_UP_EXP
    known = {gguf.MODEL_ARCH_NAMES[kind] for kind, tensors in gguf.MODEL_TENSORS.items() if experts in tensors}
    assert len(known & READ.keys()) > 15 and not READ.keys() & UNREAD.keys()
    for name in known - READ.keys() | UNREAD.keys():
        with refused(UsageError, name, UNREAD.get(name, "another model")) as caught:
            find_architecture(Metadata(name, {}, {}))
        assert ("Hugging Face" in str(caught.value)) == (UNREAD.get(name) in CONFIG_MAPPING), name


def test_a_family_that_this_transformers_lacks_needs_a_newer_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(UNREAD, "gpt-of-tomorrow", "gpt_of_tomorrow")
    with refused(UsageError, "gpt_of_tomorrow", "newer transformers"):
        find_architecture(Metadata("gpt-of-tomorrow", {}, {}))


def _meta(name: str, moved: Mapping[str, str] | None = None, factors: Sequence[float] = (), **changed: Any) -> Metadata:
    """Header of a golden file with other values, `None` leaving one out, other blocks of tensors, and rope factors."""
    header = read_gguf_header(GOLDEN / f"{name}.gguf")
    values = header.metadata | {f"{name}.{key}": value for key, value in changed.items()}
    left = {key: value for key, value in values.items() if value is not None}
    shapes = {(moved or {}).get(stored, stored): tensor.shape for stored, tensor in header.tensors.items()}
    return Metadata(name, left, shapes, factors)


def _config(name: str, **changed: Any) -> dict[str, Any]:
    return READ[name].config(_meta(name, **changed))


def test_what_headers_of_other_models_lack_is_as_in_llama_cpp() -> None:
    """No windows: full attention; no score function of cohere2moe: sigmoid; no list of indexers: by their tensors."""
    families.require_known("laguna")
    made = _config("laguna", **{"attention.sliding_window": None})
    assert families.config("laguna", num_hidden_layers=4, **made).layer_types == ["full_attention"] * 4
    assert _config("cohere2moe", expert_gating_func=None)["expert_selection_fn"] == "sigmoid"
    assert _config("cohere2moe", expert_gating_func=1)["expert_selection_fn"] == "softmax"
    assert _config("glm-dsa", **{"attention.indexer.types": None})["indexer_types"] == ["full", "shared"]
    assert _config("glm-dsa", **{"attention.indexer.types": [True] * 2})["indexer_types"] == ["full"] * 2


def test_what_a_family_cannot_have_is_refused() -> None:
    """Layers at uneven distances, rotary frequencies by no scaling of llama3, no experts."""
    with refused(UsageError, "attention in layers [1, 2]", "equal distances"):
        READ["jamba"].config(_meta("jamba", {"blk.1.attn_norm.weight": "blk.1.attn_q.weight"}))
    for factors, fact in (
        ((2.0, 1.0, 2.0, 2.0), "expected llama3's scaling"),
        ((2.0, 1.0, 1.0, 1.0), "expected llama3's scaling"),
        ((1.1, 1.5, 1.2, 2.0, 2.0, 2.0, 2.0, 2.0), "expected llama3's scaling"),
        ((1.0, 1.0, 1.5, 2.0), "one factor in the transition"),
        *(((1.0, 1.0, factor, 2.0), "finite factors") for factor in (0.0, 0.5, -2.0, math.inf, math.nan)),
        ((1.0, 1.0, 1.0, math.nan), "finite factors"),
    ):
        with refused(UsageError, fact):
            READ["llama4"].config(_meta("llama4", factors=factors))
    with refused(UsageError, "has no experts (architecture jamba)"):
        find_architecture(Metadata("jamba", {"jamba.expert_count": 1}, {"blk.0.ffn_up.weight": (4, 4)}))


def test_mistral_large_3_in_a_file_of_deepseek2_is_read_as_mistral4() -> None:
    header = read_gguf_header(GOLDEN / "mistral4.gguf")
    values = {key.replace("mistral4.", "deepseek2.", 1): value for key, value in header.metadata.items()}
    shapes = {name: tensor.shape for name, tensor in header.tensors.items()}
    scaled = Metadata("deepseek2", {**values, "deepseek2.attention.temperature_scale": 0.25}, shapes)
    made = find_architecture(scaled)
    assert (made.family, find_architecture(Metadata("deepseek2", values, shapes)).family) == ("mistral4", "deepseek_v2")
    assert made.config(scaled)["rope_parameters"]["llama_4_scaling_beta"] == 0.25


def test_dimensions_of_size_one_that_quantizers_omit_change_no_weight(tmp_path: Path) -> None:
    families.require_known("kimi_linear")
    whole = GOLDEN / "kimi-linear.gguf"
    stored = {tensor.name: np.asarray(tensor.data) for tensor in gguf.GGUFReader(whole).tensors}
    short = {name: stored[name][0].astype(np.float32) for name in stored if "conv1d" in name}
    short["blk.0.ssm_a"] = stored["blk.0.ssm_a"].reshape(-1, 1)
    path = rewritten(whole, tmp_path / "m.gguf", {}, short)
    expected, found = (load_full(Checkpoint.open(file), torch.float32).model.state_dict() for file in (whole, path))
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def test_activations_are_counted_for_the_layer_with_most_heads() -> None:
    families.require_known("step3p5")
    checkpoint = Checkpoint.open(GOLDEN / "step35.gguf")
    heads = [layer.num_attention_heads for layer in checkpoint.config.per_layer_config]
    assert heads == [4, 6, 6]
    assert footprint(checkpoint, ServeOptions(), 0).token_bytes > 4 * 6 * 16 * 2


def test_on_text_qwen3_vl_is_the_family_that_serves_its_text_part() -> None:
    from transformers import AutoConfig
    from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeTextModel

    plain = gguf_oracle.build("qwen3vlmoe")
    values = plain.config.to_dict()
    values["rope_parameters"] |= {"mrope_interleaved": True}
    del values["model_type"]
    theirs = Qwen3VLMoeTextModel(AutoConfig.for_model("qwen3_vl_moe_text", **values)).eval()
    theirs.load_state_dict(plain.model.state_dict())
    tokens = torch.tensor([prompts(12)[-1] * 3])
    with torch.inference_mode():
        expected, found = (model(tokens, use_cache=False).last_hidden_state for model in (theirs, plain.model))
    assert torch.equal(found, expected)


def test_a_model_in_several_files(tmp_path: Path) -> None:
    """Served as the one file that they were cut from; a missing or foreign part is refused by name."""
    whole = GOLDEN / "qwen3moe.gguf"
    files = gguf_oracle.split(whole, tmp_path)
    assert served(files[1], "lru", prompts(2)) == served(whole, "lru", prompts(2))
    one, split = (Checkpoint.open(file, weights=False) for file in (whole, files[0]))
    assert one.spec.expert_bytes_L == split.spec.expert_bytes_L
    files[2].rename(tmp_path / "kept")
    with refused(UsageError, "m-00003-of-00003.gguf"):
        Checkpoint.open(files[0])
    shutil.copy(files[1], files[2])
    with refused(MismatchError, "2 of 3", "3 of 3"):
        Checkpoint.open(files[0])


def test_the_header_alone_is_enough_for_a_profile(tmp_path: Path) -> None:
    path, _ = written("qwen3_moe", tmp_path)
    whole = Checkpoint.open(path)
    begin = min(tensor.offset for tensor in whole.index.tensors.values())
    (tmp_path / "header.gguf").write_bytes(path.read_bytes()[:begin])
    alone = Checkpoint.open(tmp_path / "header.gguf", weights=False)
    assert alone.spec.expert_bytes_L == whole.spec.expert_bytes_L
    assert alone.slot_bytes(torch.bfloat16) == 3 * 64 * 32 * 2
    with refused(MismatchError, "header.gguf"):
        Checkpoint.open(tmp_path / "header.gguf")


def test_damaged_and_other_files_are_refused(tmp_path: Path) -> None:
    path, _ = written("qwen3_moe", tmp_path)
    data = path.read_bytes()
    for number, (content, error, reason) in enumerate(
        (
            (data[:-100], MismatchError, r"is truncated: .* \S+\.weight and later tensors are incomplete"),
            (data[:200], MismatchError, "ends at byte 200, inside its header"),
            (b"GGML" + data[4:], MismatchError, "does not begin with GGUF"),
            (data.replace(b"qwen3moe", b"llama4xx"), UsageError, "architecture 'llama4xx', expected one of afmoe"),
            (data.replace(b"embedding_length", b"embedding_lengtx"), MismatchError, "lacks 'qwen3moe.embedding_length"),
            (data.replace(b"ffn_gate_inp", b"ffn_gate_inq"), UsageError, "holds blk.0.ffn_gate_inq.weight, which"),
            (data.replace(b"expert_count", b"expert_counx"), UsageError, "has no experts"),
            (data.replace(b"blk.1.ffn_up_exps", b"blk.0.ffn_up_exps"), MismatchError, "occurs twice"),
            (
                data.replace(b"blk.1.ffn_up_exps", b"blk.1.ffn_uq_exps"),
                MismatchError,
                "holds blk.1.ffn_gate_exps.weight without blk.1.ffn_up_exps.weight",
            ),
        )
    ):
        assert content != data, reason
        file = tmp_path / f"{number}.gguf"
        file.write_bytes(content)
        with pytest.raises(error, match=reason) as caught:
            Checkpoint.open(file)
        assert str(file) in str(caught.value) and "\n" not in str(caught.value)


def test_a_tensor_of_another_type_shape_or_place_is_refused(tmp_path: Path) -> None:
    """llama.cpp too refuses a file whose tensors do not follow each other."""
    whole = GOLDEN / "qwen3moe.gguf"
    data = whole.read_bytes()
    for name in read_gguf_header(whole).tensors:
        begin = data.index(name.encode()) + len(name)
        dims = int.from_bytes(data[begin : begin + 4], "little")
        width, kind = begin + 4, begin + 4 + 8 * dims
        narrow = int.from_bytes(data[width : width + 8], "little") // 2
        place = int.from_bytes(data[kind + 4 : kind + 12], "little") + 32
        for at, number, size in ((width, narrow, 8), (kind, 8, 4), (kind + 4, place, 8)):
            file = tmp_path / "m.gguf"
            file.write_bytes(data[:at] + number.to_bytes(size, "little") + data[at + size :])
            with pytest.raises(MismatchError) as caught:
                load_lazy(Checkpoint.open(file), torch.float32)
            assert str(file) in str(caught.value) and "\n" not in str(caught.value)


def _kinds() -> list[str]:
    """The types of blocks that the gguf package unpacks."""
    found = []
    for kind, (values, num_bytes) in gguf.GGML_QUANT_SIZES.items():
        with contextlib.suppress(NotImplementedError):
            gguf.dequantize(np.zeros((1, num_bytes), dtype=np.uint8), kind)
            found += [kind.name] if values > 1 else []
    return found


@pytest.mark.parametrize("kind", _kinds())
def test_blocks_are_unpacked_as_the_gguf_package_does(kind: str) -> None:
    """Blocks of random bits."""
    quantized = gguf.GGMLQuantizationType[kind]
    num_values, num_bytes = gguf.GGML_QUANT_SIZES[quantized]
    draw = np.random.default_rng(3)
    blocks = draw.integers(0, 256, (6, 4 * num_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        theirs = torch.from_numpy(gguf.dequantize(blocks, quantized))
    out = torch.empty(6, 4 * num_values)
    GgmlCodec((("blocks", quantized.value),)).into({"blocks": torch.from_numpy(blocks)}, out)
    assert torch.allclose(out, theirs, rtol=0, atol=0, equal_nan=True)


def test_the_published_types_are_among_them() -> None:
    k_quants = {"Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"}
    assert {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4", *k_quants} <= set(_kinds())
