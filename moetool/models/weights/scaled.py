"""8-bit values times a scale: compressed-tensors' `float-quantized` and `int-quantized`, and fbgemm's FP8.

A weight that would be `X` is stored as

    X             float8_e4m3fn or int8, of the weight's shape
    X_scale       a number for the weight, per row ([N, 1]), or per group or block of inputs
    X_zero_point  int8, of the scale's shape: it is subtracted first; absent if symmetric

Activation settings are ignored: moetool rounds only weights.
"""

import math
from dataclasses import dataclass

import torch

from moetool.models.files.tensor_index import FLOATS
from moetool.models.weights.format import Stored, StoredWeight, UnclaimedTensors, ceil_div
from moetool.models.weights.value_scaling import Groups, eight_bits, scale_values, write_scaled


@dataclass(frozen=True, slots=True)
class ScaledCodec:
    """(value - zero point) * scale, in the type of the scale.

    Attributes:
        block: rows and columns that share a scale; None if broadcasting suffices.
    """

    block: tuple[int, int] | None
    transposed: bool = False

    def into(self, stored: Stored, out: torch.Tensor) -> None:
        values, scale, zero = stored["values"], stored["scale"], stored.get("zero")
        scale_NG = self._by_row(scale, len(out))
        groups = Groups(
            scale_NG=scale_NG,
            zero_NG=None if zero is None else self._by_row(zero, len(out)),
            size=self.block[1] if self.block else out.shape[1] // scale_NG.shape[1],
        )
        own = scale.dtype if scale.dtype in FLOATS.values() else torch.float32
        write_scaled(out, lambda part: eight_bits(values[part]), groups, own)

    def _by_row(self, scale: torch.Tensor, rows: int) -> torch.Tensor:
        """Scales or zero points [N, G], or [1, G] if all rows share them."""
        numbers = scale_values(scale)
        if self.block is not None:
            return numbers.repeat_interleave(self.block[0], dim=0)[:rows]
        return numbers if numbers.dim() == 2 else numbers.reshape(-1, 1)


@dataclass(frozen=True, slots=True)
class Scaled:
    """The format.

    Attributes:
        strategy: the unit that shares a scale: `tensor`, `channel`, `group` or `block`.
        block: rows and columns that share a scale, for groups and blocks.
        symmetric: whether there are no zero points.
    """

    strategy: str
    block: tuple[int, int] | None = None
    symmetric: bool = True
    name: str = "fp8_scaled"

    def weight_of(self, tensor: str) -> str | None:
        """Scales identify weights; stacked experts' are not named `weight`."""
        return tensor.removesuffix("_scale") if tensor.endswith(("weight_scale", "_proj_scale")) else None

    def claim(self, weight: str, unclaimed: UnclaimedTensors) -> StoredWeight | None:
        scale_name, zero_name = f"{weight}_scale", f"{weight}_zero_point"
        scale, values = unclaimed.get(scale_name), unclaimed.get(weight)
        assert scale is not None
        if unclaimed.get(f"{weight}_packed") is not None or (values is not None and values.dtype == "U8"):
            return None
        values = unclaimed.need(weight, scale, "the values")
        unclaimed.take(scale_name)
        zero = unclaimed.take(zero_name)
        unclaimed.require_dtype(weight, values, "F8_E4M3", "I8")
        unclaimed.require_dtype(scale_name, scale, *FLOATS, "U8", "F8_E8M0")
        if len(values.shape) < 2:
            raise unclaimed.error(weight, values, f"has shape {list(values.shape)}, expected a matrix")
        if tuple(scale.shape) not in self._scale_shapes(values.shape):
            by = f" of {self.block[0]} x {self.block[1]}" if self.block else ""
            raise unclaimed.error(
                scale_name,
                scale,
                f"has shape {list(scale.shape)}, expected {self._scale_shapes(values.shape)[0]} for "
                f"{list(values.shape)} by {self.strategy}{by} in the config",
            )
        if self.symmetric == (zero is not None):
            if zero is None:
                raise unclaimed.error(weight, values, f"has no {zero_name}, expected it: the config is asymmetric")
            raise unclaimed.error(zero_name, zero, "exists, expected none: the config is symmetric")
        tensors = {"values": values, "scale": scale}
        if zero is not None:
            unclaimed.require_dtype(zero_name, zero, "I8")
            unclaimed.require_shape(zero_name, zero, scale.shape, "as the scale")
            tensors["zero"] = zero
        for hint in ("input_scale", "input_zero_point", "input_scale_ub", "output_scale"):
            unclaimed.take(weight.removesuffix("weight") + hint)
        return StoredWeight(
            name=weight, shape=values.shape, tensors=tensors, codec=ScaledCodec(self.block), format=self.name
        )

    def _scale_shapes(self, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
        *stack, rows, columns = shape
        if self.block is not None:
            return [(*stack, ceil_div(rows, self.block[0]), ceil_div(columns, self.block[1]))]
        if self.strategy == "channel":
            return [(*stack, rows, 1), (rows,)] if not stack else [(*stack, rows, 1), (*stack, 1, columns)]
        return [(1,), (), (1, 1)] if not stack else [(*stack, 1, 1)]

    def stored_bytes(self, rows: int, columns: int, number_bytes: int) -> int:
        scales = math.prod(self._scale_shapes((rows, columns))[0])
        return rows * columns + scales * (number_bytes + (not self.symmetric))
