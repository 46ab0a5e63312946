"""SGLang's expert distribution recorder, mode stat or stat_approx: a `.pt` file of `logical_count` [T, H, E].

There is one entry per forward pass, with logical experts, summed over all ranks. The ring buffer of T entries (1,000 by
default) is padded with zeros, so the order of passes is unknown. H counts every layer of the model; those without
experts are zero. SGLang's `--init-expert-location` and KTransformers read this file too. Its `rank` and
`average_utilization_rate_over_window` are not read.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from moetool.base.errors import MismatchError
from moetool.trace.expert_counts import Counted
from moetool.trace.foreign import sglang_recorder, torch_file
from moetool.trace.foreign.file_sample import FileSample
from moetool.trace.foreign.model_facts import ModelFacts, hidden_layers


def recognize(sample: FileSample) -> str | None:
    """Recognize a `.pt` file with `logical_count` of several passes."""
    shape = getattr(sample.tensors.get("logical_count"), "shape", ())
    return "a .pt file with logical_count of each pass" if len(shape) == 3 else None


def read_counts(paths: Sequence[Path], facts: ModelFacts) -> Counted:
    """Return the passes of all files, without those that have no tokens.

    Raises:
        MismatchError: a file is damaged or of another mode, the files differ in shape, or a layer with experts is zero.
        UsageError: top-k or the bytes of an expert are not given.
    """
    found = [torch_file.array(path, torch_file.load(path), "logical_count", 3) for path in paths]
    return counted(paths, found, facts)


def counted(paths: Sequence[Path], found: Sequence[np.ndarray], facts: ModelFacts) -> Counted:
    """Return the passes [W, H, E] of several files.

    Raises:
        MismatchError: the files differ in shape, or a layer with experts is zero.
        UsageError: the layers are not those of the given model.
    """
    for path, counts_WHE in zip(paths, found, strict=True):
        if counts_WHE.shape[1:] != found[0].shape[1:]:
            raise MismatchError(f"{path} has {counts_WHE.shape[1:]} (layers, experts), {paths[0]} {found[0].shape[1:]}")
    counts_WHE = np.concatenate(found)
    _, num_hidden, num_experts = counts_WHE.shape
    if not num_experts:
        raise MismatchError(f"{paths[0]} has no experts, expected logical_count (passes, layers, experts)")
    layers = facts.layers_of(paths[0], num_hidden)
    top_k_L, unknown = facts.top_k_or_one(len(layers))
    spec = facts.spec_of(paths[0], layers=layers, num_experts=num_experts, top_k_L=top_k_L)
    counts_WLE = sglang_recorder.counts_without_dense(paths[0], counts_WHE, layers)
    dropped = len(counts_WHE) - len(counts_WLE)
    notes = [*unknown, *([f"{dropped} passes without tokens left out"] if dropped else [])]
    sums_WL = counts_WLE.sum(axis=2)
    if (sums_WL != sums_WL[:, :1]).any():
        notes.append("the layers of a pass have different numbers of tokens, as approximate statistics do")
    return Counted(spec=spec, counts_WLE=counts_WLE, notes=notes)


def write_counts(counted: Counted, out: Path, num_hidden_layers: int | None = None) -> list[str]:
    """Write counts; return notes on the additions. Raises: UsageError: `num_hidden_layers` is too small."""
    spec, num_hidden = counted.spec, hidden_layers(counted.spec, num_hidden_layers)
    counts_WHE = sglang_recorder.counts_with_dense(counted.counts_WLE, spec.layer_ids_L, num_hidden)
    torch_file.save({"rank": 0, "logical_count": counts_WHE, "average_utilization_rate_over_window": None}, out)
    return [f"{num_hidden} layers, zeros in those without experts"]
