"""Sample the tokens of a batch on a GPU, all requests together, without synchronizing with the device.

The rule is that of `moetool.runtime.loop.sampling.gumbel_scores`, with other noise: a counter hashed on the device
(splitmix64 of a request's key and the token's id), so that no noise is copied from the host. A seed gives the same text
alone and in any batch on one kind of device; GPU and CPU give different texts.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from moetool.runtime.experts.copies import on_device
from moetool.runtime.request import SamplingParams

_WHOLE = 2**52
"""Probabilities are summed as integer multiples of 1 / this: integer sums do not depend on the order."""
_STEP, _FIRST, _SECOND = (number - 2**64 for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


class RowSampling(NamedTuple):
    """Sampling parameters of the rows of a batch, each [B] on the device.

    Attributes:
        key: key of the row's noise, int64.
        temperature, min_p, top_p: float32.
        top_k: int64; the vocabulary's size if unlimited.
        limited: whether any row excludes tokens.
    """

    key: torch.Tensor
    temperature: torch.Tensor
    min_p: torch.Tensor
    top_p: torch.Tensor
    top_k: torch.Tensor
    limited: bool

    @classmethod
    def of(cls, rows: Sequence[tuple[SamplingParams, int]], vocabulary: int, device: torch.device) -> "RowSampling":
        """Build from each row's parameters and key, with one asynchronous copy."""
        numbers = torch.tensor(
            [(p.temperature, p.min_p, p.top_p, p.top_k if 0 < p.top_k < vocabulary else vocabulary) for p, _ in rows],
            dtype=torch.float64,
        ).T
        keys = torch.tensor([key for _, key in rows], dtype=torch.int64)
        packed = on_device(torch.cat([numbers.contiguous().view(torch.int64), keys[None]]), device)
        temperature, min_p, top_p, top_k = packed[:4].view(torch.float64)
        limited = any(p.min_p > 0 or p.top_p < 1 or 0 < p.top_k < vocabulary for p, _ in rows)
        return cls(packed[4], temperature.float(), min_p.float(), top_p.float(), top_k.long(), limited)


def batched_gumbel_scores(logits_BV: torch.Tensor, draws: RowSampling) -> torch.Tensor:
    """Return scores [B, V]: each row's argmax is a sample from the tokens that its parameters allow.

    Args:
        logits_BV: float32; each row has a finite maximum.
    """
    scaled_BV = (logits_BV - logits_BV.amax(-1, keepdim=True)) / draws.temperature[:, None]
    noise_BV = gumbel_noise(draws.key, logits_BV.shape[1])
    if not draws.limited:
        return scaled_BV + noise_BV
    values_BV, ids_BV = scaled_BV.sort(dim=-1, descending=True, stable=True)  # lower ids first among equal values
    likely_BV = values_BV.softmax(-1)
    ranks_V = torch.arange(values_BV.shape[1], device=values_BV.device)
    kept_BV = (likely_BV >= draws.min_p[:, None] * likely_BV[:, :1]) & (ranks_V < draws.top_k[:, None])
    likely_BV = values_BV.masked_fill(~kept_BV, float("-inf")).softmax(-1)
    parts_BV = (likely_BV.double() * _WHOLE).long()
    before_BV = (parts_BV.cumsum(-1) - parts_BV).double() / _WHOLE
    # The most likely token stays even if top_p is below float32's smallest number.
    kept_BV &= (before_BV < draws.top_p[:, None]) | (ranks_V == 0) | (draws.top_p >= 1)[:, None]
    drawn_BV = (values_BV + noise_BV.gather(1, ids_BV)).masked_fill(~kept_BV, float("-inf"))
    return torch.empty_like(scaled_BV).scatter_(1, ids_BV, drawn_BV)


def gumbel_noise(key_B: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Return Gumbel noise, float32 [B, V], a function of key and token only."""
    ids_V = torch.arange(1, vocabulary + 1, dtype=torch.int64, device=key_B.device)
    z = key_B[:, None] + ids_V * _STEP  # wraps around
    z = (z ^ _shifted(z, 30)) * _FIRST
    z = (z ^ _shifted(z, 27)) * _SECOND
    z = z ^ _shifted(z, 31)
    uniform = (_shifted(z, 11).double() + 0.5) * 2.0**-53
    return -(-uniform.log()).log().float()


def _shifted(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift z right as an unsigned integer."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
