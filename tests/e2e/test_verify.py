"""`moetool verify`: correct models agree, broken ones are named by layer and expert."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moetool.base.errors import CapacityError, UsageError
from moetool.kernels.cpu.compiled import find_kernel
from moetool.kernels.cpu.kinds import BFLOAT16
from moetool.measuring import library_weights
from moetool.measuring.layer_comparison import OUTSIDE
from moetool.measuring.plain_model import open_plain
from moetool.measuring.verification import Comparison, VerifyOptions, verify
from moetool.measuring.verification_report import report_on
from moetool.models import checkpoint, loading
from moetool.models.checkpoint import Checkpoint
from moetool.models.experts.expert_files import ExpertFiles
from moetool.models.files import tensor_index
from moetool.models.files.gguf_header import GgufHeader, read_gguf_header
from moetool.models.gguf import blocks as ggml_blocks
from moetool.models.gguf import weights as gguf_weights
from moetool.models.gguf.architectures import Architecture, Metadata
from moetool.models.loading import CPU
from moetool.models.packed_linear import PackedLinear
from moetool.models.shards import Shards
from moetool.models.weights.nvfp4 import Nvfp4Codec
from moetool.models.weights.pack_quantized import PackCodec
from moetool.models.weights.scaled import ScaledCodec
from moetool.runtime.experts.forward import ExpertRuntime
from tests import families, gguf_models, quantized
from tests.refusals import refused

SMALL = VerifyOptions(policies=("lru",), prompts=3, tokens=3)
_PACKED_SIZE = {
    **{"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64},
    **{"num_hidden_layers": 1, "num_experts": 8, "moe_intermediate_size": 512},
}


def _verify(path: Path | str, options: VerifyOptions = SMALL) -> Comparison:
    with Checkpoint.open(path) as opened:
        return verify(opened, options, lambda what, done, total: None)


@pytest.mark.follows("moetool.measuring.verification _pool")
def test_too_little_memory_for_float32(reference: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moetool.measuring.verification.memory_bytes", lambda: (2**30, 7_000_000))
    few = replace(SMALL, prompts=1, tokens=1)
    with refused(CapacityError, "raise it") as caught:
        _verify(reference, replace(few, device_memory_bytes=1_000_000))
    assert "--set" not in str(caught.value)  # the command has none
    with refused(CapacityError, "give --dtype bfloat16"):
        _verify(reference, few)
    assert _verify(reference, replace(few, dtype="bfloat16")).policies


def _shape(family: str, to: Path, reference: Path, **changed: Any) -> Path:
    """A tiny random model with the embedded model's tokenizer."""
    tokenizer = Checkpoint.open(reference).tokenizer
    families.save(family, to, vocab_size=len(tokenizer), **changed)
    for file in reference.glob("tokenizer*"):
        shutil.copy(file, to)
    return to


@pytest.mark.parametrize("layer_by_layer", [False, True])
def test_the_embedded_model_is_exact_under_every_policy(reference: Path, layer_by_layer: bool) -> None:
    policies = ("lru", "promoe") if layer_by_layer else ("all",)
    options = VerifyOptions(policies=policies, prompts=2, tokens=2, layer_by_layer=layer_by_layer)
    made = _verify(reference, options)
    assert made.verdict == "exact" and not made.problems and made.whole != layer_by_layer
    ran = [row for row in made.policies if not row.skipped]
    assert {"lru", "promoe"} <= {row.policy for row in ran} and made.base == "lru"
    assert all((row.exact, row.ties, row.differing) == (2, 0, 0) and row.same_bits for row in ran)
    assert all(layer.experts_compared == 32 and layer.routes > 0 for layer in made.layers if layer.layer != OUTSIDE)
    assert all(layer.tensors and not layer.tensors_differing for layer in made.layers)
    assert made.yardstick_max is not None and 0 < made.yardstick_max < 1e-3
    skipped = {row.policy: row.skipped for row in made.policies if row.skipped}
    assert layer_by_layer or skipped["belady"] == "it needs future requests"
    assert layer_by_layer or skipped["smoe"] == "it changes the routing"


@pytest.mark.parametrize(
    "family", ["deepseek_v3", "mixtral", "gpt_oss", "llama4_text", "qwen3_next", "dbrx", "longcat_flash"]
)
def test_families_agree_whole_and_layer_by_layer(family: str, reference: Path, tmp_path: Path) -> None:
    path = _shape(family, tmp_path / "m", reference)
    for layer_by_layer in (False, True):
        made = _verify(path, VerifyOptions(policies=("lru",), prompts=2, tokens=2, layer_by_layer=layer_by_layer))
        assert made.verdict in ("exact", "ties"), made.problems


@pytest.mark.parametrize("layer_by_layer", [False, True])
def test_transformers_decodes_where_decoding_differs_from_the_forward(
    layer_by_layer: bool, reference: Path, tmp_path: Path
) -> None:
    """The state of linear attention: transformers generates other tokens than its own forward tells of."""
    options = VerifyOptions(policies=("lru",), prompts=2, tokens=3, layer_by_layer=layer_by_layer)
    made = _verify(_shape("minimax", tmp_path / "m", reference), options)
    assert made.verdict in ("exact", "ties") and made.whole != layer_by_layer, made.problems


@pytest.mark.parametrize("layer_by_layer", [False, True])
def test_quantized_experts_are_compared_with_their_dense_twins(
    layer_by_layer: bool, reference: Path, tmp_path: Path
) -> None:
    _shape("qwen3_moe", tmp_path / "dense", reference)
    config = {"quant_method": "fp8", "weight_block_size": [16, 16], "activation_scheme": "dynamic"}
    quantized.quantize(tmp_path / "dense", tmp_path / "m", config, lambda name: quantized.fp8_block(16))
    made = _verify(tmp_path / "m", VerifyOptions(policies=("lru",), prompts=2, tokens=2, layer_by_layer=layer_by_layer))
    assert made.verdict in ("exact", "ties"), made.problems
    expected = "unpacked by moetool" if layer_by_layer else "unpacked by transformers (dequantize=True)"
    assert made.oracle.startswith(expected)
    assert sum(layer.experts_compared for layer in made.layers) == 24


_COMPRESSED = {
    "nvfp4": (
        "nvfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True},
    ),
    "int4_asymmetric": (
        "pack-quantized",
        {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16, "symmetric": False},
    ),
    "fp8_channel": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}),
}


@pytest.fixture(scope="module", params=[*_COMPRESSED, "gguf"])
def unpacked(request: pytest.FixtureRequest, reference: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in a format that its own library unpacks."""
    folder = tmp_path_factory.mktemp(request.param)
    vocabulary = {"vocab_size": len(Checkpoint.open(reference).tokenizer)}
    if request.param == "gguf":
        types = {"gate": "Q4_0", "up": "Q8_0", "down": "Q4_1", "dense": "Q5_1"}
        return gguf_models.written("qwen2_moe", folder, types, spelled=reference, **vocabulary)[0]
    form, weights = _COMPRESSED[request.param]
    _shape("qwen3_moe", folder / "dense", reference)
    config = quantized.compressed_config(form, weights)
    quantized.quantize(folder / "dense", folder / "m", config, lambda name: quantized.compressed(form, weights))
    return folder / "m"


@pytest.mark.parametrize("layer_by_layer", [False, True])
def test_weights_are_compared_with_those_of_the_formats_library(layer_by_layer: bool, unpacked: Path) -> None:
    made = _verify(unpacked, replace(SMALL, layer_by_layer=layer_by_layer))
    library = "the gguf package" if unpacked.suffix == ".gguf" else "compressed-tensors"
    assert made.oracle == f"unpacked by {library}" and made.whole != layer_by_layer
    assert made.verdict in ("exact", "ties"), made.problems
    assert sum(layer.experts_compared for layer in made.layers) > 0


@pytest.mark.parametrize("layer_by_layer", [False, True])
def test_an_error_of_our_unpacking_differs(
    layer_by_layer: bool, unpacked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def corrupted(real: Callable[..., Any]) -> Callable[..., Any]:
        def into(self: Any, stored: Any, out: torch.Tensor) -> None:
            real(self, stored, out)
            out.mul_(1.25)

        return into

    if unpacked.suffix == ".gguf":
        real = ggml_blocks.unpack_blocks
        monkeypatch.setattr(ggml_blocks, "unpack_blocks", lambda blocks, kind: real(blocks, kind) * 1.25)
    for codec in (Nvfp4Codec, PackCodec, ScaledCodec):
        monkeypatch.setattr(codec, "into", corrupted(codec.into))
    made = _verify(unpacked, replace(SMALL, layer_by_layer=layer_by_layer))
    assert made.verdict == "differs" and any(problem.startswith("layer 0: ") for problem in made.problems)
    assert unpacked.parent.name.startswith("int4") or any("hold other weights" in text for text in made.problems)


@pytest.fixture(scope="module")
def packed(reference: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in MXFP4, experts and linear layers, large enough for the kernels."""
    folder = tmp_path_factory.mktemp("packed")
    _shape("qwen3_moe", folder / "dense", reference, **_PACKED_SIZE)
    config = quantized.compressed_config("mxfp4-pack-quantized", quantized.MXFP4)
    quantized.quantize(folder / "dense", folder / "m", config, lambda name: quantized.mxfp4)
    return folder / "m"


@pytest.mark.skipif(find_kernel(BFLOAT16) is None, reason="numba compiles no kernel here")
@pytest.mark.parametrize("layer_by_layer", [False, True])
def test_packed_linear_layers_and_experts_agree_in_bfloat16(layer_by_layer: bool, packed: Path) -> None:
    made = _verify(packed, replace(SMALL, dtype="bfloat16", layer_by_layer=layer_by_layer))
    with Checkpoint.open(packed) as checkpoint:
        assert len(checkpoint.packed_linears(torch.bfloat16)) == 4
    assert made.whole != layer_by_layer and made.oracle == "unpacked by compressed-tensors"
    assert sum(layer.experts_compared for layer in made.layers) == _PACKED_SIZE["num_experts"]
    assert [problem for problem in made.problems if problem.startswith("layer")] == []


@pytest.mark.skipif(find_kernel(BFLOAT16) is None, reason="numba compiles no kernel here")
def test_a_packed_linear_layer_that_breaks_is_named(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = PackedLinear.forward

    def forward(self: PackedLinear, input: torch.Tensor) -> torch.Tensor:
        return real(self, input) * 1.5

    monkeypatch.setattr(PackedLinear, "forward", forward)
    made = _verify(packed, replace(SMALL, dtype="bfloat16"))
    assert made.verdict == "differs" and made.first.startswith("layer 0: its output differs by ")


def _other_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """One expert's bytes come changed wherever moetool reads them."""
    real = ExpertFiles.read_stored

    def read_stored(self: ExpertFiles, key: int, memory: torch.Tensor) -> int:
        done = real(self, key, memory)
        if self.spec.expert_of(key) == (1, 5):
            memory[:64].view(torch.bfloat16).mul_(-1.5)
        return done

    monkeypatch.setattr(ExpertFiles, "read_stored", read_stored)


def _other_router(monkeypatch: pytest.MonkeyPatch) -> None:
    """The router of one layer is read wrongly."""
    real = Shards.load

    def load(self: Shards, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        value = real(self, name, dtype)
        return value.flip(0) if name.endswith("layers.2.mlp.gate.weight") else value

    monkeypatch.setattr(Shards, "load", load)


def _other_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """An expert's weight in the sum of one layer is lost."""
    real = ExpertRuntime.forward

    def forward(self: ExpertRuntime, layer: Any, hidden: Any, index_TK: Any, weights_TK: Any) -> torch.Tensor:
        if layer.index == 3:
            weights_TK = weights_TK.masked_fill(index_TK == index_TK[0, 0], 0.0)
        return real(self, layer, hidden, index_TK, weights_TK)

    monkeypatch.setattr(ExpertRuntime, "forward", forward)


@pytest.mark.parametrize(
    ("corrupt", "said"),
    [
        (_other_weights, "layer 1: the slots of expert 5 hold other weights"),
        (_other_router, "layer 2: mlp.gate.weight differs from plain transformers"),
        (_other_sum, "layer 3: its output differs by "),
    ],
)
@pytest.mark.parametrize("layer_by_layer", [False, True])
def test_a_broken_model_differs_by_layer_and_expert(
    corrupt: Callable[[pytest.MonkeyPatch], None],
    said: str,
    layer_by_layer: bool,
    reference: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    corrupt(monkeypatch)
    made = _verify(reference, VerifyOptions(policies=("lru",), prompts=1, tokens=2, layer_by_layer=layer_by_layer))
    assert made.verdict == "differs"
    assert made.first.startswith(said), made.problems
    if corrupt is _other_router:
        assert "tokens chose other experts, such as experts " in made.problems[1]
    if corrupt is _other_sum:
        assert "most at a token of experts " in made.first


@pytest.mark.parametrize("layer_by_layer", [False, True])
def test_a_wrong_read_of_a_format_that_moetool_unpacks_differs(
    layer_by_layer: bool, reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The safetensors library reads the stored numbers."""
    dense = _shape("qwen3_moe", tmp_path / "dense", reference)
    config = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False, "sym": True}
    quantized.quantize(dense, tmp_path / "m", config, lambda name: quantized.gptq(act_order=False))
    options = replace(SMALL, prompts=1, layer_by_layer=layer_by_layer)
    good = _verify(tmp_path / "m", options)
    assert good.verdict in ("exact", "ties") and good.oracle.startswith("unpacked by moetool"), good.problems
    assert (good.read_by["numbers"], good.read_by["unpacking"]) == ("safetensors", "moetool")
    _other_router(monkeypatch)
    made = _verify(tmp_path / "m", options)
    assert made.verdict == "differs" and "tokens chose other experts" in made.first


def test_a_text_part_is_not_called_loaded_by_transformers(tmp_path: Path) -> None:
    """transformers builds it only within a larger model."""
    families.save_multimodal("mistral3", tmp_path)
    with Checkpoint.open(tmp_path) as opened:
        plain = open_plain(opened, library_weights.open_library(opened), torch.float32, CPU, whole=True)
    assert plain.origin == "read by safetensors" and plain.read_by["names"] == "moetool"


def test_a_broken_policy_is_named(reference: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from moetool.runtime.experts.host_compute import HostCompute

    real = HostCompute.start

    def start(self: HostCompute, *event: Any) -> list[Callable[[], torch.Tensor]]:
        return [lambda finished=finished: finished() * 2 for finished in real(self, *event)]

    monkeypatch.setattr(HostCompute, "start", start)
    made = _verify(
        reference, VerifyOptions(policies=("static_split", "lru"), prompts=3, tokens=3, device_memory_bytes=10_000_000)
    )
    assert made.verdict == "differs" and made.base == "lru"
    good, bad = made.policies
    assert (good.policy, good.exact, good.differs_at) == ("lru", 3, None)
    assert bad.policy == "static_split" and not bad.same_bits and bad.differs_at is not None
    assert any(problem.startswith("static_split: ") for problem in made.problems)
    assert not any(problem.startswith(("lru", "layer")) for problem in made.problems)


def _gguf(folder: Path, reference: Path) -> Path:
    """A GGUF file of three layers with the embedded model's tokenizer."""
    vocabulary = {"vocab_size": len(Checkpoint.open(reference).tokenizer)}
    return gguf_models.written("qwen3_moe", folder, spelled=reference, **vocabulary)[0]


def test_a_layer_lost_to_a_header_is_found(reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If moetool believed a header's count of prediction blocks again, which the file lacks."""
    values = {"qwen3moe.nextn_predict_layers": 1}
    path = gguf_models.rewritten(_gguf(tmp_path, reference), tmp_path / "n.gguf", values)
    assert _verify(path).verdict == "exact"

    def by_header(self: Metadata) -> int:
        return int(self("block_count")) - int(self.get("nextn_predict_layers", 0))

    monkeypatch.setattr(Metadata, "num_layers", property(by_header))
    made = _verify(path)
    assert made.verdict == "differs"
    assert made.problems[0] == "layers: 3 in the files by the gguf package, 2 as served"
    assert made.problems[1] == "layer 2: 8 experts in the files by the gguf package, 0 as served"


@pytest.mark.parametrize("layer_by_layer", [False, True])
def test_a_layer_lost_to_a_config_is_found(
    layer_by_layer: bool, reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If moetool no longer refused a config of fewer layers than its files."""
    path = _shape("qwen3_moe", tmp_path / "m", reference)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2, "num_nextn_predict_layers": 1}))
    monkeypatch.setattr(checkpoint, "check_layers", lambda *arguments, **options: None)
    made = _verify(path, replace(SMALL, layer_by_layer=layer_by_layer))
    assert made.verdict == "differs" and made.first == "layers: 3 in the files by safetensors, 2 as served"


def test_tensors_under_each_others_names_are_found(
    reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gguf package has its own table of names."""
    path, real = _gguf(tmp_path, reference), Architecture.renamed

    def swapped(self: Architecture, name: str) -> str | None:
        other = {"attn_k": "attn_v", "attn_v": "attn_k"}
        return real(self, ".".join(other.get(part, part) for part in name.split(".")))

    monkeypatch.setattr(Architecture, "renamed", swapped)
    made = _verify(path)
    assert made.verdict == "differs" and made.first.startswith("layer 0: ")


def test_a_header_value_that_is_read_wrongly_is_found(
    reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def doubled(path: Path) -> GgufHeader:
        return _doubled(path, "qwen3moe.rope.freq_base")

    monkeypatch.setattr(gguf_weights, "read_gguf_header", doubled)
    monkeypatch.setattr(library_weights, "read_gguf_header", doubled)
    made = _verify(_gguf(tmp_path, reference))
    assert made.verdict == "differs" and made.first.startswith("header: qwen3moe.rope.freq_base is ")


@pytest.mark.parametrize("key", ["general.architecture", "tokenizer.ggml.tokens"])
def test_a_header_text_that_is_read_wrongly_is_found(
    key: str, reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text, and the length of a list of texts."""
    path = _gguf(tmp_path, reference)
    assert not _problems(path)
    monkeypatch.setattr(library_weights, "read_gguf_header", lambda path: _doubled(path, key))
    (said,) = _problems(path)
    assert said.startswith(f"header: {key} is ")


def _doubled(path: Path, key: str) -> GgufHeader:
    header = read_gguf_header(path)
    return header._replace(metadata={**header.metadata, key: 2 * header.metadata[key]})


def _problems(path: Path) -> list[str]:
    with Checkpoint.open(path) as opened:
        return library_weights.open_library(opened).problems(opened, len(opened.layers))


def test_layers_are_counted_whatever_their_norms_are_called(tmp_path: Path) -> None:
    """Only names of a multi-token prediction block make a block one, not their ends."""
    families.save("qwen3_moe", tmp_path)
    file = tmp_path / "model.safetensors"
    norms = {f"model.layers.{layer}.mlp.prenorm.weight": torch.ones(1) for layer in range(3)}
    save_file({**load_file(file), **norms}, file, {"format": "pt"})
    assert not _problems(tmp_path)
    predicting = {"model.layers.2.enorm.weight": torch.ones(1)}
    save_file({**load_file(file), **predicting}, file, {"format": "pt"})
    assert _problems(tmp_path)[0] == "layers: 2 in the files by safetensors, 3 as served"


def test_the_report_says_which_parts_another_library_reads(reference: Path, tmp_path: Path) -> None:
    other = dict.fromkeys(("files", "names", "numbers", "config"), "transformers") | {"counts": "safetensors"}
    assert _verify(reference).read_by == other
    streamed = _verify(reference, replace(SMALL, layer_by_layer=True)).read_by
    ours = {"config": "moetool", "names": "moetool"}
    assert streamed == dict.fromkeys(("files", "counts", "numbers"), "safetensors") | ours
    with Checkpoint.open(_gguf(tmp_path, reference)) as opened:
        report = report_on(opened, verify(opened, SMALL, lambda what, done, total: None), "cpu")
    names = "gguf (39 of 39 tensors)"
    theirs = {"counts": "gguf", "names": names, "numbers": "gguf", "unpacking": "gguf"}
    assert report.to_json()["read_by"] == {"config": "moetool", "files": "moetool", **theirs}
    facts = dict(report.facts())
    assert facts["read by moetool alone"] == "config, files"
    assert facts["read by other libraries"] == ", ".join(f"{part}: {reader}" for part, reader in theirs.items())


def test_plain_transformers_takes_the_files_that_transformers_takes(tmp_path: Path) -> None:
    """It reads a single file rather than shards."""
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "x", "b": "y"}}))
    assert library_weights.weight_files(tmp_path) == [tmp_path / "x", tmp_path / "y"]
    (tmp_path / "model.safetensors").touch()
    assert library_weights.weight_files(tmp_path) == [tmp_path / "model.safetensors"]


def test_the_report_holds_no_folder_and_no_prompt(reference: Path, tmp_path: Path) -> None:
    shutil.copytree(reference, tmp_path / "secret-user" / "my-moe")
    with Checkpoint.open(tmp_path / "secret-user" / "my-moe") as checkpoint:
        report = report_on(checkpoint, verify(checkpoint, SMALL, lambda what, done, total: None), "cpu")
    assert report.model == "my-moe" and report.verdict_line == f"my-moe: {report.verdict_line.partition(': ')[2]}"
    for suffix in (".md", ".json"):
        report.save(tmp_path / f"report{suffix}")
        text = (tmp_path / f"report{suffix}").read_text()
        assert "secret-user" not in text and str(Path.home()) not in text
        for wanted in (report.revision, report.machine.cpu, report.machine.torch, "exact", "lru"):
            assert wanted in text
    found = json.loads((tmp_path / "report.json").read_text())
    assert found["verdict"] == "exact" and found["policies"][0]["exact"] == 3 and len(found["layers"]) == 9
    assert not any(len(prompt) > 60 for prompt in found["prompts"])


def test_a_policy_that_cannot_be_compared_is_refused(reference: Path) -> None:
    for policy, why in (
        ("belady", "needs future requests"),
        ("smoe", "changes the routing"),
        ("lrru", "did you mean"),
    ):
        with pytest.raises(UsageError, match=why):
            _verify(reference, VerifyOptions(policies=(policy,)))


def _with_own_head(to: Path, reference: Path) -> Path:
    """A model whose config ties the head, though its file holds another one."""
    path = _shape("qwen3_moe", to, reference, tie_word_embeddings=True)
    tensors = load_file(path / "model.safetensors")
    head = torch.empty_like(tensors["model.embed_tokens.weight"])
    tensors["lm_head.weight"] = head.normal_(0, 0.2, generator=torch.Generator().manual_seed(7))
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


@pytest.mark.parametrize("layer_by_layer", [False, True])
def test_a_tied_config_with_a_head_of_its_own_agrees(layer_by_layer: bool, reference: Path, tmp_path: Path) -> None:
    made = _verify(_with_own_head(tmp_path / "m", reference), replace(SMALL, layer_by_layer=layer_by_layer))
    assert made.verdict == "exact", made.problems


@pytest.mark.parametrize("layer_by_layer", [False, True])
def test_a_head_that_is_tied_against_its_file_is_named(
    layer_by_layer: bool, reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = loading.complete

    def complete(model: Any, *arguments: Any) -> None:
        real(model, *arguments)
        model.lm_head.weight = model.model.embed_tokens.weight

    monkeypatch.setattr(loading, "complete", complete)
    made = _verify(_with_own_head(tmp_path / "m", reference), replace(SMALL, layer_by_layer=layer_by_layer))
    assert made.verdict == "differs"
    assert made.first == "outside the layers: lm_head.weight differs from plain transformers", made.problems


def _with_two_sets(to: Path, reference: Path) -> Path:
    """A model with other weights in a shard with an index beside its single file."""
    path = _shape("qwen3_moe", to, reference)
    tensors = {name: tensor.flip(0) for name, tensor in load_file(path / "model.safetensors").items()}
    shard = "model-00001-of-00001.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / shard, {"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, shard)}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def test_two_sets_of_weights_agree_and_reading_the_other_one_differs(
    reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _with_two_sets(tmp_path / "m", reference)
    made = _verify(path)
    assert made.verdict == "exact", made.problems
    monkeypatch.setattr(tensor_index, "choose_weights", lambda *arguments: "model.safetensors.index.json")
    made = _verify(path)
    assert made.verdict == "differs" and "hold other weights" in made.first, made.problems
