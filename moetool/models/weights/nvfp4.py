"""NVFP4: groups of 16 4-bit numbers with an FP8 scale each, and one scale for the whole weight.

A weight [N, K] that would be `X.weight` is stored by compressed-tensors (`nvfp4-pack-quantized`) as

    X.weight_packed        uint8 [N, K / 2], two E2M1 numbers a byte, the first in the low half
    X.weight_scale         float8_e4m3fn [N, K / 16]
    X.weight_global_scale  float32 [1]: a group's numbers are multiplied by its scale / this

and by ModelOpt as `X.weight` (the numbers), `X.weight_scale` and `X.weight_scale_2`, which is a factor.
"""

from dataclasses import dataclass

import torch

from moetool.models.weights.format import Stored, StoredWeight, UnclaimedTensors
from moetool.models.weights.value_scaling import Groups, four_bits, write_scaled

GROUP = 16
_GLOBAL, _SECOND = "_global_scale", "_scale_2"


@dataclass(frozen=True, slots=True)
class Nvfp4Codec:
    """Numbers times their group's scale.

    Attributes:
        divides: whether the global scale divides the group scales.
    """

    divides: bool
    transposed: bool = False

    def into(self, stored: Stored, out: torch.Tensor) -> None:
        values, scale, whole = stored["values"], stored["scale"].to(torch.float32), stored["whole"]
        groups = Groups(scale_NG=scale / whole if self.divides else scale * whole, size=GROUP)
        # compressed-tensors rounds the weight to bfloat16
        write_scaled(out, lambda part: four_bits(values[part], e2m1=True), groups, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Nvfp4:
    """The format."""

    name: str = "nvfp4"

    def weight_of(self, tensor: str) -> str | None:
        for suffix in (".weight" + _GLOBAL, ".weight" + _SECOND, ".weight_packed"):
            if tensor.endswith(suffix):
                return tensor[: -len(suffix)] + ".weight"
        return None

    def claim(self, weight: str, unclaimed: UnclaimedTensors) -> StoredWeight | None:
        divides = unclaimed.get(weight + _SECOND) is None
        values_name = f"{weight}_packed" if divides else weight
        whole_name, scale_name = weight + (_GLOBAL if divides else _SECOND), f"{weight}_scale"
        either = unclaimed.get(whole_name) or unclaimed.get(values_name)
        assert either is not None
        if (found := unclaimed.get(values_name)) is not None and found.dtype != "U8":
            return None
        values = unclaimed.need(values_name, either, "the numbers")
        scale = unclaimed.need(scale_name, either, "the groups' scales")
        whole = unclaimed.need(whole_name, either, "the global scale")
        unclaimed.require_dtype(values_name, values, "U8")
        unclaimed.require_dtype(scale_name, scale, "F8_E4M3")
        unclaimed.require_dtype(whole_name, whole, "F32")
        if torch.Size(whole.shape).numel() != 1:
            raise unclaimed.error(whole_name, whole, f"has shape {list(whole.shape)}, expected one number")
        if len(values.shape) != 2 or values.shape[1] * 2 % GROUP:
            raise unclaimed.error(
                values_name, values, f"has shape {list(values.shape)}, expected a multiple of 8 bytes per row"
            )
        rows, columns = values.shape[0], 2 * values.shape[1]
        unclaimed.require_shape(scale_name, scale, (rows, columns // GROUP), f"for groups of {GROUP} inputs")
        for hint in ("input_global_scale", "input_scale"):
            unclaimed.take(weight.removesuffix("weight") + hint)
        return StoredWeight(
            name=weight,
            shape=(rows, columns),
            tensors={"values": values, "scale": scale, "whole": whole},
            codec=Nvfp4Codec(divides),
            format=self.name,
        )

    def stored_bytes(self, rows: int, columns: int, number_bytes: int) -> int:
        return rows * columns * 9 // GROUP + 4
