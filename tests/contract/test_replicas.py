"""Replicas of every family that has them: exact folding, and files that transformers and the expert pool read alike."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moetool.errors import MismatchError, MoetoolError, UsageError
from moetool.models.loading import load_full, load_lazy, load_unpacked
from moetool.models.packed import PackedWeight, Scheme, quantization_config, round_weight, to_tensors
from moetool.models.spec import read_spec
from moetool.policy import build_policy
from moetool.probes.experts import expert_curve
from moetool.quantize.calibration import Calibration
from moetool.quantize.folding import FAMILIES, folds_of
from moetool.quantize.judging import judge
from moetool.quantize.layerwise import Layerwise
from moetool.quantize.making import ReplicaOptions
from moetool.quantize.replica import make_replica
from moetool.residency import Residency
from moetool.serving.experts import ExpertRuntime
from moetool.serving.store import ExpertStore
from moetool.types import ForwardInfo, Phase
from tests import families

OPTIONS = ReplicaOptions(group=16, grid=2, min_tokens=4)
DRAW = torch.Generator().manual_seed(8)
CALIBRATION = Calibration(
    ids_NS=torch.randint(3, 64, (4, 24), generator=DRAW), judged_NS=torch.randint(3, 64, (2, 24), generator=DRAW)
)


@dataclass
class Case:
    """A tiny model of one family and its replica."""

    name: str
    path: Path
    replica: Path
    card: dict[str, Any]


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    folder = tmp_path_factory.mktemp(request.param)
    families.save(request.param, folder / "model")
    card = make_replica(folder / "model", folder / "replica", CALIBRATION, OPTIONS)
    yield Case(request.param, folder / "model", folder / "replica", card)
    shutil.rmtree(folder)


@pytest.mark.parametrize("name", FAMILIES)
def test_folded_scales_change_nothing(name: str, tmp_path: Path) -> None:
    families.save(name, tmp_path)
    full = load_full(tmp_path, torch.float32)
    moe = {layer.layer_id: layer for layer in full.layers}
    with torch.no_grad():
        expected = full.model(CALIBRATION.judged_NS).logits
        for number, layer in enumerate(full.model.get_decoder().layers):
            parameters = {name: parameter.data for name, parameter in layer.named_parameters()}
            for fold in folds_of(layer, moe.get(number), full.model.config):
                width = parameters[fold.readers[0]].shape[-1]
                channels = width if fold.channel_I is None else int(fold.channel_I.max()) + 1
                shape = (8, channels) if fold.inspect == "experts" else (channels,)
                fold.apply(parameters, torch.empty(shape).uniform_(0.3, 3, generator=DRAW))
        found = full.model(CALIBRATION.judged_NS).logits
    assert torch.allclose(found, expected, rtol=0, atol=1e-5 * max(1.0, expected.abs().max().item()))


def test_transformers_has_loaded_it(case: Case) -> None:
    assert case.card["reloaded_by"] == "transformers"
    assert json.loads((case.replica / "card.json").read_text()) == case.card
    assert not case.replica.with_name("replica.resume").exists()
    assert {note["layer"] for note in case.card["layers"]} == {0, 1, 2}
    assert 0.5 < case.card["judged"]["match"] <= 1


def test_the_pool_computes_what_transformers_does(case: Case) -> None:
    """Out of packed slots, to the same bit for weights, and for logits to the order of sums."""
    whole = load_unpacked(case.replica, torch.float32)
    loaded = load_lazy(case.replica, torch.float32)
    assert loaded.files is not None
    assert loaded.files.slot_bytes == loaded.spec.slot_bytes < 0.3 * read_spec(case.path).slot_bytes
    store = ExpertStore(loaded.files, 3, num_threads=1)
    runtime = ExpertRuntime(loaded, Residency(build_policy("lru", loaded.spec, {}, 3)), store)
    try:
        weights = store.ready(5, 0)
        assert all(isinstance(weight, PackedWeight) for weight in weights)
        layer = loaded.layers[0]
        theirs = whole.get_submodule(layer.path)
        for part, weight in zip(layer.form.parts, weights, strict=True):
            assert torch.equal(weight.to(torch.float32), theirs.get_parameter(part.parameters[0])[5])
        ids_1S = CALIBRATION.judged_NS[:1]
        count = ids_1S.shape[1]
        runtime.begin_forward(
            ForwardInfo(
                forward_id=0, request_T=(0,) * count, phase_T=(Phase.PREFILL,) * count, position_T=tuple(range(count))
            )
        )
        with torch.inference_mode():
            found, expected = (model(ids_1S, use_cache=False).logits for model in (loaded.model, whole))
        assert torch.allclose(found, expected, rtol=0, atol=1e-5 * expected.abs().max().item())
    finally:
        runtime.close()
        loaded.files.shards.close()


def test_packed_experts_are_timed_as_they_are(case: Case) -> None:
    if case.name != "qwen3_moe":
        pytest.skip("one family is enough")
    loaded = load_lazy(case.replica, torch.float32)
    form, hidden = loaded.layers[0].form, loaded.spec.hidden_size
    curve = expert_curve(form, hidden, torch.float32, torch.float32, "cpu", 0, loaded.files)
    assert curve(4) > 0
    loaded.close()


def test_bytes_are_what_the_format_says(case: Case) -> None:
    spec, options = read_spec(case.replica), OPTIONS
    full = read_spec(case.path)
    width = full.expert_bytes_L[0] // 4 // 3 // full.hidden_size
    up = 2 * options.experts.weight_bytes(width, full.hidden_size, 4)
    assert spec.slot_bytes == up + options.experts.weight_bytes(full.hidden_size, width, 4)


@pytest.mark.parametrize("name", ["qwen2_moe", "deepseek_v3"])
def test_asymmetric(name: str, tmp_path: Path) -> None:
    families.save(name, tmp_path / "model")
    options = replace(OPTIONS, symmetric=False, grid=0)
    card = make_replica(tmp_path / "model", tmp_path / "replica", CALIBRATION, options)
    assert card["reloaded_by"] == "transformers"
    names = load_file(tmp_path / "replica" / "model-00002-of-00004.safetensors")
    assert any(name.endswith("o_proj.weight_zero_point") for name in names)
    assert not any(".experts." in name and name.endswith("zero_point") for name in names)


@pytest.mark.parametrize(
    "scheme", [Scheme(group=16, symmetric=False), Scheme(group=32), Scheme(bits=8, group=8)], ids=str
)
def test_experts_that_others_packed_are_read(scheme: Scheme, tmp_path: Path) -> None:
    """Zero points and other groups and widths, though transformers itself reads no zero points of experts."""
    families.save("olmoe", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    dense: dict[str, torch.Tensor] = {}
    packed = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for name in tensors.keys() - packed.keys():
        own = replace(scheme, group=min(scheme.group, 16) if tensors[name].shape[1] == 48 else scheme.group)
        rounded = round_weight(tensors[name], own, torch.float16)
        dense[name] = rounded.dense().float()
        packed |= to_tensors(name, rounded, scheme.bits)
    save_file(packed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = quantization_config(scheme, ["re:.*self_attn.*", "lm_head"])
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = load_lazy(tmp_path, torch.float32)
    files = loaded.files
    assert files is not None and files.slot_bytes == loaded.spec.slot_bytes
    slot = torch.empty(files.slot_bytes, dtype=torch.uint8)
    for key in (0, 9, 23):
        layer, expert = loaded.spec.expert_of(key)
        assert files.read_into(key, slot) == files.slot_bytes
        up, down = (view.to(torch.float32) for view in files.views(slot))
        root = f"model.layers.{layer}.mlp.experts.{expert}"
        assert torch.equal(up, torch.cat([dense[f"{root}.{name}_proj.weight"] for name in ("gate", "up")]))
        assert torch.equal(down, dense[f"{root}.down_proj.weight"])
    loaded.close()


def test_a_killed_run_goes_on_and_makes_the_same(case: Case, tmp_path: Path) -> None:
    if case.name != "qwen3_moe":
        pytest.skip("one family is enough")

    begun: list[int] = []

    def kill(done: int, steps: int) -> None:
        begun.append(done)
        if begun == [0, 1, 2]:
            raise KeyboardInterrupt

    out = tmp_path / "again"
    with pytest.raises(KeyboardInterrupt):
        make_replica(case.path, out, CALIBRATION, OPTIONS, on_progress=kill)
    assert not out.exists() and (tmp_path / "again.resume").is_dir()
    begun.clear()
    begun.append(-1)
    card = make_replica(case.path, out, CALIBRATION, OPTIONS, on_progress=kill)
    assert begun[1] == 2 and begun[-1] == 7
    assert card["weights"] == case.card["weights"]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["again"]


def test_layer_by_layer_is_the_model(case: Case) -> None:
    if case.name not in ("deepseek_v3", "phimoe", "qwen2_moe"):
        pytest.skip("the others are built alike")
    full, loaded = load_full(case.path, torch.float32), load_lazy(case.path, torch.float32)
    layerwise = Layerwise(loaded)
    states = layerwise.begin(CALIBRATION.judged_NS)
    for number in range(len(layerwise.layers)):
        with layerwise.experts(number):
            states = [layerwise.run(number, state) for state in states]
    with torch.no_grad():
        for ids_S, state in zip(CALIBRATION.judged_NS, states, strict=True):
            expected = full.model(ids_S[None]).logits[0]
            assert torch.allclose(layerwise.logits(state), expected, atol=1e-5 * expected.abs().max().item())
    loaded.close()
    same = judge(case.path, case.path, CALIBRATION.judged_NS, torch.float32)
    assert same.kl == 0 and same.match == 1


def test_a_missing_tensor_is_an_error(case: Case, tmp_path: Path) -> None:
    if case.name != "mixtral":
        pytest.skip("one family is enough")
    shutil.copytree(case.replica, tmp_path / "m")
    file = tmp_path / "m" / "model-00002-of-00004.safetensors"
    tensors = load_file(file)
    save_file({n: t for n, t in tensors.items() if "q_proj" not in n}, file, metadata={"format": "pt"})
    with pytest.raises(MismatchError, match="missing keys"):
        load_unpacked(tmp_path / "m", torch.float32)
    with pytest.raises(MismatchError, match="q_proj"):
        load_lazy(tmp_path / "m", torch.float32)


def test_what_cannot_be_made_is_refused_before(tmp_path: Path) -> None:
    families.save("qwen3_moe", tmp_path / "model")
    path, out = tmp_path / "model", tmp_path / "out"
    with pytest.raises(UsageError, match=r"group 64 does not divide the widths 16, 32 of the weights, .* does: 16$"):
        make_replica(path, out, CALIBRATION, replace(OPTIONS, group=64))
    families.save("gpt_oss", tmp_path / "gpt_oss")
    with pytest.raises(UsageError, match="no replica of gpt_oss models"):
        make_replica(tmp_path / "gpt_oss", out, CALIBRATION, OPTIONS)
    families.save("ernie4_5_moe", tmp_path / "ernie")
    with pytest.raises(UsageError, match="no replica of ernie4_5_moe"):
        make_replica(tmp_path / "ernie", out, CALIBRATION, OPTIONS)
    tensors = load_file(path / "model.safetensors")
    tensors["model.embed_tokens.weight"][5] = torch.nan
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    ids_NS = CALIBRATION.ids_NS.clone()
    ids_NS[0, 0] = 5
    with pytest.raises(MoetoolError, match="of 96 tokens have activations that are NaN or infinite before the first"):
        make_replica(path, out, replace(CALIBRATION, ids_NS=ids_NS), OPTIONS)
    assert not out.exists()
