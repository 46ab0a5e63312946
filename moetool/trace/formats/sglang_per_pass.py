"""SGLang's expert distribution recorder, mode per_pass: one `.pt` file per rank, counting slots by forward pass.

    {"records": [{"forward_pass_id", "rank", "gatherer_key", "global_physical_count": int [H, P]}, ...],
     "last_physical_to_logical_map": int [H, P]}

The files of all ranks belong together: the counts of a pass are summed, as in SGLang's own reader. Ranks that share the
attention of tokens each count them, so the sum is a multiple of the true counts, equal for all experts. The mapping
converts slots to experts.
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
    """Recognize a `.pt` file whose records have counts and no tokens."""
    return "a .pt file with records that count" if sglang_recorder.records_of(sample.tensors) == "per_pass" else None


def read_counts(paths: Sequence[Path], facts: ModelFacts) -> Counted:
    """Return the passes of all ranks' files, in the order of their numbers.

    Raises:
        MismatchError: a file is damaged or of another mode, the ranks' mappings differ, a rank has a pass twice, or a
            layer with experts is zero.
        UsageError: top-k or the bytes of an expert are not given.
    """
    logical_HP: np.ndarray | None = None
    counts_of: dict[int, np.ndarray] = {}
    seen: dict[tuple[int, int, str], Path] = {}
    for path in paths:
        pack = torch_file.load(path)
        mapping_HP = sglang_recorder.logical_map(path, pack)
        if logical_HP is not None and not np.array_equal(logical_HP, mapping_HP):
            raise MismatchError(
                f"{path} has another last_physical_to_logical_map than {paths[0]}; are they of one run?"
            )
        logical_HP = mapping_HP
        for i, record in enumerate(sglang_recorder.records(path, pack)):
            where = f"{path}, record {i}"
            count_HP = torch_file.array(where, record, "global_physical_count", 2)
            if count_HP.shape != logical_HP.shape:
                raise MismatchError(f"{where} counts {count_HP.shape}, expected {logical_HP.shape} (layers, slots)")
            number, rank = record.get("forward_pass_id"), record.get("rank")
            if type(number) is not int or type(rank) is not int:
                raise MismatchError(f"{where} has no forward_pass_id or rank, expected whole numbers")
            key = number, rank, str(record.get("gatherer_key"))
            if key in seen:
                raise MismatchError(f"{where} is pass {number} of rank {rank} again, after {seen[key]}; give it once")
            seen[key] = path
            counts_of[number] = counts_of.get(number, 0) + count_HP
    assert logical_HP is not None
    num_hidden, num_experts = len(logical_HP), int(logical_HP.max()) + 1
    counts_WHE = np.zeros((len(counts_of), num_hidden, num_experts), np.int64)
    for w, number in enumerate(sorted(counts_of)):
        for layer in range(num_hidden):
            np.add.at(counts_WHE[w, layer], logical_HP[layer], counts_of[number][layer])
    layers = facts.layers_of(paths[0], num_hidden)
    spec = facts.spec_of(paths[0], layers=layers, num_experts=num_experts)
    counts_WLE = sglang_recorder.counts_without_dense(paths[0], counts_WHE, layers)
    return Counted(spec=spec, counts_WLE=counts_WLE, notes=sglang_recorder.map_notes(logical_HP))


def write_counts(counted: Counted, out: Path, num_hidden_layers: int | None = None) -> list[str]:
    """Write counts as those of one rank without copies of experts; return notes on the additions.

    Raises:
        UsageError: `num_hidden_layers` is too small.
    """
    spec, num_hidden = counted.spec, hidden_layers(counted.spec, num_hidden_layers)
    counts_WHE = sglang_recorder.counts_with_dense(counted.counts_WLE, spec.layer_ids_L, num_hidden)
    records = [
        {"forward_pass_id": w, "rank": 0, "gatherer_key": "primary", "global_physical_count": count_HE}
        for w, count_HE in enumerate(counts_WHE)
    ]
    mapping = sglang_recorder.trivial_map(num_hidden, spec.num_experts)
    torch_file.save({"records": records, "last_physical_to_logical_map": mapping}, out)
    return [f"{num_hidden} layers, zeros in those without experts; one rank, slot e holds expert e"]
