"""Expected bytes and seconds of a capture, before it runs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from moetool.base.json_files import JsonRecord
from moetool.base.tables import count
from moetool.base.types import ModelSpec
from moetool.capture.composition import Composition
from moetool.costing.estimates import Rates
from moetool.measuring.fit import spoken
from moetool.models.checkpoint import Checkpoint
from moetool.models.loading import parse_dtype
from moetool.runtime.serve_options import ServeOptions

Lengths = Sequence[tuple[int, int]]
"""Forwarded tokens of each prompt, and most tokens with its answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureCost(JsonRecord):
    """Bounds of a capture's cost: real routes repeat experts and answers end early, so it reads less.

    Attributes:
        prompts, together, batches: prompts, most of them that run at once, and batches.
        tokens: forwarded tokens.
        experts: expert reads.
        disk_bytes: those of them from disk; host memory has the rest.
        read_s, compute_s: seconds of reading and of computing, which overlap in part.
    """

    prompts: int
    together: int
    batches: int
    tokens: int
    experts: int
    read_bytes: int
    disk_bytes: int
    read_s: float
    compute_s: float

    def describe(self) -> str:
        """Describe the cost in a sentence without its subject."""
        return (
            f"{self.together} together, at most {count(self.read_bytes, 'B')} of experts read "
            f"({count(self.disk_bytes, 'B')} from disk) in {spoken(self.read_s)}, and {spoken(self.compute_s)} of "
            "computing"
        )


def capture_cost(
    checkpoint: Checkpoint,
    options: ServeOptions,
    composition: Composition,
    lengths: Lengths,
    slots: int,
    rates: Rates,
    processes: int = 1,
) -> CaptureCost:
    """Estimate a capture.

    Args:
        options: data type and host memory.
        slots: expert slots.
        processes: processes that share the batches, each with its own slots and host memory.
    """
    spec, size = checkpoint.spec, checkpoint.spec.slot_bytes
    reads = most_reads(spec, composition, lengths, slots, processes)
    absent = max(0.0, 1 - options.host_memory_bytes / spec.all_experts_bytes)  # from host memory
    evicted = 1 - slots / spec.total_experts  # from the slots; host memory holds what they do, too
    missing = min(1.0, absent / evicted) if evicted > 0 else 1.0
    on_disk = min(reads, max(missing * reads, processes * spec.total_experts))  # each process reads each from disk
    dense, bits = (
        checkpoint.dense_token_bytes(parse_dtype(options.dtype)),
        8 * size / checkpoint.layers[0].form.num_elements,
    )
    compute_s = 0.0
    for tokens, times, _ in _forwards(composition, lengths):
        weights_s = rates.read_s(dense, 16) + rates.read_s(_needed(spec, tokens) * size, bits)
        products_s = 2 * tokens * checkpoint.num_active_parameters / rates.flops
        fixed_s = int(checkpoint.config.num_hidden_layers) * rates.layer_s + spec.num_layers * rates.miss_layer_s
        compute_s += times * (max(weights_s, products_s) + fixed_s)
    link_s = reads * size / rates.link_bytes_s if rates.link_bytes_s else 0.0
    return CaptureCost(
        prompts=len(lengths),
        together=composition.most,
        batches=len(composition.sizes),
        tokens=sum(full - 1 for _, full in lengths),
        experts=round(reads),
        read_bytes=round(reads * size),
        disk_bytes=round(on_disk * size),
        read_s=link_s + on_disk * size / rates.disk_bytes_s,
        compute_s=compute_s,
    )


def most_reads(spec: ModelSpec, composition: Composition, lengths: Lengths, slots: int, processes: int = 1) -> float:
    """Expert reads if tokens choose experts independently and all requests of a batch decode to their limit together.

    Args:
        slots: expert slots of a process.
        processes: processes that share the batches.
    """
    if slots >= spec.total_experts:
        return float(processes * spec.total_experts)
    missed = 1 - slots / spec.total_experts
    return sum(
        times * _needed(spec, tokens) * (missed if decodes else 1)
        for tokens, times, decodes in _forwards(composition, lengths)
    )


def _forwards(composition: Composition, lengths: Lengths) -> Iterator[tuple[int, int, bool]]:
    """Yield the tokens of each forward, how often it runs, and whether it decodes."""
    for start, end in composition.bounds():
        for first in range(start, end, composition.most):
            group = lengths[first : min(end, first + composition.most)]
            whole, rest = divmod(sum(prompt for prompt, _ in group), composition.chunk_tokens)
            yield from ((composition.chunk_tokens, whole, False), (rest, 1, False))
            answers = sorted(full - prompt - 1 for prompt, full in group)
            for place, (shorter, longer) in enumerate(pairwise([0, *answers])):
                yield len(answers) - place, longer - shorter, True


def _needed(spec: ModelSpec, tokens: int) -> float:
    """Distinct experts that tokens need, over all layers."""
    return sum(
        experts * (1 - (1 - top_k / experts) ** tokens)
        for experts, top_k in zip(spec.num_experts_L, spec.top_k_L, strict=True)
    )
