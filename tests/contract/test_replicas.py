"""Replicas of every family that has them: exact folding, and files that transformers and the expert pool read alike."""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moetool.base.errors import CapacityError, MismatchError, MoetoolError, UsageError
from moetool.base.types import ForwardInfo, Phase
from moetool.caching.policy import build_policy
from moetool.caching.residency import Residency
from moetool.measuring.probes.expert_compute import expert_curve
from moetool.models.checkpoint import Checkpoint
from moetool.models.files.tensor_index import read_index
from moetool.models.loading import load_full, load_lazy, load_unpacked
from moetool.models.packed_memory import held_bytes, load_packed
from moetool.models.shards import Shards
from moetool.models.weights.pack_quantized import PackQuantized
from moetool.models.weights.packed import PackedWeight, Scheme, quantization_config, round_weight, to_tensors
from moetool.runtime.experts.forward import ExpertRuntime
from moetool.runtime.experts.store import ExpertStore
from moetool.training.quantize.calibration import Calibration
from moetool.training.quantize.folding import FAMILIES, folds_of
from moetool.training.quantize.judging import judge
from moetool.training.quantize.layer_forward import Layerwise
from moetool.training.quantize.replica import choose, make_replica
from moetool.training.quantize.replica_layers import ReplicaOptions
from tests import families
from tests.refusals import refused

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
    card = make_replica(Checkpoint.open(folder / "model"), folder / "replica", CALIBRATION, OPTIONS)
    yield Case(request.param, folder / "model", folder / "replica", card)
    shutil.rmtree(folder)


@pytest.mark.parametrize("name", FAMILIES)
def test_folded_scales_change_nothing(name: str, tmp_path: Path) -> None:
    families.save(name, tmp_path)
    full = load_full(Checkpoint.open(tmp_path), torch.float32)
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


def test_replicas_of_bfloat16_models_are_loaded_again(tmp_path: Path) -> None:
    """Their scales have 16 bits too, and transformers would unpack attention with scales widened to float32."""
    families.save("qwen3_moe", tmp_path / "wide")
    model = load_full(Checkpoint.open(tmp_path / "wide"), torch.bfloat16).model
    model.save_pretrained(tmp_path / "model")
    card = make_replica(Checkpoint.open(tmp_path / "model"), tmp_path / "replica", CALIBRATION, OPTIONS)
    assert card["reloaded_by"] == "transformers"
    scale = read_index(tmp_path / "replica").tensors["model.layers.0.self_attn.q_proj.weight_scale"]
    assert scale.dtype == "BF16"


def test_the_pool_computes_what_transformers_does(case: Case) -> None:
    """Out of packed slots, to the same bit for weights, and for logits to the order of sums."""
    whole = load_unpacked(case.replica, torch.float32)
    loaded = load_lazy(Checkpoint.open(case.replica), torch.float32)
    assert loaded.files is not None
    assert loaded.files.slot_bytes == loaded.spec.slot_bytes < 0.3 * Checkpoint.open(case.path).spec.slot_bytes
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
    loaded = load_lazy(Checkpoint.open(case.replica), torch.float32)
    form, hidden = loaded.layers[0].form, loaded.spec.hidden_size
    curve = expert_curve(form, hidden, torch.float32, torch.float32, "cpu", 0, loaded.files)
    assert curve(4) > 0
    loaded.close()


def test_bytes_are_what_the_format_says(case: Case) -> None:
    spec, options = Checkpoint.open(case.replica).spec, OPTIONS
    full = Checkpoint.open(case.path).spec
    width = full.expert_bytes_L[0] // 4 // 3 // full.hidden_size
    scheme = options.experts
    format = PackQuantized(scheme.bits, scheme.group, scheme.symmetric)
    up = 2 * format.stored_bytes(width, full.hidden_size, 4)
    assert spec.slot_bytes == up + format.stored_bytes(full.hidden_size, width, 4)


@pytest.mark.parametrize("name", ["qwen2_moe", "deepseek_v3"])
def test_asymmetric(name: str, tmp_path: Path) -> None:
    families.save(name, tmp_path / "model")
    options = replace(OPTIONS, dense_symmetric=False, grid=0)
    card = make_replica(Checkpoint.open(tmp_path / "model"), tmp_path / "replica", CALIBRATION, options)
    assert card["reloaded_by"] == "transformers"
    names = load_file(tmp_path / "replica" / "model-00002-of-00004.safetensors")
    assert any(name.endswith("o_proj.weight_zero_point") for name in names)
    assert not any(".experts." in name and name.endswith("zero_point") for name in names)


@pytest.mark.parametrize(
    "scheme", [Scheme(group=16, symmetric=False), Scheme(group=8), Scheme(bits=8, group=16)], ids=str
)
def test_experts_that_others_packed_are_read(scheme: Scheme, tmp_path: Path) -> None:
    """Zero points and other groups and widths, though transformers itself reads no zero points of experts."""
    families.save("olmoe", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    dense: dict[str, torch.Tensor] = {}
    packed = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for name in tensors.keys() - packed.keys():
        rounded = round_weight(tensors[name], scheme, torch.float16)
        dense[name] = rounded.dense().float()
        packed |= to_tensors(name, rounded, scheme.bits)
    save_file(packed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = quantization_config(scheme, ["re:.*self_attn.*", "lm_head"])
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = load_lazy(Checkpoint.open(tmp_path), torch.float32)
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
    if scheme.symmetric:
        load_unpacked(tmp_path, torch.float32)
        return
    # Why routed experts get no zero points of ours: plain transformers does not hand them to compressed-tensors.
    with refused(MismatchError, "transformers", "load", "Asymmetric"):
        load_unpacked(tmp_path, torch.float32)
    full = load_full(Checkpoint.open(tmp_path), torch.float32)
    experts = full.layers[1].experts
    root = f"{full.layers[1].path}.3"
    assert torch.equal(experts.down_proj[3], dense[f"{root}.down_proj.weight"])
    assert torch.equal(experts.gate_up_proj[3], torch.cat([dense[f"{root}.{n}_proj.weight"] for n in ("gate", "up")]))
    assert full.model(CALIBRATION.judged_NS).logits.isfinite().all()


def _pack(
    path: Path, picked: Callable[[str], bool], ignore: list[str], bits: int = 4, whole_rows: bool = False
) -> None:
    """Pack some weights of a saved model as somebody else would."""
    tensors = load_file(path / "model.safetensors")
    packed = {name: tensor for name, tensor in tensors.items() if not picked(name)}
    for name in tensors.keys() - packed.keys():
        scheme = Scheme(bits=bits, group=tensors[name].shape[1] if whole_rows else 16)
        packed |= to_tensors(name, round_weight(tensors[name], scheme, torch.float32), bits)
    save_file(packed, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    made = quantization_config(Scheme(bits=bits, group=16), ignore)
    if whole_rows:
        made["config_groups"]["group_0"]["weights"] |= {"strategy": "channel", "group_size": None}
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": made}))


@pytest.mark.parametrize(
    ("ignored", "whole_rows", "bits"),
    [("gate", False, 8), ("gate", True, 4), ("experts", True, 8), ("self_attn", False, 4)],
)
def test_what_others_packed_is_what_transformers_unpacks(
    ignored: str, whole_rows: bool, bits: int, tmp_path: Path
) -> None:
    """By groups or whole rows, in 4 bits and 8, with attention, experts or nothing but gates and head left alone."""
    families.save("qwen3_moe", tmp_path)
    ignore = ["lm_head", r"re:.*mlp\.gate$", f"re:.*{ignored}.*"]
    _pack(
        tmp_path,
        lambda name: name.endswith("_proj.weight") and f"{ignored}." not in name,
        ignore[: 2 if ignored == "gate" else 3],
        bits,
        whole_rows,
    )
    if ignored == "experts":  # transformers expects them packed where anything is
        with pytest.raises(MismatchError, match=r"transformers (cannot load|loads .* unexpected keys)"):
            load_unpacked(tmp_path, torch.float32)
    theirs = load_full(Checkpoint.open(tmp_path), torch.float32).model.state_dict()
    loaded = load_lazy(Checkpoint.open(tmp_path), torch.float32)
    assert loaded.files is not None
    ours = loaded.model.state_dict()
    for layer in loaded.layers:
        ours |= {f"{layer.path}.{name}": one for name, one in loaded.files.stacked(layer, torch.float32).items()}
    assert ours.keys() <= theirs.keys()  # scales and shapes lie beside what was unpacked
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    loaded.close()


def test_experts_that_are_not_packed_in_one_layer_are_read(tmp_path: Path) -> None:
    families.save("qwen3_moe", tmp_path)
    _pack(
        tmp_path,
        lambda name: name.endswith("_proj.weight") and "layers.1.mlp" not in name,
        ["lm_head", r"re:.*mlp\.gate$", r"re:.*layers\.1\.mlp.*"],
    )
    sizes = Checkpoint.open(tmp_path).spec.expert_bytes_L
    assert sizes[0] == sizes[2] < sizes[1]


def test_an_expert_that_is_packed_otherwise_than_its_layer_is_refused(tmp_path: Path) -> None:
    families.save("qwen3_moe", tmp_path)
    _pack(
        tmp_path,
        lambda name: name.endswith("_proj.weight") and "layers.1.mlp.experts.5" not in name,
        ["lm_head", r"re:.*mlp\.gate$"],
    )
    with refused(MismatchError, "expert 5", "expert 0", "int4"):
        load_lazy(Checkpoint.open(tmp_path), torch.float32)


def test_gpt_oss_is_read_with_packed_attention_and_refused_with_packed_experts(tmp_path: Path) -> None:
    families.save("gpt_oss", tmp_path)
    dense = load_file(tmp_path / "model.safetensors")
    _pack(tmp_path, lambda name: name.endswith("_proj.weight"), ["re:.*experts.*", "re:.*router.*", "lm_head"])
    loaded = load_lazy(Checkpoint.open(tmp_path), torch.float32)
    name = "model.layers.0.self_attn.q_proj.weight"
    expected = round_weight(dense[name], Scheme(group=16), torch.float32).dense()
    assert torch.equal(loaded.model.get_parameter(name), expected)
    loaded.close()
    tensors = load_file(tmp_path / "model.safetensors")
    for stacked in [name for name in tensors if name.endswith("experts.down_proj")]:
        for expert, weight_ID in enumerate(tensors.pop(stacked)):
            single = stacked.replace("down_proj", f"{expert}.down_proj.weight")
            tensors |= to_tensors(single, round_weight(weight_ID.T, Scheme(group=16), torch.float32), 4)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with refused(MismatchError, "model.layers.0.mlp.experts.down_proj"):
        load_lazy(Checkpoint.open(tmp_path), torch.float32)


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
        make_replica(Checkpoint.open(case.path), out, CALIBRATION, OPTIONS, on_progress=kill)
    assert not out.exists() and (tmp_path / "again.resume").is_dir()
    begun.clear()
    begun.append(-1)
    card = make_replica(Checkpoint.open(case.path), out, CALIBRATION, OPTIONS, on_progress=kill)
    assert begun[1] == 2 and begun[-1] == 7 and 1 not in begun
    assert card["weights"] == case.card["weights"]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["again"]


def test_layer_by_layer_is_the_model(case: Case) -> None:
    if case.name not in ("deepseek_v3", "phimoe", "qwen2_moe"):
        pytest.skip("the others are built alike")
    full, loaded = (
        load_full(Checkpoint.open(case.path), torch.float32),
        load_lazy(Checkpoint.open(case.path), torch.float32),
    )
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
    same = judge(Checkpoint.open(case.path), Checkpoint.open(case.path), CALIBRATION.judged_NS, torch.float32)
    assert same.kl == 0 and same.match == 1


def test_a_missing_tensor_is_an_error(case: Case, tmp_path: Path) -> None:
    if case.name != "mixtral":
        pytest.skip("one family is enough")
    shutil.copytree(case.replica, tmp_path / "m")
    file = tmp_path / "m" / "model-00002-of-00004.safetensors"
    tensors = load_file(file)
    save_file({n: t for n, t in tensors.items() if "q_proj" not in n}, file, metadata={"format": "pt"})
    with refused(MismatchError, "missing", "keys"):
        load_unpacked(tmp_path / "m", torch.float32)
    with refused(MismatchError, "q_proj"):
        load_lazy(Checkpoint.open(tmp_path / "m"), torch.float32)


@pytest.mark.follows("moetool.training.quantize.replica choose")
def test_a_replica_that_memory_does_not_hold_fits_in_fewer_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moetool.training.quantize.replica.memory_bytes", lambda: (2**40, 90_000_000))
    checkpoint, asked = Checkpoint.open("reference"), replace(OPTIONS, dtype="float32", max_tokens=100_000)
    with refused(CapacityError, "--set dtype=bfloat16 or max_tokens=N"):
        choose(checkpoint, asked, {"dtype"})
    for given in (replace(asked, dtype="bfloat16"), replace(asked, max_tokens=1000)):
        assert choose(checkpoint, given, {"dtype"})[0] == given


class _Untouched(Shards):
    """Weight files of which only the headers may be read."""

    def read(self, *args: Any) -> memoryview:
        raise AssertionError("a weight was read")


def test_what_cannot_be_made_is_refused_before_a_weight_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    families.save("qwen3_moe", tmp_path / "model")
    for name in ("gpt_oss", "ernie4_5_moe"):
        families.save(name, tmp_path / name)
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    shutil.copytree(tmp_path / "model", tmp_path / "stacked")
    layer = "model.layers.0.mlp.experts"
    down = [tensors.pop(f"{layer}.{expert}.down_proj.weight") for expert in range(8)]
    save_file(tensors | {f"{layer}.down_proj": torch.stack(down)}, tmp_path / "stacked" / "model.safetensors")
    shutil.copytree(tmp_path / "model", tmp_path / "less")
    save_file(tensors, tmp_path / "less" / "model.safetensors")
    path, out = tmp_path / "model", tmp_path / "out"
    before = sorted(tmp_path.iterdir())
    monkeypatch.setattr("moetool.models.checkpoint.Shards", _Untouched)
    with refused(UsageError, 64, 16, 32):
        make_replica(Checkpoint.open(path), out, CALIBRATION, replace(OPTIONS, group=64))
    with refused(UsageError, "--asymmetric"):
        make_replica(Checkpoint.open(path), out, CALIBRATION, replace(OPTIONS, symmetric=False))
    with refused(UsageError, "gpt_oss"):
        make_replica(Checkpoint.open(tmp_path / "gpt_oss"), out, CALIBRATION, OPTIONS)
    with refused(UsageError, "ernie4_5_moe"):
        make_replica(Checkpoint.open(tmp_path / "ernie4_5_moe"), out, CALIBRATION, OPTIONS)
    with refused(UsageError, "model.layers.0.mlp.experts.down_proj"):
        make_replica(Checkpoint.open(tmp_path / "stacked"), out, CALIBRATION, OPTIONS)
    with refused(MismatchError, "model.layers.0.mlp.experts.down_proj"):
        make_replica(Checkpoint.open(tmp_path / "less"), out, CALIBRATION, OPTIONS)
    (tmp_path / "out.resume").mkdir()
    (tmp_path / "out.resume" / "theirs").touch()
    with refused(UsageError, "out.resume", "rm -r"):
        make_replica(Checkpoint.open(path), out, CALIBRATION, OPTIONS)
    shutil.rmtree(tmp_path / "out.resume")
    assert sorted(tmp_path.iterdir()) == before


def _poison(path: Path, name: str, value: float) -> None:
    tensors = load_file(path / "model.safetensors")
    tensors[name].view(-1)[5] = value
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def test_what_is_no_number_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    path, out = tmp_path / "model", tmp_path / "out"
    for name in ("model.layers.2.mlp.experts.6.down_proj.weight", "model.embed_tokens.weight"):
        families.save("qwen3_moe", path)
        _poison(path, name, torch.inf)
        with pytest.raises(MoetoolError, match=rf"1 of [\d,]+ weights of {name} in .*model.safetensors are NaN"):
            make_replica(Checkpoint.open(path), out, CALIBRATION, OPTIONS)
        assert list(tmp_path.iterdir()) == [path]
    for layer in (0, 1):  # finite weights whose products are not
        families.save("qwen3_moe", path)
        _poison(path, f"model.layers.{layer}.post_attention_layernorm.weight", 3e38)
        with pytest.raises(MoetoolError, match=f"of 96 tokens have activations that are NaN .* after layer {layer}"):
            make_replica(Checkpoint.open(path), out, CALIBRATION, OPTIONS)
        assert list(tmp_path.iterdir()) == [path]


@pytest.mark.follows("moetool.training.quantize.soundness require_finite")
@pytest.mark.follows("moetool.training.quantize.replica make_replica")
def test_what_float16_cannot_hold_float32_can(tmp_path: Path) -> None:
    path, out = tmp_path / "model", tmp_path / "out"
    for name in ("model.layers.1.post_attention_layernorm.weight", "lm_head.weight"):
        families.save("qwen3_moe", path, num_hidden_layers=2, tie_word_embeddings=False)
        _poison(path, name, 6e4)
        with refused(MoetoolError, "NaN or infinite", "--set dtype=float32"):
            make_replica(Checkpoint.open(path), out, CALIBRATION, replace(OPTIONS, dtype="float16"), overwrite=True)
        make_replica(Checkpoint.open(path), out, CALIBRATION, replace(OPTIONS, dtype="float32"), overwrite=True)


def test_a_model_kept_packed_computes_the_same(case: Case) -> None:
    """To the order of sums, and in no more memory than its files take."""
    packed, full = (
        load_packed(Checkpoint.open(case.replica), torch.float32),
        load_full(Checkpoint.open(case.replica), torch.float32),
    )
    full.model.set_experts_implementation("eager")
    with torch.no_grad():
        found, expected = (m.model.get_decoder()(CALIBRATION.judged_NS)[0] for m in (packed, full))
    assert torch.allclose(found, expected, rtol=0, atol=1e-5 * expected.abs().max().item())
    files = sum(file.stat().st_size for file in case.replica.glob("*.safetensors"))
    assert held_bytes(packed.model) <= files < held_bytes(full.model)


def test_a_replica_made_in_bfloat16_is_checked_in_float32(tmp_path: Path) -> None:
    families.save("mixtral", tmp_path / "model")
    options = replace(OPTIONS, dtype="bfloat16", grid=1)
    card = make_replica(Checkpoint.open(tmp_path / "model"), tmp_path / "replica", CALIBRATION, options)
    assert card["reloaded_by"] == "transformers"
