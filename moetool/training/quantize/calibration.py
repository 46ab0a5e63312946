"""Calibration and scoring tokens of a replica."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from moetool.base.errors import UsageError
from moetool.prompts.gather import Prompt
from moetool.trace.same_prompts import digest_of_tokens

LEAST_BLOCKS = 8
_JUDGED = 5  # one prompt in five is held out for scoring


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Blocks of tokens, all of one length.

    Attributes:
        ids_NS: sequences for the choice of scales.
        judged_NS: held-out sequences for scoring.
        seen_prompts: digests of the prompts in `ids_NS` (`moetool.trace.same_prompts`).
        datasets: names of the sources.
    """

    ids_NS: torch.Tensor
    judged_NS: torch.Tensor
    seen_prompts: tuple[str, ...] = ()
    datasets: tuple[str, ...] = ()


def from_prompts(
    prompts: Sequence[Prompt], tokenizer: Any, vocab_size: int, *, length: int, max_tokens: int, seed: int
) -> Calibration:
    """Join prompts into blocks of `length` tokens; every fifth prompt, in random order, is held out for scoring.

    Args:
        vocab_size: number of tokens that the model embeds.
        max_tokens: maximum calibration tokens; a quarter of it for scoring.

    Raises:
        UsageError: the text or `max_tokens` is too short for `LEAST_BLOCKS` blocks.
        MismatchError: a prompt has a token that the model does not embed.
    """
    if max_tokens < LEAST_BLOCKS * length:
        raise UsageError(
            f"max_tokens is {max_tokens:,}, expected at least {LEAST_BLOCKS * length:,}: {LEAST_BLOCKS} blocks of "
            f"{length}; set it higher, or a shorter length"
        )
    order = np.random.default_rng(seed).permutation(len(prompts)).tolist()
    judged = [prompts[i] for i in order[::_JUDGED]]
    mine = [prompts[i] for place, i in enumerate(order) if place % _JUDGED]

    def encode(prompt: Prompt) -> list[int]:
        return prompt.token_ids(tokenizer, vocab_size)

    end = tokenizer.eos_token_id
    ends = [] if end is None or end >= vocab_size else [end]
    ids_NS, used = _blocks(mine, encode, ends, length, max_tokens)
    judged_NS, _ = _blocks(judged, encode, ends, length, max_tokens // 4)
    if len(ids_NS) < LEAST_BLOCKS or not len(judged_NS):
        found, kept = (sum(len(encode(prompt)) for prompt in part) for part in (mine, judged))
        raise UsageError(
            f"the calibration text has {found:,} tokens in {len(mine)} prompts and "
            f"{kept:,} in {len(judged)} prompts for scoring, expected at least "
            f"{LEAST_BLOCKS * length:,} and {length:,}; give more --data, or set a shorter length: "
            "--set length=N"
        )
    return Calibration(
        ids_NS=ids_NS,
        judged_NS=judged_NS,
        seen_prompts=tuple(sorted({digest for prompt in used for digest in _known_by(prompt, encode(prompt))})),
        datasets=tuple(sorted({prompt.dataset for prompt in used})),
    )


def _known_by(prompt: Prompt, ids: list[int]) -> set[str]:
    """Return the digests of a prompt, whole and cut to its length in a capture."""
    return {digest_of_tokens(ids), digest_of_tokens(ids[: prompt.input_tokens])}


def _blocks(
    prompts: Sequence[Prompt], encode: Callable[[Prompt], list[int]], ends: list[int], length: int, max_tokens: int
) -> tuple[torch.Tensor, list[Prompt]]:
    """Return the whole blocks of the prompts, each followed by `ends`, and the prompts in them."""
    wanted = max(1, max_tokens // length) * length
    ids: list[int] = []
    used: list[Prompt] = []
    for prompt in prompts:
        if len(ids) >= wanted:
            break
        ids += encode(prompt) + ends
        used.append(prompt)
    whole = min(len(ids), wanted) // length * length
    return torch.tensor(ids[:whole], dtype=torch.int64).view(-1, length), used
