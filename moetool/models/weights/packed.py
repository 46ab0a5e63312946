"""Low-bit weights: groups with a scale each, packed into int32 words as compressed-tensors' `pack-quantized`.

A linear weight [O, I] that would be `X.weight` is stored as

    X.weight_packed      int32 [O, ceil(I * bits / 32)]: each value plus 2^(bits - 1), the first in the lowest bits
    X.weight_scale       [O, I / group]: the weight is (value - zero point) * this
    X.weight_zero_point  int32 [ceil(O * bits / 32), I / group], packed along the columns; absent if symmetric
    X.weight_shape       int64 [2]
    X.weight_g_idx       the group of each input, if groups are not consecutive inputs; not read here
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from moetool.base.errors import UsageError
from moetool.kernels.cpu import many_rows
from moetool.kernels.unpacking import CHUNK, dense, unpack_pairs, write_dense

FORMAT = "pack-quantized"
METHOD = "compressed-tensors"
PACKED, SCALE, ZERO, SHAPE = "weight_packed", "weight_scale", "weight_zero_point", "weight_shape"
BITS = (2, 4, 8)  # widths whose values never span two words


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """Quantization scheme of weights.

    Attributes:
        bits: bits per value: 2, 4 or 8.
        group: consecutive inputs of a row that share a scale.
        symmetric: whether all zero points are 0.
    """

    bits: int = 4
    group: int = 64
    symmetric: bool = True

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise UsageError(f"bits is {self.bits}, expected one of {', '.join(map(str, BITS))}")
        if self.group < 1:
            raise UsageError(f"group is {self.group}, expected at least 1")

    @property
    def lowest(self) -> int:
        """The smallest value; the largest is -lowest - 1."""
        return -(1 << (self.bits - 1))


class Rounded(NamedTuple):
    """A rounded weight, not yet packed: values int8 [..., O, I], scale and zero point (int8) [..., O, I / group]."""

    values: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None

    def dense(self) -> torch.Tensor:
        """The dequantized weight, in the type of the scale."""
        return dense(self.values, self.scale, self.zero)


def round_weight(
    weight: torch.Tensor, scheme: Scheme, scale_dtype: torch.dtype, shrink: torch.Tensor | None = None
) -> Rounded:
    """Round to nearest, with the smallest scales that cover each group.

    Args:
        weight: [..., O, I].
        scale_dtype: stored type of scales; values are rounded with the stored scale.
        shrink: factor [..., O, I / group] on each group's range; values outside are clipped (default: 1).
    """
    group = weight.float().unflatten(-1, (-1, scheme.group))
    values, scale, zero = nearest_values(group, ranges(group, scheme), scheme, scale_dtype, shrink)
    return Rounded(values.to(torch.int8).flatten(-2), scale, None if zero is None else zero.to(torch.int8))


Ranges = tuple[torch.Tensor, torch.Tensor | None]
"""Width and lower end of each group's range; None: the range is symmetric."""


def ranges(group: torch.Tensor, scheme: Scheme) -> Ranges:
    """The smallest range that covers each group [..., G, s]: width and lower end [..., G]."""
    if scheme.symmetric:
        return 2 * group.abs().amax(-1), None
    low, high = group.amin(-1).clamp(max=0), group.amax(-1).clamp(min=0)
    return high - low, low


def nearest_values(
    group: torch.Tensor,
    within: Ranges,
    scheme: Scheme,
    scale_dtype: torch.dtype,
    shrink: torch.Tensor | float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Nearest values of groups [..., G, s], as float32; their scales and zero points [..., G].

    Args:
        shrink: as for `round_weight`, or one factor for all.
    """
    width, low = within
    if shrink is not None:
        width, low = width * shrink, None if low is None else low * shrink
    scale = (width / (2**scheme.bits - 1)).to(scale_dtype)
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    wide = scale.float()
    values = group / wide[..., None]
    zero = None
    if low is not None:
        zero = (scheme.lowest - low / wide).round_().clamp_(scheme.lowest, -scheme.lowest - 1)
        values += zero[..., None]
    return values.round_().clamp_(scheme.lowest, -scheme.lowest - 1), scale, zero


def pack(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Words int32 [..., O, ceil(I * bits / 32)] of values int8 [..., O, I]."""
    per_word = 32 // bits
    padding = -values.shape[-1] % per_word
    shifted = functional.pad(values.to(torch.int32) + (1 << (bits - 1)), (0, padding))
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=values.device)
    return (shifted.unflatten(-1, (-1, per_word)) << shifts).sum(-1, dtype=torch.int32)


def unpack(words: torch.Tensor, bits: int, columns: int) -> torch.Tensor:
    """Values int8 [..., O, I] of words, I = `columns`."""
    if bits == 4:
        return unpack_pairs(words.contiguous().view(torch.uint8))[..., :columns]
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    values = ((words[..., None] >> shifts) & ((1 << bits) - 1)).flatten(-2).to(torch.int16)
    return (values[..., :columns] - (1 << (bits - 1))).to(torch.int8)


def to_tensors(name: str, weight: Rounded, bits: int) -> dict[str, torch.Tensor]:
    """Stored tensors of the weight [O, I] named `name`, which ends in `.weight`."""
    stem = name.removesuffix("weight")
    made = {
        stem + PACKED: pack(weight.values, bits),
        stem + SCALE: weight.scale.contiguous(),
        stem + SHAPE: torch.tensor(weight.values.shape),
    }
    if weight.zero is not None:
        made[stem + ZERO] = pack(weight.zero.T, bits).T.contiguous()
    return made


class Block(NamedTuple):
    """The packed tensors of one weight [O, I]: words, scales and zero points as files and slots hold them.

    Attributes:
        columns: I; the last word of a row may hold more.
    """

    words: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None
    columns: int

    def dense(self, bits: int) -> torch.Tensor:
        """The weight, in the type of its scales."""
        if len(self.words) * self.columns <= CHUNK:
            return dense(unpack(self.words, bits, self.columns), self.scale, self.zero_points(bits))
        out = torch.empty(len(self.words), self.columns, dtype=self.scale.dtype, device=self.words.device)
        self.into(out, bits)
        return out

    def into(self, out: torch.Tensor, bits: int) -> None:
        """Write the weight to `out` as `write_dense` does."""
        zero = self.zero_points(bits)
        write_dense(out, lambda part: unpack(self.words[part], bits, self.columns), self.scale, zero)

    def zero_points(self, bits: int) -> torch.Tensor | None:
        """The zero points int8 [O, G]."""
        return None if self.zero is None else unpack(self.zero.T, bits, len(self.words)).T

    @property
    def nbytes(self) -> int:
        return self.words.nbytes + self.scale.nbytes + (0 if self.zero is None else self.zero.nbytes)


class PackedWeight(NamedTuple):
    """A weight that stays packed until it is used: concatenated blocks."""

    blocks: tuple[Block, ...]
    bits: int

    def to(self, dtype: torch.dtype) -> torch.Tensor:
        """The dense weight, computed in the type of the scales, as transformers does for experts, then widened."""
        first = self.blocks[0]
        if len(self.blocks) == 1 and self.numel <= CHUNK:
            return first.dense(self.bits).to(dtype)
        rows = [len(block.words) for block in self.blocks]
        out = torch.empty(sum(rows), first.columns, dtype=dtype, device=first.words.device)
        for block, part in zip(self.blocks, out.split(rows), strict=True):
            block.into(part, self.bits)
        return out

    def times(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, I] times the transposed weight, in the type of `x`."""
        return many_rows.linear(x, self.to(x.dtype))

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self.blocks)

    @property
    def numel(self) -> int:
        """Number of its values."""
        return sum(len(block.words) * block.columns for block in self.blocks)


def quantization_config(scheme: Scheme, ignore: list[str], experts: Scheme | None = None) -> dict[str, Any]:
    """config.json entry of a model with packed linear weights.

    Args:
        ignore: names of linear modules that are not packed; `re:` begins a pattern.
        experts: the scheme of the routed experts, if it differs.
    """
    groups = {"group_0": _group(scheme, ["Linear"])}
    if experts is not None and experts != scheme:
        # transformers uses the first group that names experts; a pattern wins over a class.
        groups = {"group_0": _group(experts, [r"re:.*\.experts\.\d+\..*"]), "group_1": _group(scheme, ["Linear"])}
    return {
        # transformers unpacks zero points on load: a module that stays packed has no tensor for them.
        **({} if scheme.symmetric else {"dequantize": True}),
        "quant_method": METHOD,
        "format": FORMAT,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ignore,
        "kv_cache_scheme": None,
    }


def _group(scheme: Scheme, targets: list[str]) -> dict[str, Any]:
    weights = {
        "num_bits": scheme.bits,
        "type": "int",
        "strategy": "group",
        "group_size": scheme.group,
        "symmetric": scheme.symmetric,
        "dynamic": False,
    }
    return {"targets": targets, "weights": weights, "input_activations": None, "output_activations": None}
