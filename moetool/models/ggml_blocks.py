"""Weights in ggml's blocks: a scale or two and a few dozen values side by side, unpacked to numbers.

transformers unpacks most types, on any device; MXFP4 is unpacked here; the gguf package unpacks the others on the
processor. All give the gguf package's numbers to the bit.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from moetool.models.gguf_header import FLOATS
from moetool.models.value_scaling import CHUNK, four_bits
from moetool.models.weight_format import Stored

Undo = Callable[[Mapping[str, torch.Tensor]], torch.Tensor]
"""Makes a weight of the tensors that a converter has made of it, by role."""
_MXFP4, _MXFP4_BYTES = 39, 17


def unpack_blocks(blocks: torch.Tensor, kind: int) -> torch.Tensor:
    """The numbers float32 [N, K] of rows of blocks, uint8 [N, bytes], or of numbers [N, K]."""
    if kind in FLOATS:
        return blocks.to(torch.float32)
    if kind == _MXFP4:
        return _mxfp4(blocks)
    from transformers.integrations.gguf import dequant

    if kind in dequant.GGML_BLOCK:
        return dequant.dequantize(blocks.contiguous(), kind).view(len(blocks), -1)
    from gguf import GGMLQuantizationType, dequantize

    made = dequantize(blocks.contiguous().cpu().numpy(), GGMLQuantizationType(kind))
    return torch.from_numpy(made).view(len(blocks), -1).to(blocks.device)


def _mxfp4(blocks: torch.Tensor) -> torch.Tensor:
    """A byte is the exponent of 32 values; 16 hold two each, the second halves of all after the first ones."""
    parts = blocks.reshape(len(blocks), -1, _MXFP4_BYTES)
    exponent = parts[..., :1].to(torch.int32)
    half = torch.where(exponent < 2, 0x00200000 << exponent.clamp(max=1), (exponent - 1) << 23).view(torch.float32)
    pairs = four_bits(parts[..., 1:].contiguous(), e2m1=True).unflatten(-1, (-1, 2))
    return (pairs.mT.flatten(-2) * 2 * half).flatten(1)


@dataclass(frozen=True, slots=True)
class GgmlCodec:
    """A weight of one tensor, or of several.

    Attributes:
        kinds: role and ggml type of its tensors.
        undo: the function that makes the weight of them; where there is none, they lie one under the other.
        transposed: as `moetool.models.weight_format.Codec` has it.
        interleaved: whether rows of one tensor alternate with those of the other.
    """

    kinds: tuple[tuple[str, int], ...]
    undo: Undo | None = None
    transposed: bool = False
    interleaved: bool = False

    def into(self, stored: Stored, out: torch.Tensor) -> None:
        if self.undo is not None:
            parts = {role: _whole(stored[role], kind) for role, kind in self.kinds}
            out.copy_(self.undo(parts).view(out.shape))
            return
        for part, (role, kind) in zip(self.rows_of(out), self.kinds, strict=True):
            _write(stored[role], kind, part)

    def rows_of(self, out: torch.Tensor) -> list[torch.Tensor]:
        """The rows of a weight [out, ...] that each tensor makes."""
        count = len(self.kinds)
        return [out[number::count] for number in range(count)] if self.interleaved else list(out.chunk(count))


def _whole(tensor: torch.Tensor, kind: int) -> torch.Tensor:
    """A tensor of any shape as float32."""
    if kind in FLOATS:
        return tensor.to(torch.float32)
    return unpack_blocks(tensor.flatten(0, -2), kind).unflatten(0, tensor.shape[:-1])


def _write(blocks: torch.Tensor, kind: int, out: torch.Tensor) -> None:
    """Some rows at a time, so that they stay in the processor's cache."""
    if kind in FLOATS:
        out.copy_(blocks)
        return
    step = max(1, CHUNK // out.shape[-1])
    for first in range(0, len(out), step):
        out[first : first + step] = unpack_blocks(blocks[first : first + step], kind)
