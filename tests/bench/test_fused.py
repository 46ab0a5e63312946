"""Fused and its parts on routes of DeepSeek-V2-Lite, on tasks that were trained on and on one that was not.

    python -m pytest tests/bench/test_fused.py -s

Trained on every other sequence of two tasks; of the others one in ten decides when to stop and the rest are scored,
and so is translation, token by token and sequence after sequence. Three ways: as it was fitted; remembering the
request at hand; and going on learning from all it was asked. MOETOOL_SCORED cuts the tokens that are scored.
"""

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from moetool.evaluation.evaluate import DISTANCES, Tally
from moetool.formats._model_facts import ModelFacts
from moetool.formats.topk_parquet import read_routes
from moetool.learning import fitting
from moetool.learning.fit_options import FitOptions
from moetool.learning.path_signals import SIGNALS
from moetool.learning.predictor import Predictor, build
from moetool.learning.tokens import Tokens
from moetool.types import ForwardInfo, GateEvent, ModelSpec

SHARED = Path(os.environ.get("MOETOOL_SHARED", Path(__file__).parents[2].parent / "shared"))
ROUTES = SHARED / "data" / "routes" / "deepseek_v2_lite"
SCORED = int(os.environ.get("MOETOOL_SCORED", "10000"))
WARM = 500

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not ROUTES.is_dir(), reason="shared/data/routes is not here")]

Sequences = list[tuple[np.ndarray, np.ndarray]]


def sequences(task: str) -> tuple[ModelSpec, Sequences]:
    """The spec, and experts and weights [T, L, K] of each sequence."""
    routes = read_routes(ROUTES / f"{task}.parquet", ModelFacts())
    shape = (-1, routes.spec.num_layers, routes.spec.top_k_L[0])
    return routes.spec, [
        (s.experts_TS.astype(np.int64).reshape(shape), s.weights_TS.astype(np.float32).reshape(shape))
        for s in routes.sequences
    ]


def as_tokens(parts: Sequences, first: int) -> Tokens:
    """Whole requests, numbered from `first`, one new token after the other."""
    lengths = [len(experts) for experts, _ in parts]
    return Tokens(
        experts_TPK=torch.from_numpy(np.concatenate([experts for experts, _ in parts]).astype(np.int16)),
        weights_TPK=torch.from_numpy(np.concatenate([weights for _, weights in parts])).half(),
        request_T=torch.arange(first, first + len(parts)).repeat_interleave(torch.tensor(lengths)),
        iteration_T=torch.cat([torch.arange(length) for length in lengths]),
    )


def trained(name: str, spec: ModelSpec, train: Sequences, validation: Sequences, folder: Path) -> Predictor:
    """`moetool train` in batches of 64, but on these sequences."""
    torch.manual_seed(0)
    began, spent = time.perf_counter(), time.process_time()
    model = build(name, spec)
    parts = [as_tokens(train, 0), as_tokens(validation, len(train))]
    model.count(parts[0])
    prepared = [model.prepare(part) for part in parts]
    counted = time.process_time() - spent
    fit = fitting.fit(
        model,
        *prepared,
        FitOptions(max_epochs=10, batch_size=64),
        seed=0,
        folder=folder,
    )
    print(
        f"\n{name}: {fit['tokens']:,} tokens, {sum(p.numel() for p in model.parameters()):,} parameters, "
        f"{time.perf_counter() - began:.0f} s ({time.process_time() - spent:.0f} s of processor time, {counted:.0f} of "
        f"them before fitting); validation {fit['validation_loss']}",
        flush=True,
    )
    return model.eval().requires_grad_(False)


def forwards(parts: Sequences, most: int) -> Iterator[list[GateEvent]]:
    """One token a forward, one sequence after the other."""
    number = 0
    for request, (experts_TLK, weights_TLK) in enumerate(parts):
        for token in range(min(len(experts_TLK), most - number)):
            info = ForwardInfo(forward_id=number, request_T=(request,), phase_T=(1,), position_T=(token,))
            yield [
                GateEvent(
                    forward=info, layer=layer, experts_TK=(tuple(experts_K.tolist()),), weights_TK=weights_K[None]
                )
                for layer, (experts_K, weights_K) in enumerate(zip(experts_TLK[token], weights_TLK[token], strict=True))
            ]
            number += 1


def score(model: Predictor, way: str, parts: Sequences, most: int) -> dict[str, list[list[float]]]:
    """By name, matches [T, D] of `fused` and, if it goes on learning, of each signal alone."""
    names = ["fused", *(SIGNALS[1:] if way == "learning" else ())]
    found: dict[str, list[list[float]]] = {name: [] for name in names}
    seconds = spent = 0.0
    model.path = None
    if way == "as fitted":
        model.options = replace(model.options, recent=0, haste=0.0)
    num_layers, top_k = model.num_layers, model.top_k
    tally = Tally(model, DISTANCES)
    phase_T = torch.ones(1, dtype=torch.int64)
    for events in forwards(parts, most):
        if way != "learning" and events[0].forward.position_T[0] == 0:
            model.path = None
        hits = {name: np.zeros((len(DISTANCES), 2)) for name in names}
        for event in events:
            began = time.process_time()
            model.observe(event)
            if event.layer + 1 < num_layers:
                model.scores(event.layer + 1)
            seconds += time.process_time() - began
            for place, distance in enumerate(DISTANCES):
                if (layer := event.layer + distance) < num_layers:
                    said = {"fused": model.scores(layer)[0]}
                    if way == "learning":
                        f_ES = model.path.computed[layer][0][0]
                        said |= {name: f_ES[:, s] for s, name in enumerate(SIGNALS) if s}
                    true = events[layer].experts_TK[0]
                    tally.count(distance, layer, torch.tensor(said["fused"][None]), torch.tensor([true]), phase_T)
                    for name, score_E in said.items():
                        best = np.argsort(-score_E, kind="stable")[:top_k]
                        hits[name][place] += len(set(true) & set(best.tolist())), top_k
        for name in names:
            found[name].append((hits[name][:, 0] / hits[name][:, 1]).tolist())
        spent += 1
    errors = {s.distance: s.calibration_error for s in tally.scores() if s.layer is None and s.phase == "all"}
    print(f"  {way}: {1e3 * seconds / spent:.1f} ms a token; calibration error", *(f"{e:.4f}" for e in errors.values()))
    return found


def show(title: str, found: dict[str, list[list[float]]], start: int = 0) -> dict[str, np.ndarray]:
    means = {name: np.mean(matches[start:], axis=0) for name, matches in found.items()}
    for name, mean_D in means.items():
        print(f"  {title:28} {name:11}", *(f"{match:.3f}" for match in mean_D), flush=True)
    return means


def test_match(tmp_path: Path) -> None:
    tasks = [sequences(task) for task in ("intent", "law")]
    spec, strange = sequences("translation")
    train = [part for _, parts in tasks for part in parts[::2]]
    others = [part for _, parts in tasks for part in parts[1::2]]
    stop = others[::10]
    known = [part for number, part in enumerate(others) if number % 10]
    if SCORED < 8000:
        known = known[:: 8000 // SCORED]
    model = trained("fused", spec, train, stop, tmp_path)
    if path := os.environ.get("MOETOOL_MODEL"):
        torch.save(model.state_dict(), path)
    print("top-6 match at distances", *DISTANCES)
    for title, parts in (("trained on", known), ("never seen", strange)):
        for way in ("as fitted", "remembering", "learning"):
            options = model.options
            found = score(model, way, parts, SCORED)
            model.options = options
            means = show(f"{title}, {way}", found)
        show(f"{title}, after {WARM} tokens", {"fused": found["fused"]}, WARM)
        for name in SIGNALS[1:]:
            assert (means["fused"] >= means[name]).all(), name
