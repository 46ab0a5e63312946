"""Foresight on routes of DeepSeek-V2-Lite: kept hits on a known task and on one never trained on, and its own time.

    python -m pytest tests/bench/test_foresight.py -s

Trained on every other sequence of two tasks, it is scored on 1,500 tokens of the other sequences of the first, and of
a task that it has never seen on the 1,500 tokens after the first 1,000. Prefetching is off, so that every hit is kept.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from moetool.caching._layer_slots import equal_slots
from moetool.caching._policy import build_policy
from moetool.caching._residency import Counts, Residency
from moetool.formats._model_facts import ModelFacts
from moetool.formats.topk_parquet import read_routes
from moetool.learning.predictor import Predictor, build
from moetool.learning.tokens import Tokens
from moetool.types import ForwardInfo, GateEvent, ModelSpec
from tests.synthetic import make_forward

SHARED = Path(os.environ.get("MOETOOL_SHARED", Path(__file__).parents[2].parent / "shared"))
ROUTES = SHARED / "data" / "routes" / "deepseek_v2_lite"
SHARES = (0.125, 0.25, 0.5)
WARM, SCORED = 1000, 1500

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not ROUTES.is_dir(), reason="shared/data/routes is not here")]

Sequences = list[np.ndarray]
Run = tuple[str, str, dict[str, object], Predictor | None]  # title, policy (`by layer`: each its own pool), options


def sequences(task: str) -> tuple[ModelSpec, Sequences]:
    """The spec, and experts [T, L, K] of each sequence."""
    routes = read_routes(ROUTES / f"{task}.parquet", ModelFacts())
    shape = (-1, routes.spec.num_layers, routes.spec.top_k_L[0])
    return routes.spec, [sequence.experts_TS.astype(np.int64).reshape(shape) for sequence in routes.sequences]


def first_tokens(parts: Sequences, num_tokens: int) -> Sequences:
    taken: Sequences = []
    for part in parts:
        taken.append(part[: num_tokens - sum(map(len, taken))])
    return [part for part in taken if len(part)]


def counted(spec: ModelSpec, train: Sequences) -> Predictor:
    """`moetool train next_use`, but on these sequences."""
    model = build("next_use", spec)
    request_T = torch.arange(len(train)).repeat_interleave(torch.tensor(list(map(len, train))))
    model.count(Tokens(experts_TPK=torch.from_numpy(np.concatenate(train)), request_T=request_T))
    return model.eval().requires_grad_(False)


def forwards(spec: ModelSpec, parts: Sequences) -> Iterator[tuple[ForwardInfo, list[GateEvent], bool]]:
    """One token a forward, one sequence after the other; and whether its request ends with it."""
    number = 0
    for request, part in enumerate(parts):
        for token in range(len(part)):
            yield *make_forward(spec, part[None, token], forward_id=number, request=request), token == len(part) - 1
            number += 1


def kept(spec: ModelSpec, parts: Sequences, share: float, run: Run, warm: int) -> tuple[float, float]:
    """Share of needed experts that were kept, after `warm` tokens; and milliseconds of processor time a token."""
    _, name, options, predictor = run
    made = list(forwards(spec, parts))
    future = [[spec.expert_key(e.layer, x) for x in e.needed] for _, events, _ in made for e in events]
    slots = int(share * spec.total_experts)
    policy = build_policy(name.removesuffix(" by layer"), spec, options, slots, predictor=predictor, future=future)
    residency = Residency(policy, layer_slots=equal_slots(spec, slots) if name.endswith(" by layer") else ())
    before, began = Counts(), time.process_time()
    for number, (info, events, last) in enumerate(made):
        if number == warm:
            before = residency.counts
        residency.begin_forward(info)
        for event in events:
            residency.event(event)
        residency.end_forward(info)
        if last:
            residency.end_request(info.request_T[0])
    milliseconds = 1e3 * (time.process_time() - began) / len(made)
    counts = residency.counts
    return (counts.kept - before.kept) / (counts.needed - before.needed), milliseconds


def decayed(spec: ModelSpec, parts: Sequences, share: float, half_life: float, warm: int) -> float:
    """Kept hits of evicting by use that is halved every `half_life` forwards: the other history to beat."""
    stride, slots = spec.num_experts, int(share * spec.total_experts)
    use_A, resident_A = np.zeros(spec.num_layers * stride), np.zeros(spec.num_layers * stride, bool)
    gain, growth, hits, needed = 1.0, 2 ** (1 / (half_life * spec.num_layers)), 0, 0
    for number, experts_LK in enumerate(np.concatenate(parts)):
        if gain > 1e100:
            use_A, gain = use_A / gain, 1.0
        for layer, experts_K in enumerate(experts_LK):
            keys = experts_K + layer * stride
            gain *= growth
            use_A[keys] += gain
            if number >= warm:
                hits, needed = hits + int(resident_A[keys].sum()), needed + len(keys)
            resident_A[keys] = True
            while resident_A.sum() > slots:
                others = np.flatnonzero(resident_A & ~np.isin(np.arange(len(use_A)), keys))
                over = int(resident_A.sum()) - slots
                resident_A[others[np.argsort(use_A[others], kind="stable")[:over]]] = False
    return hits / needed


def table(title: str, spec: ModelSpec, parts: Sequences, warm: int, runs: list[Run]) -> dict[str, list[float]]:
    print(f"{title}: kept hits at {', '.join(f'{share:.1%}' for share in SHARES)} of the experts; ms a token at 25 %")
    found: dict[str, list[float]] = {}
    for run in runs:
        results = [kept(spec, parts, share, run, warm) for share in SHARES]
        found[run[0]] = [hits for hits, _ in results]
        print(f"  {run[0]:18}", *(f"{hits:.3f}" for hits, _ in results), f"  {results[1][1]:.2f}", flush=True)
    found["decayed use"] = [max(decayed(spec, parts, share, h, warm) for h in (2, 8, 32, 100)) for share in SHARES]
    print(f"  {'decayed use':18}", *(f"{hits:.3f}" for hits in found["decayed use"]), " (the best of four rates)")
    return found


@pytest.mark.parametrize("unseen", ["translation", "intent"])
def test_kept_hits(unseen: str) -> None:
    known = "intent" if unseen == "translation" else "translation"
    spec, law = sequences("law")
    other, strange = sequences(known)[1], sequences(unseen)[1]
    held_out = first_tokens(law[1::2], SCORED)
    model = counted(spec, law[::2] + other[::2])
    off: dict[str, object] = {"prefetch": False}
    runs: list[Run] = [
        ("lru", "lru", {}, None),
        ("lfu", "lfu", {}, None),
        ("lru by layer", "lru by layer", {}, None),
        ("cold", "foresight", off, None),
        ("cold by layer", "foresight by layer", off, None),
        ("warm", "foresight", off, model),
        ("warm by layer", "foresight by layer", off, model),
        ("belady", "belady", {}, None),
    ]
    inside = table(f"law and {known} trained on, law", spec, held_out, 0, runs)
    outside = table(f"{unseen} never seen", spec, first_tokens(strange, WARM + SCORED), WARM, runs)
    for found, least in ((inside, 0.5), (outside, 1 / 3)):
        rivals = ("lru", "lfu", "lru by layer")
        closed = [
            (hits - max(found[name][at] for name in rivals)) / (bound - max(found[name][at] for name in rivals))
            for at, (hits, bound) in enumerate(zip(found["warm"], found["belady"], strict=True))
        ]
        print("  of the gap from the best of lru, lfu and lru by layer to Belady:", *(f"{c:.2f}" for c in closed))
        assert closed[SHARES.index(0.25)] > least - 0.1
