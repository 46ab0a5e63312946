"""Unpack weights in ggml's blocks: one or two scales and a few dozen values each.

transformers unpacks most types, on any device; this module unpacks MXFP4; the gguf package unpacks the others on the
CPU. All results are bit-identical to the gguf package's.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from moetool.models.files.gguf_header import PLAIN
from moetool.models.weights.format import Stored
from moetool.models.weights.value_scaling import CHUNK, four_bits

Undo = Callable[[Mapping[str, torch.Tensor]], torch.Tensor]
"""Restores a weight from the tensors that llama.cpp's converter made of it, by role."""
_MXFP4, _MXFP4_BYTES = 39, 17


def unpack_blocks(blocks: torch.Tensor, kind: int) -> torch.Tensor:
    """Unpack rows of blocks, uint8 [N, bytes], or of numbers [N, K], to float32 [N, K]."""
    if kind in PLAIN:
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
    """An exponent byte for 32 values, then 16 bytes: lower halves hold the first 16 values, upper halves the rest."""
    parts = blocks.reshape(len(blocks), -1, _MXFP4_BYTES)
    exponent = parts[..., :1].to(torch.int32)
    half = torch.where(exponent < 2, 0x00200000 << exponent.clamp(max=1), (exponent - 1) << 23).view(torch.float32)
    pairs = four_bits(parts[..., 1:].contiguous(), e2m1=True).unflatten(-1, (-1, 2))
    return (pairs.mT.flatten(-2) * 2 * half).flatten(1)


@dataclass(frozen=True, slots=True)
class GgmlCodec:
    """Codec of a weight that one or several tensors make.

    Attributes:
        kinds: role and ggml type of its tensors.
        undo: the function that makes the weight from them; None: they are concatenated.
        transposed: see `moetool.models.weights.format.Codec`.
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
        """Rows of a weight [out, ...] by tensor."""
        count = len(self.kinds)
        return [out[number::count] for number in range(count)] if self.interleaved else list(out.chunk(count))


def _whole(tensor: torch.Tensor, kind: int) -> torch.Tensor:
    """A tensor of any shape as float32."""
    if kind in PLAIN:
        return tensor.to(torch.float32)
    return unpack_blocks(tensor.flatten(0, -2), kind).unflatten(0, tensor.shape[:-1])


def _write(blocks: torch.Tensor, kind: int, out: torch.Tensor) -> None:
    """Unpack a few rows at a time, so that they stay in the CPU cache."""
    if kind in PLAIN:
        out.copy_(blocks)
        return
    step = max(1, CHUNK // out.shape[-1])
    for first in range(0, len(out), step):
        out[first : first + step] = unpack_blocks(blocks[first : first + step], kind)
