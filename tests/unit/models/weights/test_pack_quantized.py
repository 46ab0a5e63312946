"""Variants of packed checkpoints by other writers: each is read, or refused by name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import save_file

from moetool.base.errors import MismatchError, UsageError
from moetool.models.files.tensor_index import read_index
from moetool.models.shards import Shards
from moetool.models.weight_index import index_weights
from moetool.models.weights.pack_quantized import PackQuantized
from moetool.models.weights.packed import Scheme, quantization_config, round_weight, to_tensors
from moetool.models.weights.quantization_config import Quantization, Targets, quantization_of
from tests.refusals import refused

PATH = Path("model")


def _config(quantization: dict[str, Any] | None = None, **weights: Any) -> dict[str, Any]:
    config = quantization_config(Scheme(), [])
    config["config_groups"]["group_0"]["weights"] |= weights
    return {"quantization_config": config | (quantization or {})}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"quantization_config": {"quant_method": "quanto"}}, "is quantized \\(quanto\\)"),
        (_config({"format": "marlin-24"}), "marlin-24"),
        (_config(num_bits=3), "3 bits"),
        (_config(type="float"), "float"),
        (_config(strategy="tensor"), "by tensor"),
        (_config(strategy=None, group_size=None), "by tensor"),
        (_config(group_size=None), "by group with a group_size of None"),
        (_config(actorder="group"), "orders its groups"),
        (_config(actorder=True), "orders its groups"),
        (_config(actorder="dynamic"), "orders its groups"),
        (_config({"sparsity_config": {"format": "sparse-24-bitmask"}}), "sparsity"),
        (_config({"transform_config": {"config_groups": {"u": {"type": "hadamard"}}}}), "transform_config"),
        (_config({"config_groups": {}}), "has no config_groups"),
    ],
)
def test_other_ways_to_quantize_are_refused(config: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        quantization_of(config, PATH)


@pytest.mark.parametrize(
    ("weights", "groups"),
    [
        ({}, 64),
        ({"num_bits": 8}, 64),
        ({"strategy": None, "group_size": 32}, 32),
        ({"strategy": None, "group_size": -1}, 0),
        ({"strategy": "channel", "group_size": None}, 0),
        ({"actorder": "weight"}, 64),
        ({"actorder": None, "symmetric": False}, 64),
    ],
    ids=str,
)
def test_what_a_config_says(weights: dict[str, Any], groups: int) -> None:
    also = {"sparsity_config": {}, "transform_config": {}, "kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    found = quantization_of(_config(also, **weights), PATH)
    assert found is not None
    made = PackQuantized(weights.get("num_bits", 4), groups, weights.get("symmetric", True))
    assert found.formats == (made,)
    assert quantization_of({}, PATH) is None


def _quantization(bits: int = 4, group: int = 16, symmetric: bool = True) -> Quantization:
    targets = Targets(names=("Linear",), format=PackQuantized(bits, group, symmetric))
    return Quantization(method="compressed-tensors", groups=(targets,))


def _saved(folder: Path, scheme: Scheme, change: Callable[[dict[str, torch.Tensor]], Any] = lambda _: None) -> Path:
    weight = torch.randn(12, 48, generator=torch.Generator().manual_seed(3))
    tensors = to_tensors("a.weight", round_weight(weight, scheme, torch.bfloat16), scheme.bits)
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_act_order_is_refused_by_name(tmp_path: Path) -> None:
    order = torch.arange(48, dtype=torch.int32) // 16
    path = _saved(tmp_path, Scheme(group=16), lambda tensors: tensors.update({"a.weight_g_idx": order}))
    with refused(UsageError, "a.weight_g_idx"):
        index_weights(read_index(path), _quantization())


@pytest.mark.parametrize("shape", [[12, 40], [11, 48], [48, 12], [12]], ids=str)
def test_a_shape_that_contradicts_the_packed_weight_is_refused(shape: list[int], tmp_path: Path) -> None:
    path = _saved(tmp_path, Scheme(group=16), lambda tensors: tensors.update({"a.weight_shape": torch.tensor(shape)}))
    with refused(MismatchError, "a.weight_packed", "a.weight_shape"):
        index_weights(read_index(path), _quantization())


def test_a_missing_shape_is_what_the_words_hold(tmp_path: Path) -> None:
    path = _saved(tmp_path, Scheme(group=16), lambda tensors: tensors.pop("a.weight_shape"))
    assert index_weights(read_index(path), _quantization()).weights["a.weight"].shape == (12, 48)


@pytest.mark.parametrize(
    ("scheme", "fields", "reason"),
    [
        (Scheme(group=8), {}, r"a.weight_scale has shape \[12, 6\], expected \[12, 3\] for rows of 48 inputs"),
        (Scheme(group=16), {"group": 0}, r"a.weight_scale has shape \[12, 3\], expected \[12, 1\]"),
        (Scheme(group=16, symmetric=False), {}, "a.weight_zero_point exists, expected none"),
        (Scheme(group=16), {"symmetric": False}, "has no weight_zero_point, expected it"),
        (Scheme(group=16, bits=8), {}, "a.weight_shape says"),
    ],
)
def test_tensors_that_contradict_the_config_are_refused(
    scheme: Scheme, fields: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(MismatchError, match=reason) as caught:
        index_weights(read_index(_saved(tmp_path, scheme)), _quantization(**fields))
    assert str(tmp_path / "model.safetensors") in str(caught.value)


def test_zero_points_of_another_shape_are_refused(tmp_path: Path) -> None:
    zero = torch.zeros(12, 3, dtype=torch.int8)  # not packed
    path = _saved(
        tmp_path, Scheme(group=16, symmetric=False), lambda tensors: tensors.update({"a.weight_zero_point": zero})
    )
    with refused(MismatchError, "a.weight_zero_point", "I8", "I32"):
        index_weights(read_index(path), _quantization(symmetric=False))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("bits", "columns"), [(4, 20), (8, 18), (2, 48)])
def test_whole_rows_by_compressed_tensors_own_compressor(
    bits: int, columns: int, symmetric: bool, tmp_path: Path
) -> None:
    """A scale a row, and rows that end inside a word."""
    args = QuantizationArgs(num_bits=bits, type="int", strategy="channel", symmetric=symmetric)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    weight = torch.randn(12, columns, generator=torch.Generator().manual_seed(1))
    scale = weight.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 0.5)
    zero = torch.zeros(12, 1, dtype=torch.int8) if symmetric else torch.ones(12, 1, dtype=torch.int8)
    theirs = PackedQuantizationCompressor.compress(
        {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}, scheme
    )
    expected = PackedQuantizationCompressor.decompress(theirs, scheme)["weight"]
    save_file({f"a.{name}": tensor.contiguous() for name, tensor in theirs.items()}, tmp_path / "model.safetensors")
    shards = Shards(index_weights(read_index(tmp_path), _quantization(bits, 0, symmetric)))
    assert shards.weights["a.weight"].shape == (12, columns)
    assert torch.equal(shards.load("a.weight"), expected)
    shards.close()
