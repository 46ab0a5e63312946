"""Expected reads of a capture, before it runs."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

from moetool.base.types import ModelSpec
from moetool.capture.composition import Composition


def most_reads(spec: ModelSpec, composition: Composition, lengths: Sequence[tuple[int, int]], slots: int) -> float:
    """Expert reads if tokens choose experts independently and all requests of a batch decode to their limit together.

    Real routes repeat experts, so a capture reads less.

    Args:
        lengths: forwarded tokens of each prompt, and most tokens with its answer.
        slots: expert slots.
    """
    if slots >= spec.total_experts:
        return float(spec.total_experts)
    reads = 0.0
    for start, end in pairwise(accumulate(composition.sizes, initial=0)):
        batch = lengths[start:end]
        rest = sum(prompt for prompt, _ in batch)
        while rest > 0:
            reads += _needed(spec, min(rest, composition.chunk_tokens))
            rest -= composition.chunk_tokens
        answers = sorted(full - prompt - 1 for prompt, full in batch)
        missed = 1 - slots / spec.total_experts
        for place, (shorter, longer) in enumerate(pairwise([0, *answers])):
            reads += (longer - shorter) * missed * _needed(spec, len(answers) - place)
    return reads


def _needed(spec: ModelSpec, tokens: int) -> float:
    """Distinct experts that tokens need, over all layers."""
    return sum(
        experts * (1 - (1 - top_k / experts) ** tokens)
        for experts, top_k in zip(spec.num_experts_L, spec.top_k_L, strict=True)
    )
