"""Experts are read byte for byte, whatever the layout, and damaged files are refused by name."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moetool.base.errors import MismatchError, UsageError
from moetool.models.checkpoint import Checkpoint
from moetool.models.experts.expert_files import ExpertFiles
from moetool.models.loading import load_lazy
from tests.refusals import refused


def _copy(reference: Path, to: Path, tensors: dict[str, torch.Tensor], shards: int = 1) -> Path:
    """The reference model with other weights, split over several files."""
    to.mkdir()
    shutil.copy(reference / "config.json", to)
    names = sorted(tensors)
    parts = [names[i::shards] for i in range(shards)]
    if shards == 1:
        save_file(tensors, to / "model.safetensors")
        return to
    weight_map = {}
    for i, part in enumerate(parts):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        save_file({n: tensors[n] for n in part}, to / file)
        weight_map |= dict.fromkeys(part, file)
    (to / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return to


@pytest.fixture(scope="module")
def tensors(reference: Path) -> dict[str, torch.Tensor]:
    return load_file(reference / "model.safetensors")


def _files(path: Path, direct: bool = True) -> ExpertFiles:
    return Checkpoint(path, direct=direct).expert_files()


def _all_equal(files: ExpertFiles, tensors: dict[str, torch.Tensor]) -> None:
    slot = torch.empty(files.slot_bytes, dtype=torch.uint8)
    for key in (0, 31, 32, 100, 255):
        layer, expert = files.spec.expert_of(key)
        root = f"model.layers.{layer}.mlp.experts.{expert}"
        files.read_into(key, slot)
        gate_up, down = files.views(slot)
        gate, up = (tensors[f"{root}.{name}_proj.weight"] for name in ("gate", "up"))
        assert torch.equal(gate_up, torch.cat([gate, up]))
        assert torch.equal(down, tensors[f"{root}.down_proj.weight"])


@pytest.mark.parametrize("direct", [True, False])
def test_reads_one_tensor_per_expert(reference: Path, tensors: dict[str, torch.Tensor], direct: bool) -> None:
    files = _files(reference, direct)
    assert files.slot_bytes == files.spec.slot_bytes == 3 * 64 * 192 * 2
    _all_equal(files, tensors)


def test_one_expert_is_one_read(reference: Path) -> None:
    files = _files(reference)
    assert {len(reads) for reads in files.reads.values()} == {1}  # down, gate and up lie side by side


def test_reads_experts_spread_over_shards(reference: Path, tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    _all_equal(_files(_copy(reference, tmp_path / "m", tensors, shards=3)), tensors)


def test_reads_stacked_experts(reference: Path, tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    stacked = {k: v for k, v in tensors.items() if ".experts." not in k}
    for layer in range(8):
        root = f"model.layers.{layer}.mlp.experts"

        def stack(kind: str, root: str = root) -> torch.Tensor:
            return torch.stack([tensors[f"{root}.{e}.{kind}_proj.weight"] for e in range(32)])

        stacked[f"{root}.gate_up_proj"] = torch.cat([stack("gate"), stack("up")], dim=1)
        stacked[f"{root}.down_proj"] = stack("down")
    _all_equal(_files(_copy(reference, tmp_path / "m", stacked)), tensors)


def test_names_of_another_family_are_refused_by_name(
    reference: Path, tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    names = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    renamed = {}
    for name, tensor in tensors.items():
        if ".experts." in name:
            for old, new in names.items():
                name = name.replace(old, new)
        renamed[name] = tensor
    with refused(MismatchError, "model.layers.0.mlp.experts.gate_up_proj"):
        load_lazy(Checkpoint.open(_copy(reference, tmp_path / "m", renamed)), torch.float32)


def test_tensors_that_a_parameter_lacks_are_named_beside_it(
    reference: Path, tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    without = {name: tensor for name, tensor in tensors.items() if not (".3.mlp.experts" in name and "up_proj" in name)}
    with refused(MismatchError, "model.layers.3.mlp.experts.gate_up_proj", "up_proj"):
        load_lazy(Checkpoint.open(_copy(reference, tmp_path / "m", without)), torch.float32)


def test_a_foreign_data_type_is_refused_by_name(
    reference: Path, tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    name = "model.layers.3.mlp.experts.4.down_proj.weight"
    wrong = {**tensors, name: tensors[name].float()}
    with refused(MismatchError, "expert 4", "4.down_proj.weight", "F32", "torch.bfloat16"):
        load_lazy(Checkpoint.open(_copy(reference, tmp_path / "m", wrong)), torch.float32)


def test_lazy_model_has_the_dense_weights_of_the_full_one(lazy, full) -> None:
    whole = dict(full.model.named_parameters())
    experts = {f"{layer.path}.{name}" for layer in lazy.layers for name in ("gate_up_proj", "down_proj")}
    for name, parameter in lazy.model.named_parameters():
        assert parameter.is_meta == (name in experts)
        if not parameter.is_meta:
            assert torch.equal(parameter, whole[name]), name
    for name, buffer in lazy.model.named_buffers():
        assert torch.equal(buffer, full.model.get_buffer(name)), name
    assert lazy.model.lm_head.weight is lazy.model.get_input_embeddings().weight
    assert lazy.model.generation_config.eos_token_id == full.model.generation_config.eos_token_id


def _break(reference: Path, to: Path) -> Path:
    shutil.copytree(reference, to)
    return to


def test_truncated_shard_is_refused_by_name(reference: Path, tmp_path: Path) -> None:
    path = _break(reference, tmp_path / "m")
    with (path / "model.safetensors").open("r+b") as file:
        file.truncate(20_000_000)
    with refused(MismatchError, "model.safetensors"):
        load_lazy(Checkpoint.open(path), torch.float32)


def test_garbage_shard_is_refused(reference: Path, tmp_path: Path) -> None:
    path = _break(reference, tmp_path / "m")
    (path / "model.safetensors").write_bytes(b"not a safetensors file, but long enough to have a header length")
    with refused(MismatchError, "model.safetensors"):
        load_lazy(Checkpoint.open(path), torch.float32)


def test_missing_expert_is_refused_by_name(reference: Path, tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    less = {k: v for k, v in tensors.items() if k != "model.layers.5.mlp.experts.7.up_proj.weight"}
    with refused(MismatchError, "layers.5.mlp.experts.7.up_proj.weight"):
        load_lazy(Checkpoint.open(_copy(reference, tmp_path / "m", less)), torch.float32)


def test_wrong_shape_is_refused_by_name(reference: Path, tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    name = "model.layers.2.self_attn.q_proj.weight"
    wrong = {**tensors, name: torch.zeros(10, 192, dtype=torch.bfloat16)}
    with refused(MismatchError, "q_proj.weight", "[10, 192]", "[192, 192]"):
        load_lazy(Checkpoint.open(_copy(reference, tmp_path / "m", wrong)), torch.float32)


def test_missing_shard_is_refused_by_name(reference: Path, tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    path = _copy(reference, tmp_path / "m", tensors, shards=2)
    (path / "model-00002-of-00002.safetensors").unlink()
    with refused(UsageError, "model-00002-of-00002.safetensors"):
        load_lazy(Checkpoint.open(path), torch.float32)


def test_a_dense_model_is_refused(tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "vocab_size": 8,
    }
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **config}))
    with refused(UsageError, "no MoE layers"):
        _ = Checkpoint.open(tmp_path).spec


def test_unknown_family_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no_such_family"}))
    with refused(UsageError, "no_such_family"):
        _ = Checkpoint.open(tmp_path).spec
