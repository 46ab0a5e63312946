"""Which files of a directory are the checkpoint: transformers' choice, or a refusal that names what is there."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from moetool.base.errors import MismatchError, MoetoolError, UsageError
from moetool.models.checkpoint import Checkpoint
from moetool.models.files.location import locate
from moetool.models.files.tensor_index import read_index
from moetool.models.loading import load_full, load_lazy
from tests import families
from tests.logs import warnings
from tests.refusals import refused

ONE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    families.save("qwen3_moe", folder)
    return folder


@pytest.fixture
def model(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "m"))


def _other_weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: -tensor for name, tensor in load_file(folder / ONE).items()}


def _add_shards(folder: Path) -> None:
    """Other weights in two shards with an index."""
    tensors = _other_weights(folder)
    names, weight_map = sorted(tensors), {}
    for number, file in enumerate(SHARDS):
        part = names[number::2]
        save_file({name: tensors[name] for name in part}, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _add(name: str) -> Callable[[Path], None]:
    return lambda folder: save_file(_other_weights(folder), folder / name, {"format": "pt"})


def _add_pickle(folder: Path) -> None:
    torch.save(_other_weights(folder), folder / "pytorch_model.bin")


def _add_gguf(folder: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (folder / name).write_bytes(b"GGUF")


@pytest.mark.parametrize(
    "add",
    [
        _add_shards,
        _add("consolidated.safetensors"),
        _add("model.fp16.safetensors"),
        _add(SHARDS[0]),
        _add_pickle,
        _add_gguf,
    ],
)
def test_what_else_lies_there_is_not_read(add: Callable[[Path], None], model: Path) -> None:
    add(model)
    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).get_input_embeddings().weight
    for load in (load_full, load_lazy):
        with Checkpoint.open(model) as checkpoint:
            assert torch.equal(load(checkpoint, torch.float32).model.get_input_embeddings().weight, theirs)
            assert [file.name for file in checkpoint.index.files] == [ONE]


def test_an_index_is_read_beside_other_names(model: Path) -> None:
    _add_shards(model)
    (model / ONE).rename(model / "consolidated.safetensors")
    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).get_input_embeddings().weight
    with Checkpoint.open(model) as checkpoint:
        assert torch.equal(load_lazy(checkpoint, torch.float32).model.get_input_embeddings().weight, theirs)
        assert [file.name for file in checkpoint.index.files] == [*SHARDS]


def test_two_sets_of_weights_are_told(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    _add_shards(model)
    assert Checkpoint.open(model).index.tensors
    (said,) = warnings(caplog)
    assert f"{ONE} is read" in said and SHARDS[0] in said and str(model) in said
    caplog.clear()
    for file in SHARDS:
        (model / file).unlink()
    assert Checkpoint.open(model).index.tensors
    (model / INDEX).write_text("{")  # transformers does not open it
    assert Checkpoint.open(model).index.tensors
    assert not warnings(caplog)


def _move_to_an_index(folder: Path, *, without: str, listed: str) -> None:
    """Move the weights but one to a shard whose index names all of them, and a further one."""
    tensors = load_file(folder / ONE)
    weight_map = dict.fromkeys((*tensors, listed), SHARDS[0])
    (folder / ONE).unlink()
    tensors.pop(without, None)
    save_file(tensors, folder / SHARDS[0], {"format": "pt"})
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_an_index_entry_that_nothing_needs(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    _move_to_an_index(model, without="", listed="mtp.fc.weight")
    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).state_dict()
    with Checkpoint.open(model) as checkpoint:
        ours = load_full(checkpoint, torch.float32).model.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert any("mtp.fc.weight" in said and str(model / INDEX) in said for said in warnings(caplog))


@pytest.mark.parametrize(
    "lost",
    [
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.1.mlp.gate.weight",
        "model.layers.1.mlp.experts.3.up_proj.weight",
        "lm_head.weight",
    ],
)
def test_a_tensor_that_the_model_uses_must_exist(lost: str, model: Path) -> None:
    _move_to_an_index(model, without=lost, listed=lost)
    for load in (load_full, load_lazy):
        with Checkpoint.open(model) as checkpoint, refused(MismatchError, lost, model):
            load(checkpoint, torch.float32)


@pytest.mark.parametrize(
    ("add", "says"),
    [
        (_add("consolidated.safetensors"), "consolidated.safetensors"),
        (_add("model.fp16.safetensors"), "model.fp16.safetensors"),
        (_add(SHARDS[0]), SHARDS[0]),
        (_add("adapter_model.safetensors"), "adapter_model.safetensors"),
        (_add_pickle, "pytorch_model.bin"),
        (_add_gguf, "a.gguf"),
    ],
)
def test_a_directory_that_transformers_reads_otherwise_or_not_is_refused(
    add: Callable[[Path], None], says: str, model: Path
) -> None:
    add(model)
    (model / ONE).unlink()
    with pytest.raises(UsageError, match=rf"neither {ONE} nor {INDEX}") as caught:
        Checkpoint.open(model).index  # noqa: B018 - reading it looks for the files
    assert says in str(caught.value) and str(model) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("file", "content"),
    [("adapter_config.json", '{"peft_type": "LORA"}'), ("shard-00000-model-00001-of-00002.safetensors", "")],
)
def test_files_that_transformers_would_add_or_prefer_are_refused(file: str, content: str, model: Path) -> None:
    (model / file).write_text(content)
    with pytest.raises(UsageError) as caught:
        Checkpoint.open(model).index  # noqa: B018
    assert file in str(caught.value) and ONE in str(caught.value)


def test_a_config_that_names_other_weights_is_refused(model: Path) -> None:
    _add("other.safetensors")(model)
    config = json.loads((model / "config.json").read_text())
    for named in ("other.safetensors", ONE):
        (model / "config.json").write_text(json.dumps({**config, "transformers_weights": named}))
        theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).get_input_embeddings().weight
        assert torch.equal(theirs, load_file(model / named)[EMBEDDING])
        if named == ONE:
            assert Checkpoint.open(model).index.tensors
        else:
            with pytest.raises(MoetoolError, match=rf"names other\.safetensors .*expected {ONE}"):
                Checkpoint.open(model).index  # noqa: B018


def test_a_directory_of_gguf_files_is_answered_with_one(tmp_path: Path) -> None:
    _add_gguf(tmp_path)
    with refused(UsageError, "2", "GGUF", "a.gguf"):
        locate(str(tmp_path))


def test_only_weights_that_are_read_must_be_there(model: Path) -> None:
    """A copy of the hub's cache may lack the blobs of other files."""
    (model / "consolidated.safetensors").symlink_to(model / "gone")
    _add_shards(model)
    assert read_index(model).tensors
    (model / ONE).unlink()
    (model / ONE).symlink_to(model / "gone")  # transformers goes on to the index
    assert read_index(model).tensors
    (model / SHARDS[1]).unlink()
    (model / SHARDS[1]).symlink_to(model / "gone")
    with refused(UsageError, SHARDS[1], "cp -rL"):
        read_index(model)
