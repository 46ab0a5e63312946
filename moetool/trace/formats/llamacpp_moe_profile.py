"""Routing profiles of llama.cpp forks with an expert cache: CSV without a header, a row for each token and layer.

    pos,layer,id0,id1,…

`pos` counts new tokens from 0 and is negative for the prompt. Rows come forward by forward and layer by layer. Profiles
of several runs may follow one another in one file. `--moe-cache-profile` of such a fork counts the rows of new tokens
and keeps the most used experts of each layer on the GPU, `--moe-cache-slots` of them.

Source: github.com/thecodacus/llama.cpp, tools/moe-trace and `init_moe_expert_cache`.
"""

from pathlib import Path

import numpy as np

from moetool.base.errors import MismatchError
from moetool.trace.expert_counts import Counted
from moetool.trace.foreign.file_sample import FileSample, read_numbers
from moetool.trace.foreign.layer_runs import LayerRows, by_token
from moetool.trace.foreign.model_facts import ModelFacts, require_even
from moetool.trace.foreign.routes import Routes, prompt_rows, run_order, whole_requests
from moetool.trace.reader import Trace


def recognize(sample: FileSample) -> str | None:
    """Recognize rows of equally many whole numbers, at least three, of which only the first may be negative."""
    rows = [line.split(",") for line in sample.lines]
    if not rows or len(rows[0]) < 3 or len({len(row) for row in rows}) > 1:
        return None
    if not all(
        row[0].strip().removeprefix("-").isdigit() and all(c.strip().isdigit() for c in row[1:]) for row in rows
    ):
        return None
    return "rows of whole numbers without a header: pos,layer,expert,expert,…"


def read_routes(path: Path, facts: ModelFacts) -> Routes:
    """Read and check the whole file.

    Raises:
        MismatchError: it is damaged, not such a file, or of another model than the given one.
        UsageError: the number of experts or their bytes are not given.
    """
    first = FileSample(path).lines[:1]
    width = len(first[0].split(",")) if first else 0
    if width < 3:
        raise MismatchError(f"{path} begins with {first[:1]}, expected rows of pos,layer,expert,expert,…")
    rows_RW = read_numbers(path, width, "pos,layer,expert,…", negative_first=True)
    tokens = by_token(path, LayerRows(layer_R=rows_RW[:, 1], experts_RK=rows_RW[:, 2:], decode_R=rows_RW[:, 0] >= 0))
    notes = ["top-k only: no weights, no scores over all experts, no embeddings, no token ids"]
    return tokens.routes(path, facts, notes)


def write_routes(trace: Trace, out: Path, num_hidden_layers: int | None = None) -> list[str]:
    """Write a trace, request after request: its prompt in one forward, then a forward for each new token.

    Raises:
        MismatchError: the layers differ in shape.
    """
    require_even(trace.spec, "llamacpp_moe_profile")
    spec = trace.spec
    decodes = 0
    with out.open("w", encoding="ascii", newline="\n") as file:
        for _, rows in whole_requests(trace):
            prompt = prompt_rows(rows)
            experts_TLK = rows.experts_TS.reshape(len(rows), spec.num_layers, -1)
            decodes += len(rows) - prompt
            for token, place in run_order(spec.num_layers, prompt, len(rows)):
                ids = ",".join(map(str, experts_TLK[token, place].tolist()))
                file.write(f"{token - prompt},{spec.layer_ids_L[place]},{ids}\n")
    notes = ["llamacpp_moe_profile has experts only, and no names of requests"]
    if not decodes:
        notes.append("the trace has no new tokens, and --moe-cache-profile counts only those: the profile is empty")
    return notes


def write_counts(counted: Counted, out: Path, num_hidden_layers: int | None = None) -> list[str]:
    """Write counts as ranks: the most used expert of a layer of E is written E times, the next E - 1 times.

    A fork only orders a layer's experts by their number of occurrences.

    Raises:
        MismatchError: the layers differ in shape.
    """
    spec = counted.spec
    require_even(spec, "llamacpp_moe_profile")
    counts_LE = counted.counts_WLE.sum(axis=0)
    top_k = spec.top_k_L[0]
    with out.open("w", encoding="ascii", newline="\n") as file:
        for place, layer in enumerate(spec.layer_ids_L):
            order = np.argsort(-counts_LE[place], kind="stable")
            ranked = [int(expert) for expert in order if counts_LE[place, expert]]
            left = {expert: len(ranked) - rank for rank, expert in enumerate(ranked)}
            pos = 0
            while left:
                # Each row has different experts, those with the most remaining occurrences first.
                row = sorted(left, key=lambda expert: -left[expert])[:top_k]
                file.write(f"{pos},{layer},{','.join(map(str, row))}\n")
                left = {e: n - (e in row) for e, n in left.items() if n - (e in row)}
                pos += 1
    return ["counts became ranks within each layer; for --moe-cache-profile, not for replay"]
