"""MXFP4: groups of 32 4-bit numbers that share an exponent, as gpt-oss and compressed-tensors store them.

gpt-oss stores the experts [E, K, N] of a layer, which would be `X`, as

    X_blocks  uint8 [E, N, K / 32, 16], two E2M1 numbers per byte, the first in the low half
    X_scales  uint8 [E, N, K / 32]: an exponent of two with a bias of 127

compressed-tensors (`mxfp4-pack-quantized`) stores a weight [N, K] that would be `X.weight` as

    X.weight_packed  uint8 [N, K / 2]
    X.weight_scale   uint8 [N, K / 32]

Products read it packed: on a CPU as `moetool.kernels.cpu.kinds.MXFP4`, on a GPU by `moetool.kernels.gpu.slots`.
"""

from dataclasses import dataclass

import torch

from moetool.models.weights.format import Stored, StoredWeight, UnclaimedTensors
from moetool.models.weights.value_scaling import Groups, four_bits, scale_values, write_scaled

GROUP = 32


@dataclass(frozen=True, slots=True)
class Mxfp4Codec:
    """Numbers times 2 to the power of their group's exponent, which is exact."""

    transposed: bool

    def into(self, stored: Stored, out: torch.Tensor) -> None:
        values = stored["values"].flatten(1)
        groups = Groups(scale_NG=scale_values(stored["scale"]), size=GROUP)
        write_scaled(out, lambda part: four_bits(values[part], e2m1=True), groups)


@dataclass(frozen=True, slots=True)
class Mxfp4Blocks:
    """The format of gpt-oss."""

    name: str = "mxfp4"

    def weight_of(self, tensor: str) -> str | None:
        for suffix in ("_blocks", "_scales"):
            if tensor.endswith(suffix):
                return tensor.removesuffix(suffix)
        return None

    def claim(self, weight: str, unclaimed: UnclaimedTensors) -> StoredWeight | None:
        values_name, scale_name = f"{weight}_blocks", f"{weight}_scales"
        either = unclaimed.get(values_name) or unclaimed.get(scale_name)
        assert either is not None
        values = unclaimed.need(values_name, either, "the numbers")
        scale = unclaimed.need(scale_name, either, "the exponents")
        unclaimed.require_dtype(values_name, values, "U8")
        unclaimed.require_dtype(scale_name, scale, "U8")
        if len(values.shape) != 4 or values.shape[3] != GROUP // 2:
            raise unclaimed.error(
                values_name, values, f"has shape {list(values.shape)}, expected [experts, out, in / 32, 16]"
            )
        unclaimed.require_shape(scale_name, scale, values.shape[:3], f"as {values_name} has groups")
        experts, rows, groups, _ = values.shape
        return StoredWeight(
            name=weight,
            shape=(experts, groups * GROUP, rows),
            tensors={"values": values, "scale": scale},
            codec=Mxfp4Codec(transposed=True),
            format=self.name,
        )

    def stored_bytes(self, rows: int, columns: int, number_bytes: int) -> int:
        return rows * columns * 17 // GROUP  # whichever side has the inputs


@dataclass(frozen=True, slots=True)
class Mxfp4Packed:
    """The format of compressed-tensors."""

    name: str = "mxfp4"

    def weight_of(self, tensor: str) -> str | None:
        return tensor.removesuffix("_packed") if tensor.endswith(".weight_packed") else None

    def claim(self, weight: str, unclaimed: UnclaimedTensors) -> StoredWeight | None:
        values_name, scale_name = f"{weight}_packed", f"{weight}_scale"
        values = unclaimed.get(values_name)
        assert values is not None
        if values.dtype != "U8" or unclaimed.get(f"{weight}_global_scale") is not None:
            return None
        unclaimed.take(values_name)
        scale = unclaimed.need(scale_name, values, "the exponents")
        unclaimed.require_dtype(scale_name, scale, "U8")
        if len(values.shape) != 2 or values.shape[1] * 2 % GROUP:
            raise unclaimed.error(
                values_name, values, f"has shape {list(values.shape)}, expected a multiple of 16 bytes per row"
            )
        rows, columns = values.shape[0], 2 * values.shape[1]
        unclaimed.require_shape(scale_name, scale, (rows, columns // GROUP), f"for groups of {GROUP} inputs")
        unclaimed.take(weight.removesuffix("weight") + "input_global_scale")
        return StoredWeight(
            name=weight,
            shape=(rows, columns),
            tensors={"values": values, "scale": scale},
            codec=Mxfp4Codec(transposed=False),
            format=self.name,
        )

    def stored_bytes(self, rows: int, columns: int, number_bytes: int) -> int:
        return rows * columns * 17 // GROUP
