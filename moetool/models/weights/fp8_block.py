"""FP8 in blocks, as DeepSeek-V3, Qwen3-*-FP8 and GLM-*-FP8 are published (`quant_method: fp8`).

A weight [N, K] that would be `X` is stored as

    X            float8_e4m3fn [N, K]; for 4-bit experts int8 [N, K / 2], two E2M1 numbers per byte, low half first
    X_scale_inv  float32, bfloat16 or E8M0 [ceil(N / 128), ceil(K / 128)], a factor per block; one number for the
                 whole weight if the config has no block size

Some checkpoints name the scale `.scale` or `.qscale_weight` instead of `.weight_scale_inv`.
"""

from dataclasses import dataclass

import torch

from moetool.models.weights.format import Stored, StoredWeight, UnclaimedTensors, ceil_div
from moetool.models.weights.value_scaling import Groups, eight_bits, four_bits, scale_values, write_scaled

_SCALE, _SHORT_SCALE, _LONG_SCALE = "_scale_inv", ".scale", ".qscale_weight"
_FOUR_BIT_GROUP = 32
_SCALES = ("F32", "BF16", "F16", "F8_E8M0", "U8")


@dataclass(frozen=True, slots=True)
class Fp8BlockCodec:
    """Values times one scale for each block.

    Attributes:
        block: rows and columns that share a scale; None: all.
    """

    block: tuple[int, int] | None
    transposed: bool = False

    def into(self, stored: Stored, out: torch.Tensor) -> None:
        values, scale = stored["values"], scale_values(stored["scale"])
        if self.block is None:
            groups = Groups(scale_NG=scale.reshape(1, 1), size=out.shape[1])
        else:
            rows = scale.repeat_interleave(self.block[0], dim=0)[: len(out)]
            groups = Groups(scale_NG=rows, size=self.block[1])
        if values.dtype == torch.int8:
            write_scaled(out, lambda part: four_bits(values[part], e2m1=True), groups)
        else:
            write_scaled(out, lambda part: eight_bits(values[part]), groups)


@dataclass(frozen=True, slots=True)
class Fp8Block:
    """The format.

    Attributes:
        block: the config's `weight_block_size`.
        four_bits: whether the config says that a byte holds two 4-bit numbers, in groups of 32 with one-byte scales. A
            checkpoint of both kinds is read by the data type of its values.
    """

    block: tuple[int, int] | None
    name: str = "fp8_block"
    four_bits: bool = False

    def weight_of(self, tensor: str) -> str | None:
        if tensor.endswith(_SCALE):
            return tensor.removesuffix(_SCALE)
        for suffix in (_SHORT_SCALE, _LONG_SCALE):
            if tensor.endswith(suffix):
                return tensor.removesuffix(suffix) + ".weight"
        return None

    def claim(self, weight: str, unclaimed: UnclaimedTensors) -> StoredWeight | None:
        stem = weight.removesuffix(".weight")
        names = (weight + _SCALE, stem + _SHORT_SCALE, stem + _LONG_SCALE)
        scale_name = next(name for name in names if unclaimed.get(name) is not None)
        scale = unclaimed.get(scale_name)
        assert scale is not None
        values = unclaimed.get(weight)
        if values is None and scale_name != names[0]:
            return None  # a parameter that only shares the name
        values = unclaimed.need(weight, scale, "the values")
        unclaimed.take(scale_name)
        unclaimed.require_dtype(weight, values, "F8_E4M3", "I8")
        unclaimed.require_dtype(scale_name, scale, *_SCALES)
        if len(values.shape) < 2:
            raise unclaimed.error(weight, values, f"has shape {list(values.shape)}, expected a matrix")
        *stack, rows, columns = values.shape
        block = self.block
        if values.dtype == "I8":
            columns *= 2
            block = (1, columns // scale.shape[-1]) if scale.shape and columns % max(1, scale.shape[-1]) == 0 else None
            if block is None or block[1] not in (16, 32):
                raise unclaimed.error(scale_name, scale, f"has shape {list(scale.shape)}, expected groups of 32 inputs")
        if block is None:
            if torch.Size(scale.shape).numel() not in (1, *stack):
                raise unclaimed.error(scale_name, scale, f"has shape {list(scale.shape)}, expected one number")
        else:
            expected = (*stack, ceil_div(rows, block[0]), ceil_div(columns, block[1]))
            why = f"for {list(values.shape)} in blocks of {block[0]} x {block[1]} by the config"
            unclaimed.require_shape(scale_name, scale, expected, why)
        unclaimed.take(stem + ".activation_scale")
        unclaimed.take(stem + ".input_scale")
        return StoredWeight(
            name=weight,
            shape=(*stack, rows, columns),
            tensors={"values": values, "scale": scale},
            codec=Fp8BlockCodec(block),
            format=self.name,
        )

    def stored_bytes(self, rows: int, columns: int, number_bytes: int) -> int:
        if self.four_bits:
            return rows * (ceil_div(columns, 2) + ceil_div(columns, _FOUR_BIT_GROUP))
        blocks = 1 if self.block is None else ceil_div(rows, self.block[0]) * ceil_div(columns, self.block[1])
        return rows * columns + 4 * blocks
