"""Random checkpoints of a shape: their contents, and recovery from interrupted writes."""

import collections
import os
import shutil
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moetool.base.errors import CapacityError, MismatchError, UsageError
from moetool.bench import random_checkpoint as checkpoint
from moetool.bench import serving_setup
from moetool.bench.random_checkpoint import MARKER, cut_spec, random_checkpoint
from moetool.bench.serving_setup import BenchModel, ServingBenchOptions, open_setup
from moetool.models.checkpoint import Checkpoint
from moetool.models.loading import load_lazy
from tests.refusals import refused
from tests.synthetic import make_spec, write_trace
from tests.tiny_shape import EXPERT_BYTES, write_shape


@pytest.fixture
def shape(tmp_path: Path) -> str:
    return write_shape(tmp_path / "tiny")


def test_transformers_and_the_lazy_loader_read_it(shape: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    path = random_checkpoint(shape, 2, tmp_path / "work")
    model, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert model.config.num_hidden_layers == 3  # the dense one comes with the two

    loaded = load_lazy(Checkpoint.open(path), torch.bfloat16)
    assert loaded.files is not None
    assert loaded.spec.layer_ids_L == (1, 2)
    assert loaded.spec.expert_bytes_L == (EXPERT_BYTES,) * 2
    slot = torch.empty(loaded.files.slot_bytes, dtype=torch.uint8)
    assert loaded.files.read_into(loaded.spec.expert_key(1, 5), slot) == EXPERT_BYTES
    up, down = loaded.files.views(slot)
    experts = model.model.layers[2].mlp.experts
    assert torch.equal(up, experts.gate_up_proj[5].bfloat16())
    assert torch.equal(down, experts.down_proj[5].bfloat16())
    loaded.close()


def test_each_expert_is_one_read(shape: str, tmp_path: Path) -> None:
    loaded = load_lazy(Checkpoint.open(random_checkpoint(shape, 2, tmp_path / "work")), torch.bfloat16)
    assert loaded.files is not None
    reads: list[int] = []
    read = loaded.files.shards.read
    loaded.files.shards.read = lambda *args: (reads.append(args[2]), read(*args))[1]  # type: ignore[method-assign]
    loaded.files.read_into(0, torch.empty(loaded.files.slot_bytes, dtype=torch.uint8))
    assert reads == [EXPERT_BYTES]
    loaded.close()


def test_values_are_finite_small_and_different(shape: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(random_checkpoint(shape, 4, tmp_path / "work"))
    rows = collections.Counter()
    for name, value in model.named_parameters():
        if value.dim() == 1:
            assert (value == 1).all(), name
            continue
        assert ((value.abs() >= 2**-6) & (value.abs() < 2**-5)).all(), name
        assert 0.3 < (value > 0).float().mean() < 0.7, name
        rows.update(tuple(row) for row in value.flatten(0, -2)[:, :16].tolist())
    assert max(rows.values()) == 1


def test_checkpoints_are_named_by_seed_and_config(shape: str, tmp_path: Path) -> None:
    work = tmp_path / "work"
    first = random_checkpoint(shape, 1, work)
    before = {file: file.stat().st_mtime_ns for file in first.iterdir()}
    assert random_checkpoint(shape, 1, work) == first
    assert {file: file.stat().st_mtime_ns for file in first.iterdir()} == before  # found, not written
    others = [random_checkpoint(shape, 2, work), random_checkpoint(shape, 1, work, seed=1)]
    assert len({first, *others}) == 3
    data = "model-layer-001.safetensors"
    assert (others[1] / data).read_bytes() != (first / data).read_bytes()
    shutil.rmtree(first)
    contents = (others[0] / data).read_bytes()
    assert (random_checkpoint(shape, 1, work) / data).read_bytes() == contents  # by seed and place alone


def test_a_killed_writer_leaves_no_usable_checkpoint(shape: str, tmp_path: Path) -> None:
    work = tmp_path / "work"
    child = os.fork()
    if child == 0:
        write, files = checkpoint.write_tensors, []

        def killed(file: Path, *rest: object) -> None:
            files.append(file)
            if len(files) == 3:
                os._exit(9)
            write(file, *rest)  # type: ignore[arg-type]

        checkpoint.write_tensors = killed
        random_checkpoint(shape, 4, work)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    left = [path for path in work.iterdir() if path.is_dir()]
    assert [path.suffix for path in left] == [".partial"]
    assert len(list(left[0].glob("*.safetensors"))) == 2
    assert not (left[0] / MARKER).exists()
    whole = random_checkpoint(shape, 4, work)
    assert len(list(whole.glob("*.safetensors"))) == 6
    assert [path for path in work.iterdir() if path.is_dir()] == [whole]


@pytest.mark.follows("moetool.bench.random_checkpoint random_checkpoint")
def test_a_full_disk_is_reported_before_writing(shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage, plenty = collections.namedtuple("usage", "total used free"), shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 0, 10) if path.name == "full" else plenty)
    with refused(CapacityError, "4", "MoE", "10", "--work"):
        random_checkpoint(shape, 4, tmp_path / "full")
    assert list((tmp_path / "full").iterdir()) == []
    assert random_checkpoint(shape, 4, tmp_path / "work").parent == tmp_path / "work"


@pytest.mark.parametrize("layers", [0, 5])
def test_missing_layers_are_refused(shape: str, tmp_path: Path, layers: int) -> None:
    with refused(UsageError, "4 MoE layers", "1 to 4"):
        random_checkpoint(shape, layers, tmp_path / "work")


def test_experts_are_known_before_weights_are_written(shape: str, tmp_path: Path) -> None:
    for layers in (2, None):
        path = random_checkpoint(shape, layers, tmp_path / "work")
        written, known = Checkpoint(path).spec, cut_spec(shape, layers)
        assert known == replace(written, name=shape, revision=known.revision)


def test_routes_of_another_shape_are_refused_before_weights_are_written(
    shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_trace(tmp_path / "routes", make_spec())
    monkeypatch.setattr(serving_setup, "random_checkpoint", lambda *args, **options: pytest.fail("weights are written"))
    subject = BenchModel(shape=shape, routes=tmp_path / "routes", work=tmp_path / "work")
    with refused(MismatchError, tmp_path / "routes", "--layers"), ExitStack() as stack:
        open_setup(subject, ServingBenchOptions(), {}, stack)
