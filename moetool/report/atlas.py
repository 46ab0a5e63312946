"""Atlas of experts: the tasks and tokens that choose each above average; dead and duplicate experts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from moetool.base.json_files import JsonRecord
from moetool.base.tables import TextTable, percent
from moetool.report.html_page import Section
from moetool.report.sample import SampledRoutes
from moetool.trace.reader import Trace

_TOP = 5
_LEAST_USES = 20
_SHOWN = 24
DUPLICATE = 0.5
"""Least Jaccard similarity of the tokens of duplicate experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lift:
    """A task or token that chooses an expert: its count, and its frequency relative to all tokens (lift)."""

    name: str
    uses: int
    lift: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertEntry:
    """Statistics of an expert.

    Attributes:
        layer: absolute layer.
        uses: tokens that chose it.
        tasks: tasks with a minimum share of its uses, by lift.
        tokens: tokens by lift; empty where a trace withholds token ids.
        saliency: mean over its tokens of weight times output norm (REAP); None without norms or without tokens.
    """

    layer: int
    expert: int
    uses: int
    tasks: tuple[Lift, ...]
    tokens: tuple[Lift, ...]
    saliency: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Atlas(JsonRecord):
    """All experts.

    Attributes:
        entries: by layer and number.
        dead: (layer, expert) of experts that no token chose.
        duplicates: (layer, expert, expert, Jaccard similarity of their tokens), most similar first.
    """

    entries: tuple[ExpertEntry, ...]
    dead: tuple[tuple[int, int], ...]
    duplicates: tuple[tuple[int, int, int, float], ...]


def draw_atlas(trace: Trace, routes: SampledRoutes, tokenizer: Any = None) -> Atlas:
    """Count the tasks and tokens that choose each expert, over the report's requests.

    Args:
        tokenizer: tokenizer of transformers for the text of tokens (default: the trace's text, else ids).

    Source: Lasby et al., "REAP the Experts" (2025), for the saliency.
    """
    spec = routes.spec
    named = {request: routes.tasks[task] for request, task in zip(routes.requests, routes.task_B, strict=True)}
    vocabulary = trace.vocabulary if tokenizer is None else {}
    salient = {"weights", "norms"} <= trace.columns
    tasks = list(routes.tasks)
    wanted = np.array(routes.requests)
    parts = []
    for batch in trace.batches(["weights", "norms"] if salient else ()):
        mine = batch.select(np.isin(batch.request_T, wanted))
        scaled_TS = mine.experts_TS
        if mine.weights_TS is not None and mine.norms_TS is not None:
            scaled_TS = mine.weights_TS.astype(np.float32) * mine.norms_TS.astype(np.float32)
        parts.append((mine.request_T, mine.token_id_T, mine.experts_TS, scaled_TS))
    request_T, token_T, experts_TS, scaled_TS = (np.concatenate(column) for column in zip(*parts, strict=True))
    task_T = np.array([tasks.index(named[request]) for request in request_T.tolist()])
    known = bool((token_T >= 0).all())
    words, word_T = np.unique(token_T, return_inverse=True)
    entries, dead, duplicates = [], [], []
    for place, (layer, num_experts) in enumerate(zip(spec.layer_ids_L, spec.num_experts_L, strict=True)):
        chosen_TK = experts_TS[:, routes.columns(place)].astype(np.int64)
        uses_E = np.bincount(chosen_TK.ravel(), minlength=num_experts)
        sum_E = np.bincount(chosen_TK.ravel(), scaled_TS[:, routes.columns(place)].ravel(), num_experts)
        by_task = _joint(chosen_TK, task_T, num_experts, len(tasks))
        by_word = _joint(chosen_TK, word_T, num_experts, len(words)) if known else {}
        task_share, word_share = (np.bincount(x) / len(x) for x in (task_T, word_T))
        dead += [(layer, expert) for expert in np.flatnonzero(uses_E == 0).tolist()]
        for expert, uses in enumerate(uses_E.tolist()):
            tasks_of = _lifts(by_task.get(expert), uses, task_share, 1)
            words_of = _lifts(by_word.get(expert), uses, word_share, max(2, uses // 100))
            entries.append(
                ExpertEntry(
                    layer=layer,
                    expert=expert,
                    uses=uses,
                    tasks=tuple(Lift(name=tasks[i], uses=n, lift=lift) for i, n, lift in tasks_of),
                    tokens=tuple(
                        Lift(name=_spelled(int(words[i]), tokenizer, vocabulary), uses=n, lift=lift)
                        for i, n, lift in words_of
                    ),
                    saliency=float(sum_E[expert] / uses) if salient and uses else None,
                )
            )
        duplicates += [(layer, a, b, share) for a, b, share in _alike(chosen_TK, uses_E)]
    duplicates.sort(key=lambda pair: (-pair[3], pair[:3]))
    return Atlas(entries=tuple(entries), dead=tuple(dead), duplicates=tuple(duplicates))


def _joint(chosen_TK: np.ndarray, label_T: np.ndarray, num_experts: int, num: int) -> dict[int, tuple[np.ndarray, ...]]:
    """Return labels of each used expert's tokens, with counts."""
    keys, counts = np.unique((chosen_TK * num + label_T[:, None]).ravel(), return_counts=True)
    expert_N, label_N = np.divmod(keys, num)
    edges = np.searchsorted(expert_N, np.arange(num_experts + 1))
    return {
        expert: (label_N[start:stop], counts[start:stop])
        for expert, (start, stop) in enumerate(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True))
        if stop > start
    }


def _lifts(
    found: tuple[np.ndarray, ...] | None, uses: int, share: np.ndarray, least: int
) -> list[tuple[int, int, float]]:
    if found is None or uses < _LEAST_USES:
        return []
    label_N, count_N = found
    lift_N = count_N / uses / share[label_N]
    order = [i for i in np.argsort(-lift_N, kind="stable").tolist() if count_N[i] >= least][:_TOP]
    return [(int(label_N[i]), int(count_N[i]), round(float(lift_N[i]), 3)) for i in order]


def _alike(chosen_TK: np.ndarray, uses_E: np.ndarray) -> list[tuple[int, int, float]]:
    together_EE = np.zeros((len(uses_E), len(uses_E)))
    for slot in range(chosen_TK.shape[1]):
        for other in range(slot):
            np.add.at(together_EE, (chosen_TK[:, slot], chosen_TK[:, other]), 1)
    together_EE += together_EE.T
    either_EE = uses_E[:, None] + uses_E[None] - together_EE
    share_EE = together_EE / np.maximum(either_EE, 1)
    enough_E = uses_E >= _LEAST_USES
    pairs = np.argwhere(np.triu(share_EE >= DUPLICATE, 1) & enough_E[:, None] & enough_E[None])
    return [(a, b, round(float(share_EE[a, b]), 4)) for a, b in pairs.tolist()]


def _spelled(token: int, tokenizer: Any, vocabulary: Mapping[int, str]) -> str:
    text = tokenizer.decode([token]) if tokenizer is not None else vocabulary.get(token)
    return str(token) if text is None else repr(text)[1:-1]


def atlas_section(atlas: Atlas) -> Section:
    """Return the section of specialised, dead and duplicate experts."""
    used = [entry for entry in atlas.entries if entry.tasks]
    shown = sorted(used, key=lambda entry: -max(lift.lift for lift in entry.tasks))[:_SHOWN]
    dead = ", ".join(f"{layer}/{expert}" for layer, expert in atlas.dead[:_SHOWN])
    pairs = ", ".join(f"{a}/{b} and {a}/{c}" for a, b, c, _ in atlas.duplicates[:_TOP])
    notes = [
        f"{len(atlas.dead):,} of {len(atlas.entries):,} experts were never chosen{dead and f': {dead}'}.",
        f"{len(atlas.duplicates):,} pairs of a layer's experts share at least {percent(DUPLICATE, '.0f')} of their "
        f"tokens{pairs and f': {pairs}'}.",
    ]
    rows = tuple(
        (f"{one.layer} / {one.expert}", _listed(one.tasks), _listed(one.tokens, "␣") or "withheld", f"{one.uses:,}")
        for one in shown
    )
    columns = ("layer / expert", "tasks (times the average)", "tokens (times the average)", "uses")
    tables = [TextTable(title="Most specialised experts", columns=columns, rows=rows, num_text=3)] if rows else []
    scored = _by_saliency(atlas)
    if scored:
        notes.append(
            "Saliency is the mean over an expert's tokens of its weight times the norm of its output (REAP): "
            "pruning experts of low saliency changes the layer's output least."
        )
        tables.append(
            TextTable(
                title="Least salient experts",
                columns=("layer / expert", "uses", "saliency", "/ layer mean"),
                rows=tuple(
                    (f"{one.layer} / {one.expert}", f"{one.uses:,}", f"{one.saliency:.4g}", f"{share:.2f}")
                    for share, one in scored[:_SHOWN]
                ),
            )
        )
    return Section(name="Experts", notes=notes, tables=tables)


def _by_saliency(atlas: Atlas) -> list[tuple[float, ExpertEntry]]:
    """Return (saliency / layer's mean, expert), the least salient first."""
    layers: dict[int, list[ExpertEntry]] = {}
    for one in atlas.entries:
        if one.saliency is not None:
            layers.setdefault(one.layer, []).append(one)
    means = {layer: float(np.mean([one.saliency for one in found])) for layer, found in layers.items()}
    shares = [((one.saliency or 0.0) / means[layer], one) for layer, found in layers.items() for one in found]
    return sorted(shares, key=lambda pair: pair[0])


def _listed(lifts: tuple[Lift, ...], space: str = " ") -> str:
    """List the lifts above the average."""
    return ", ".join(f"{lift.name.replace(' ', space)} {lift.lift:.1f}x" for lift in lifts[:3] if lift.lift > 1)
