"""GPTQ as AutoGPTQ and GPTQModel write it (`quant_method: gptq`), with and without act-order.

A weight [N, K] that would be `X.weight` is stored transposed as

    X.qweight  int32 [K * bits / 32, N]: values packed along the inputs, the first in the lowest bits
    X.qzeros   int32 [G, N * bits / 32]: zero points packed along the outputs; minus one except in `gptq_v2` files
    X.scales   float16 [G, N]
    X.g_idx    int32 [K]: the group of each input; absent, or k / group, without act-order
"""

from dataclasses import dataclass

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
from moetool.models.weights.value_scaling import Groups, four_bits, write_scaled


def unsigned_values(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Values float32 [N, K] of words [N, K * bits / 32], the first in the lowest bits; all unsigned."""
    if bits == 4:
        return four_bits(words.view(torch.uint8), e2m1=False)
    values = words.view(torch.uint8)
    if bits == 2:
        shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=words.device)
        values = ((values[..., None] >> shifts) & 3).flatten(-2)
    return values.to(torch.float32)


def in_even_groups(order: bytes | memoryview, groups: int) -> bool:
    """Whether the groups of a `g_idx` all have one size; only act-order may make others."""
    group_of = torch.frombuffer(bytearray(order), dtype=torch.int32)
    if int(group_of.min()) < 0:
        return False
    return bool((group_of.bincount(minlength=groups) == len(group_of) // groups).all())


@dataclass(frozen=True, slots=True)
class GptqCodec:
    """(value - zero point) * scale of the value's group, in the type of the scale.

    Attributes:
        group: inputs that share a scale, unless `g_idx` lists them.
        offset: added to the stored zero points.
    """

    bits: int
    group: int
    offset: int
    transposed: bool = False

    def into(self, stored: Stored, out: torch.Tensor) -> None:
        words, scale, order = stored["values"].T.contiguous(), stored["scale"], stored.get("order")
        consecutive = order is None or torch.equal(order, torch.arange(len(order)).to(order) // self.group)
        groups = Groups(
            scale_NG=scale.T.to(torch.float32),
            zero_NG=self._zero_points(stored),
            size=self.group,
            index_K=None if consecutive else order,
        )
        write_scaled(out, lambda part: unsigned_values(words[part], self.bits), groups, scale.dtype)

    def arrange(self, stored: Stored, words: torch.Tensor, tile: int) -> Grouping:
        values, order = stored["values"].unflatten(1, (-1, 2, tile // 2)), None
        first, second = values.unbind(2)  # [I / 8, tile, row], the inputs of a word from the lowest bits
        made_TIR = paired_bytes(first, second).permute(1, 0, 3, 4, 2).flatten(1, 3)
        if (group_of := stored.get("order")) is not None:
            if not (group_of.bincount(minlength=1) == self.group).all():
                raise ValueError(f"g_idx has groups whose size differs from the config's group_size {self.group}")
            order = group_of.argsort(stable=True)
            made_TIR = made_TIR.index_select(1, order)
        words.view(torch.uint8).view(made_TIR.shape).copy_(made_TIR)
        return Grouping(stored["scale"].T, self._zero_points(stored).to(torch.uint8), order)

    def _zero_points(self, stored: Stored) -> torch.Tensor:
        """Zero points, float32 [N, G]."""
        zero_GN = unsigned_values(stored["zero"], self.bits)[:, : stored["scale"].shape[1]]
        return ((zero_GN + self.offset) % (1 << self.bits)).T.contiguous()


@dataclass(frozen=True, slots=True)
class Gptq:
    """The format.

    Attributes:
        group: inputs that share a scale; -1: all.
        act_order: whether groups may consist of arbitrary inputs (`desc_act`).
        offset: added to the stored zero points: 1, and 0 in files of the second version.
    """

    bits: int
    group: int
    act_order: bool
    offset: int = 1
    name: str = "gptq"

    def weight_of(self, tensor: str) -> str | None:
        return packed_weight_of(tensor)

    def claim(self, weight: str, unclaimed: UnclaimedTensors) -> StoredWeight | None:
        stem = weight.removesuffix("weight")
        tensors, columns, group = claim_packed(stem, unclaimed, self.group, self.bits)
        rows = tensors["values"].shape[1]
        why = f"for {columns} inputs of {self.bits} bits in groups of {group} by the config"
        unclaimed.require_shape(stem + "scales", tensors["scale"], (columns // group, rows), why)
        unclaimed.require_shape(
            stem + "qzeros", tensors["zero"], (columns // group, ceil_div(rows * self.bits, 32)), why
        )
        if (order := unclaimed.take(stem + "g_idx")) is not None:
            unclaimed.require_dtype(stem + "g_idx", order, "I32")
            unclaimed.require_shape(stem + "g_idx", order, (columns,), "a group for each input")
            tensors["order"] = order
        elif self.act_order:
            raise unclaimed.error(
                stem + "qweight", tensors["values"], f"has no {stem}g_idx, expected it: the config says desc_act"
            )
        return StoredWeight(
            name=weight,
            shape=(rows, columns),
            tensors=tensors,
            codec=GptqCodec(self.bits, group, self.offset),
            format=self.name,
        )

    def stored_bytes(self, rows: int, columns: int, number_bytes: int) -> int:
        groups = 1 if self.group == -1 else ceil_div(columns, self.group)
        words = columns * self.bits // 32 * rows + groups * ceil_div(rows * self.bits, 32)
        return 4 * (words + columns) + 2 * groups * rows
