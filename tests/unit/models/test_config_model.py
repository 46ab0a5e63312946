"""Shapes from a config's numbers, against transformers' own models and against released checkpoints."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from moetool.base import assets, families
from moetool.base.errors import MismatchError, MoetoolError, UsageError
from moetool.base.types import UNKNOWN_BYTES
from moetool.capture.remote import RemoteServer, capture_remote
from moetool.models.checkpoint import Checkpoint, UnknownFamily
from moetool.models.config_model import ConfigModel
from moetool.models.shape import open_shape, shape_of
from moetool.prompts.gather import Prompt
from moetool.trace.foreign.importing import import_trace
from moetool.trace.reader import Trace
from tests import families as tiny
from tests import foreign, routed_engine
from tests.refusals import refused
from tests.routed_engine import LAYERS, NEW, TOP_K, engine, routes

_OTHER_NAMES = {"dbrx", "nemotron_h"}
"""Families whose numbers lie in nested parts or in a pattern of letters; transformers has them."""

KIMI_K3 = {
    "model_type": "kimi_k3",
    "auto_map": {"AutoConfig": "configuration_kimi_k3.KimiK3Config"},
    "dtype": "bfloat16",
    "text_config": {
        "model_type": "kimi_linear",
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "hidden_size": 7168,
        "moe_intermediate_size": 3072,
        "routed_expert_hidden_size": 3584,
        "moe_router_activation_func": "sigmoid",
        "moe_renormalize": True,
        "num_experts": 896,
        "num_experts_per_token": 16,
        "num_shared_experts": 2,
        "num_hidden_layers": 93,
        "vocab_size": 163840,
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "mxfp4-pack-quantized",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {"num_bits": 4, "type": "float", "group_size": 32, "strategy": "group"},
                }
            },
            "ignore": ["re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"],
        },
    },
}
DEEPSEEK_V41 = {
    "model_type": "deepseek_v41",
    "dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [32, 32], "expert_dtype": "fp4"},
    "text_config": {
        "model_type": "deepseek_v41_text",
        "hidden_size": 5120,
        "moe_intermediate_size": 2304,
        "n_routed_experts": 384,
        "n_shared_experts": 1,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 40,
        "scoring_func": "sqrtsoftplus",
        "norm_topk_prob": True,
        "vocab_size": 129280,
        "dspark_n_routed_experts": 128,
    },
}
# Bytes of an expert's tensors: values of 4 bits, and a byte for each 32 of them.
_K3_BYTES = 2 * 3072 * (1792 + 112) + 3584 * (1536 + 96)
_V41_BYTES = 2 * 2304 * (2560 + 160) + 5120 * (1152 + 72)


def _write(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("config", "layers", "experts", "top_k", "num_bytes"),
    [(KIMI_K3, range(1, 93), 896, 16, _K3_BYTES), (DEEPSEEK_V41, range(40), 384, 6, _V41_BYTES)],
    ids=["Kimi-K3", "DeepSeek-V4.1-Flash"],
)
def test_released_models_that_transformers_lacks(
    config: dict[str, Any], layers: range, experts: int, top_k: int, num_bytes: int, tmp_path: Path
) -> None:
    _write(tmp_path, config)
    with refused(UnknownFamily, tmp_path / "config.json", "capture --server", "trace import"):
        Checkpoint.open(tmp_path, weights=False)
    spec, hidden = shape_of(str(tmp_path))
    assert (spec.layer_ids_L, hidden) == (tuple(layers), config["text_config"]["num_hidden_layers"])
    assert set(spec.num_experts_L) == {experts} and set(spec.top_k_L) == {top_k}
    assert set(spec.expert_bytes_L) == {num_bytes}
    assert spec.name.startswith(config["model_type"]) and spec.renormalize and spec.score_function != "softmax"


@pytest.mark.parametrize("family", sorted(set(families.FAMILIES) - _OTHER_NAMES))
def test_numbers_tell_what_transformers_builds(family: str, tmp_path: Path) -> None:
    if families.FAMILIES[family].refused:
        pytest.skip("not supported")
    tiny.require_known(family)
    made = tiny.config(family)
    own = {field.name for field in dataclasses.fields(made)} | set(made.attribute_map) | {*made.attribute_map.values()}
    config = {name: value for name, value in made.to_dict().items() if name in (*own, "model_type")}
    config["dtype"] = "float32"
    theirs = Checkpoint.open(_write(tmp_path, json.loads(json.dumps(config, default=str))), weights=False).spec
    ours = ConfigModel(tmp_path, "m", b"", config).spec
    for name in ("layer_ids_L", "num_experts_L", "top_k_L", "hidden_size", "num_groups"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert set(ours.expert_bytes_L) in ({UNKNOWN_BYTES}, set(theirs.expert_bytes_L))


def _renamed(folder: Path, **changed: Any) -> Path:
    """Make a checkpoint one of a family that transformers lacks."""
    config = json.loads((folder / "config.json").read_text())
    return _write(folder, {**config, "model_type": "qwen9_moe", "auto_map": {}, **changed})


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_headers_tell_the_bytes_of_an_expert(family: str, tmp_path: Path) -> None:
    tiny.save(family, tmp_path)
    theirs = Checkpoint.open(tmp_path).spec
    ours, _ = shape_of(str(_renamed(tmp_path)))
    assert ours.expert_bytes_L == theirs.expert_bytes_L and ours.layer_ids_L == theirs.layer_ids_L
    assert ours.revision.startswith("r2-") and ours.revision != theirs.revision  # the config is part of it


def test_weight_files_decide_the_layers_and_contradict_other_counts(tmp_path: Path) -> None:
    tiny.save("qwen3_moe", tmp_path)
    spec, _ = shape_of(str(_renamed(tmp_path, num_hidden_layers=2)))  # further layers only draft
    assert spec.layer_ids_L == (0, 1)
    with refused(MismatchError, tmp_path, 8, 9):
        shape_of(str(_renamed(tmp_path, num_experts=9, num_local_experts=9)))


@pytest.mark.parametrize(
    ("changed", "error", "fact"),
    [
        ({"num_experts": None}, UsageError, "num_experts"),
        ({"num_experts_per_token": None}, UsageError, "num_experts_per_tok"),
        ({"num_hidden_layers": None}, UsageError, "num_hidden_layers"),
        ({"num_hidden_layers": "93"}, MismatchError, "93"),
        ({"num_experts": -1}, MismatchError, -1),
        ({"num_experts": True}, MismatchError, "True"),
        ({"num_experts": 1e300}, MismatchError, "1e+300"),
        ({"num_experts_per_token": 897}, MismatchError, "897"),
        ({"moe_layer_freq": "x"}, MismatchError, "config.json"),
        ({"moe_layer_freq": [0, 1]}, MismatchError, "config.json"),
        ({"mlp_layer_types": ["dense"] * 93}, MismatchError, "config.json"),
        ({"first_k_dense_replace": 93}, MismatchError, "config.json"),
        ({"first_k_dense_replace": [1]}, MismatchError, "config.json"),
        ({"decoder_sparse_step": -1}, MismatchError, "config.json"),
        ({"moe_layers": [93]}, MismatchError, 93),
        ({"moe_layers": "1,2"}, MismatchError, "config.json"),
        ({"moe_layers": [1.0, 2.5]}, MismatchError, "moe_layers"),
        ({"mlp_only_layers": ["0"]}, MismatchError, "mlp_only_layers"),
        ({"expert_layer_period": "2"}, MismatchError, "expert_layer_period"),
        ({"zero_expert_num": "x"}, MismatchError, "zero_expert_num"),
        ({"zero_expert_num": -6}, MismatchError, "zero_expert_num"),
        ({"num_shared_experts": "two"}, MismatchError, "num_shared_experts"),
        ({"num_shared_experts": float("inf")}, MismatchError, "num_shared_experts"),
        ({"n_group": "a"}, MismatchError, "n_group"),
        ({"moe_router_activation_func": ["sigmoid"]}, MismatchError, "moe_router_activation_func"),
        ({"moe_renormalize": "false"}, MismatchError, "moe_renormalize"),
    ],
)
def test_numbers_that_are_wrong_or_missing(
    changed: dict[str, Any], error: type[Exception], fact: object, tmp_path: Path
) -> None:
    text = {name: value for name, value in {**KIMI_K3["text_config"], **changed}.items() if value is not None}  # type: ignore[dict-item]
    with refused(error, fact):
        shape_of(str(_write(tmp_path, {**KIMI_K3, "text_config": text})))


_SMALL = {
    **{"model_type": "qwen9_moe", "num_hidden_layers": 4, "num_experts": 8, "num_experts_per_tok": 2},
    **{"hidden_size": 64, "moe_intermediate_size": 32, "first_k_dense_replace": 1},
}


def _experts(prefix: str, layers: range, experts: int = 8) -> list[str]:
    return [f"{prefix}.{layer}.mlp.experts.{e}.up_proj.weight" for layer in layers for e in range(experts)]


@pytest.mark.parametrize("further", ["mtp.layers.0", "mtp.layers.1", "model.mtp.layers.2", "vision_tower.layers.1"])
def test_only_the_language_model_has_its_experts(further: str, tmp_path: Path) -> None:
    prefix, layer = further.rsplit(".", 1)
    others = _experts(prefix, range(int(layer), int(layer) + 1), 4 if "vision" in prefix else 8)
    ours = _experts("model.layers", range(1, 4))
    save_file({name: torch.zeros(4, 4, dtype=torch.bfloat16) for name in ours + others}, tmp_path / "model.safetensors")
    spec, _ = shape_of(str(_write(tmp_path, _SMALL)))
    assert spec.layer_ids_L == (1, 2, 3) and spec.expert_bytes_L == (32,) * 3


def test_experts_that_only_draft_tell_nothing_of_others(tmp_path: Path) -> None:
    """Experts of the language model lie in one tensor here."""
    fused = {f"model.layers.{n}.mlp.experts.gate_up_proj": torch.zeros(8, 4, 4) for n in range(1, 4)}
    drafting = {name: torch.zeros(4, 4) for name in _experts("mtp.layers", range(1))}
    save_file(fused | drafting, tmp_path / "model.safetensors")
    model = open_shape(str(_write(tmp_path, _SMALL)))
    assert isinstance(model, ConfigModel) and model.origin == "estimated from its config"
    assert model.spec.layer_ids_L == (1, 2, 3) and set(model.spec.expert_bytes_L) == {3 * 64 * 32 * 2}


def test_experts_without_weights_are_not_stored(tmp_path: Path) -> None:
    names = _experts("model.layers", range(1, 4))
    save_file({name: torch.zeros(4, 4, dtype=torch.bfloat16) for name in names}, tmp_path / "model.safetensors")
    spec, _ = shape_of(str(_write(tmp_path, {**_SMALL, "zero_expert_num": 2})))
    assert set(spec.num_experts_L) == {10} and set(spec.expert_bytes_L) == {32}
    with refused(MismatchError, tmp_path, 8, 7):
        shape_of(str(_write(tmp_path, {**_SMALL, "num_experts": 7, "zero_expert_num": 1})))


def test_both_names_of_the_data_type_count(tmp_path: Path) -> None:
    sizes = [
        shape_of(str(_write(tmp_path, {**_SMALL, **named})))[0].slot_bytes
        for named in ({}, {"dtype": "float32"}, {"torch_dtype": "float32"})
    ]
    assert sizes[1:] == [2 * sizes[0]] * 2


@pytest.mark.parametrize(("named", "warned"), [("relu_norm", True), ("sigmoid", False)])
def test_an_unknown_score_function_is_softmax_with_a_warning(
    named: str, warned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec, _ = shape_of(str(_write(tmp_path, {**_SMALL, "scoring_func": named})))
    assert spec.score_function == ("softmax" if warned else named) and (named in caplog.text) == warned


def test_an_unknown_storage_leaves_the_size_open(tmp_path: Path) -> None:
    changed = {**KIMI_K3, "quantization_config": {"quant_method": "bitnet"}}
    spec, _ = shape_of(str(_write(tmp_path, changed)))
    assert set(spec.expert_bytes_L) == {UNKNOWN_BYTES} and spec.num_experts == 896


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_server_of_an_unknown_family_is_captured(kind: str, tmp_path: Path) -> None:
    folder = _renamed(shutil.copytree(assets.path("data", "reference-moe"), tmp_path / "m"))
    prompts = [Prompt(dataset="d", task="t", prompt_id="0", text="Hello there")]
    model = open_shape(str(folder))
    assert isinstance(model, ConfigModel) and model.vocab_size == 4096
    with engine(kind) as url:
        capture_remote(RemoteServer(url=url), model, prompts, tmp_path / "t", max_new_tokens=NEW)
    (rows,) = Trace(tmp_path / "t").whole_requests()
    ids = Checkpoint.open("reference", weights=False).tokenizer("Hello there")["input_ids"]
    assert (rows.experts_TS.reshape(-1, LAYERS, TOP_K) == routes(ids)).all()


@pytest.mark.parametrize(("kind", "fact"), [("vllm", LAYERS), ("sglang", "bytes")])
def test_a_server_of_another_model_is_refused_in_terms_of_its_answers(kind: str, fact: object, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    shutil.copytree(assets.path("data", "reference-moe"), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    model = open_shape(str(_renamed(folder, num_hidden_layers=9)))
    prompts = [Prompt(dataset="d", task="t", prompt_id="0", text="Hello there")]
    with engine(kind) as url, refused(MismatchError, url, "answer to d t", fact, "MODEL", folder) as error:
        capture_remote(RemoteServer(url=url), model, prompts, tmp_path / "t", max_new_tokens=NEW)
    assert "--set" not in str(error.value) and ".jsonl" not in str(error.value)


def test_other_faults_of_answers_keep_their_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorder was off; the answers' file has a space in its name."""
    monkeypatch.setattr(routed_engine, "routes", lambda ids: routes(ids) * 0)
    model = Checkpoint.open("reference", weights=False)
    prompts = [Prompt(dataset="d", task="t", prompt_id="0", text="Hello there")]
    with (
        engine("vllm") as url,
        refused(MismatchError, url, "answer to d t", "the recorder was off; record again") as error,
    ):
        capture_remote(RemoteServer(url=url), model, prompts, tmp_path / "t", max_new_tokens=NEW)
    assert "MODEL" not in str(error.value) and ".jsonl" not in str(error.value)


def test_a_tokenizer_of_code_alone_is_refused(tmp_path: Path) -> None:
    _write(tmp_path, KIMI_K3)
    model = open_shape(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["tokenization_kimi.T", null]}}')
    with pytest.raises(MoetoolError, match=r"tokenizer\.json"):
        assert model.tokenizer


def test_a_recording_of_kimi_k3_is_imported(tmp_path: Path) -> None:
    model = _write(tmp_path / "k3", KIMI_K3)
    rng = np.random.default_rng(0)
    rows = np.zeros((5, 93, 16), np.int32)
    rows[:, 1:] = np.argsort(rng.random((5, 92, 896)), axis=-1)[..., :16]
    held = {**foreign.vllm_response("a", rows), "usage": {"prompt_tokens": 4, "completion_tokens": 2}}
    file = foreign.write_lines(tmp_path / "r.jsonl", held)
    made = import_trace([file], None, tmp_path / "t", settings={"model": str(model)}, find_model=shape_of)
    spec = Trace(tmp_path / "t").spec
    assert made.tokens == 5 and spec.layer_ids_L == tuple(range(1, 93)) and spec.slot_bytes == _K3_BYTES


def test_all_missing_numbers_are_named_at_once(tmp_path: Path) -> None:
    with refused(UsageError, "num_hidden_layers", "num_experts", "num_experts_per_tok", "hidden_size"):
        shape_of(str(_write(tmp_path, {"model_type": "qwen9_moe"})))
