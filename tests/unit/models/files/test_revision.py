"""The identity of a checkpoint: every tensor and every stacked expert counts, and how files are cut does not."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from moetool.base.errors import MismatchError
from moetool.base.types import REVISION_KIND, ModelSpec
from moetool.models.checkpoint import Checkpoint
from moetool.models.files.revision import SAMPLE_BYTES, revision_of
from moetool.models.files.tensor_index import read_index
from tests.refusals import refused
from tests.synthetic_routes import make_spec

DRAW = torch.Generator().manual_seed(5)


def _revision(tensors: dict[str, torch.Tensor], folder: Path, config: bytes = b"{}") -> str:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    return revision_of(config, read_index(folder))


def test_each_replaced_tensor_of_the_embedded_model_is_seen(reference: Path, tmp_path: Path) -> None:
    """The bytes of one tensor at a time are those of another draw; the file is changed in place, its header kept."""
    shutil.copy(reference / "model.safetensors", tmp_path)
    index = read_index(tmp_path)
    seen = {revision_of(b"", index)}
    names = sorted(index.tensors)
    chosen = names[:: len(names) // 60]
    with (tmp_path / "model.safetensors").open("r+b") as file:
        for name in chosen:
            tensor = index.tensors[name]
            file.seek(tensor.offset)
            before = file.read(tensor.num_bytes)
            file.seek(tensor.offset)
            file.write(torch.randint(256, (tensor.num_bytes,), dtype=torch.uint8, generator=DRAW).numpy().tobytes())
            file.flush()
            seen.add(revision_of(b"", index))
            file.seek(tensor.offset)
            file.write(before)
            file.flush()
    assert len(seen) == 1 + len(chosen) > 60
    assert revision_of(b"", index) in seen


def test_each_stacked_expert_is_seen(tmp_path: Path) -> None:
    stacked = torch.randn(12, 40, 64, generator=DRAW)
    seen = {_revision({"experts": stacked}, tmp_path)}
    for expert in range(12):
        other = stacked.clone()
        other[expert] = torch.randn(40, 64, generator=DRAW)
        seen.add(_revision({"experts": other}, tmp_path))
    assert len(seen) == 13


@pytest.mark.parametrize("place", [0, 1, -1, -2])
def test_the_ends_and_the_middle_are_read_and_nothing_between(place: int, tmp_path: Path) -> None:
    whole = torch.zeros(64 * SAMPLE_BYTES, dtype=torch.uint8)
    base = _revision({"a": whole}, tmp_path)
    changed = whole.clone()
    changed[place] = 1
    assert _revision({"a": changed}, tmp_path) != base
    changed = whole.clone()
    changed[len(whole) // 2] = 1
    assert _revision({"a": changed}, tmp_path) != base
    changed = whole.clone()
    changed[len(whole) // 4] = 1
    assert _revision({"a": changed}, tmp_path) == base  # what it is documented to miss


def test_what_else_it_depends_on(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(8.0), "b": torch.arange(6, dtype=torch.int32)}
    base = _revision(tensors, tmp_path / "one")
    assert base.startswith(REVISION_KIND)
    others = [
        _revision({"a": tensors["b"], "b": tensors["a"]}, tmp_path / "names"),
        _revision({**tensors, "a": tensors["a"].reshape(2, 4)}, tmp_path / "shapes"),
        _revision({**tensors, "b": tensors["b"].view(torch.float32)}, tmp_path / "types"),
        _revision({**tensors, "c": torch.empty(0)}, tmp_path / "more"),
        _revision(tensors, tmp_path / "config", b'{"a": 1}'),
    ]
    assert len({base, *others}) == 6
    two = tmp_path / "two"
    two.mkdir()
    for name, tensor in tensors.items():
        save_file({name: tensor}, two / f"{name}.safetensors", metadata={"format": "pt"})
    weight_map = {name: f"{name}.safetensors" for name in tensors}
    (two / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert revision_of(b"{}", read_index(two)) == base  # however they are spread over files


def test_it_is_that_of_the_spec_and_tells_a_config_from_a_checkpoint(reference: Path) -> None:
    spec = Checkpoint.open(reference).spec
    assert spec.revision.startswith(REVISION_KIND) and spec.revision == Checkpoint.open("reference").revision
    assert not Checkpoint.open(reference, weights=False).revision.startswith(REVISION_KIND)


def test_artefacts_of_the_earlier_kind_are_told_why() -> None:
    new = make_spec(revision=REVISION_KIND + "a" * 64)
    old = ModelSpec.from_json(json.loads(json.dumps({**new.to_json(), "revision": "b" * 64})))
    with refused(MismatchError, "earlier", "moetool", "predictor"):
        new.require_same(old, "the model", "the predictor")
    with pytest.raises(MismatchError) as told:
        new.require_same(make_spec(revision=REVISION_KIND + "c" * 64), "the model", "the predictor")
    assert "earlier" not in str(told.value)
