"""AWQ as AutoAWQ writes it (`quant_method: awq`, version `gemm`).

A weight [N, K] that would be `X.weight` is stored transposed as

    X.qweight  int32 [K, N / 8]: eight outputs per word, in the order 0 2 4 6 1 3 5 7 from the lowest bits
    X.qzeros   int32 [K / group, N / 8], in the same order
    X.scales   float16 [K / group, N]
"""

from dataclasses import dataclass
from itertools import chain

import torch

from moetool.kernels.cpu.int4 import Grouping, paired_bytes
from moetool.models.weights.format import (
    Stored,
    StoredWeight,
    UnclaimedTensors,
    ceil_div,
    claim_packed,
    packed_weight_of,
)
from moetool.models.weights.value_scaling import Groups, write_scaled

_PER_WORD = 8
_OUTPUTS = ((0, 2), (4, 6), (1, 3), (5, 7))  # in the lower and upper half of each byte of a word
_POSITIONS = [position for position, _ in sorted(enumerate(chain.from_iterable(_OUTPUTS)), key=lambda pair: pair[1])]


@dataclass(frozen=True, slots=True)
class AwqCodec:
    """(value - zero point) * scale of the value's group, in the type of the scale.

    Attributes:
        group: inputs that share a scale.
    """

    group: int
    bits: int = 4
    transposed: bool = False

    def into(self, stored: Stored, out: torch.Tensor) -> None:
        words, scale = stored["values"].T.contiguous(), stored["scale"]
        groups = Groups(
            scale_NG=scale.T.to(torch.float32), zero_NG=_rows(stored["zero"].T.contiguous()), size=self.group
        )

        def numbers(part: slice) -> torch.Tensor:
            return _rows(words[part.start // _PER_WORD : part.stop // _PER_WORD])

        write_scaled(out, numbers, groups, scale.dtype, multiple=_PER_WORD)

    def arrange(self, stored: Stored, words: torch.Tensor, tile: int) -> Grouping:
        values = stored["values"].unflatten(1, (-1, 2, tile // 2 // _PER_WORD))
        first, second = values.unbind(2)  # [I, tile, word]
        made_TIR = words.view(torch.uint8).view(*first.shape[1::-1], -1, _PER_WORD)
        made_TIR.copy_(paired_bytes(first, second).flatten(3)[..., _POSITIONS].transpose(0, 1))
        zero_NG = _rows(stored["zero"].T.contiguous())
        return Grouping(stored["scale"].T, zero_NG.to(torch.uint8), None)


def _rows(words: torch.Tensor) -> torch.Tensor:
    """Values float32 [8 * M, K] of words [M, K]; each word holds one input of eight outputs."""
    rows = torch.empty(len(words), _PER_WORD, words.shape[1], dtype=torch.float32, device=words.device)
    octets = words.reshape(-1).view(torch.uint8).view(*words.shape, 4)  # a single column may have any strides
    for byte, (low, high) in enumerate(_OUTPUTS):
        plane = octets[..., byte].contiguous()
        rows[:, low] = plane & 15
        rows[:, high] = plane >> 4
    return rows.flatten(0, 1)


@dataclass(frozen=True, slots=True)
class Awq:
    """The format.

    Attributes:
        group: inputs that share a scale (`group_size`); -1: all.
    """

    group: int
    name: str = "awq"

    def weight_of(self, tensor: str) -> str | None:
        return packed_weight_of(tensor)

    def claim(self, weight: str, unclaimed: UnclaimedTensors) -> StoredWeight | None:
        stem = weight.removesuffix("weight")
        tensors, columns, group = claim_packed(stem, unclaimed, self.group)
        words = tensors["values"].shape[1]
        why = f"for {columns} inputs in groups of {group} by the config"
        unclaimed.require_shape(stem + "scales", tensors["scale"], (columns // group, words * _PER_WORD), why)
        unclaimed.require_shape(stem + "qzeros", tensors["zero"], (columns // group, words), why)
        return StoredWeight(
            name=weight, shape=(words * _PER_WORD, columns), tensors=tensors, codec=AwqCodec(group), format=self.name
        )

    def stored_bytes(self, rows: int, columns: int, number_bytes: int) -> int:
        groups = 1 if self.group == -1 else ceil_div(columns, self.group)
        return (columns + groups) * rows // 2 + 2 * groups * rows
