"""Packed weights are those of compressed-tensors, word for word."""

import pytest
import torch
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor, pack_to_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

from moetool.models.weights.pack_quantized import PackQuantized
from moetool.models.weights.packed import Block, PackedWeight, Scheme, pack, round_weight, to_tensors, unpack

SCHEMES = [Scheme(bits=bits, group=16, symmetric=symmetric) for bits in (2, 4, 8) for symmetric in (True, False)]


def _weight(rows: int = 12, columns: int = 48) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_files_hold_what_compressed_tensors_unpacks(scheme: Scheme) -> None:
    rounded = round_weight(_weight(), scheme, torch.bfloat16)
    tensors = to_tensors("layer.weight", rounded, scheme.bits)
    args = QuantizationArgs(
        num_bits=scheme.bits, type="int", strategy="group", group_size=16, symmetric=scheme.symmetric
    )
    theirs = PackedQuantizationCompressor.decompress(
        {name.removeprefix("layer."): tensor for name, tensor in tensors.items()},
        QuantizationScheme(targets=["Linear"], weights=args),
    )["weight"]
    assert torch.equal(theirs, rounded.dense())
    zero = tensors.get("layer.weight_zero_point")
    block = Block(tensors["layer.weight_packed"], tensors["layer.weight_scale"], zero, 48)
    assert torch.equal(PackedWeight((block, block), scheme.bits).to(torch.bfloat16), torch.cat([theirs, theirs]))
    stored = sum(tensor.nbytes for name, tensor in tensors.items() if not name.endswith("shape"))
    assert stored == PackQuantized(scheme.bits, scheme.group, scheme.symmetric).stored_bytes(12, 48, 2)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("columns", [1, 7, 32, 33])
def test_words_are_those_of_compressed_tensors(bits: int, columns: int) -> None:
    values = torch.randint(-(1 << bits - 1), 1 << bits - 1, (5, columns), dtype=torch.int8)
    assert torch.equal(pack(values, bits), pack_to_int32(values, bits))
    assert torch.equal(unpack(pack(values, bits), bits, columns), values)


def test_rounding_by_hand() -> None:
    weight = torch.tensor([[-7.5, 3.2, 0.0, 1.4], [0.0, 1.0, 2.0, 15.0]])
    symmetric = round_weight(weight, Scheme(group=4), torch.float32)
    assert symmetric.scale.flatten().tolist() == [1.0, 2.0]
    assert symmetric.values.tolist() == [[-8, 3, 0, 1], [0, 0, 1, 7]]  # 7.5 is rounded to even, and held to 7
    other = round_weight(weight, Scheme(group=4, symmetric=False), torch.float32)
    assert other.zero is not None and other.zero.flatten().tolist()[1] == -8
    assert other.dense()[1].tolist() == [0.0, 1.0, 2.0, 15.0]


def test_groups_of_zeros_stay_zeros() -> None:
    for scheme in SCHEMES:
        assert not round_weight(torch.zeros(2, 32), scheme, torch.bfloat16).dense().any()


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_no_value_is_farther_than_the_step_of_its_group(scheme: Scheme) -> None:
    weight = _weight()
    rounded = round_weight(weight, scheme, torch.float32)
    error = (rounded.dense() - weight).abs().unflatten(-1, (-1, 16))
    assert bool((error <= 0.5001 * rounded.scale[..., None] * (1 if scheme.symmetric else 2)).all())
