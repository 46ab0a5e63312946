"""Advice as tables of questions and of memory sizes, and as the first section of a trace's page."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from moetool.base import tables
from moetool.base.json_files import JsonRecord
from moetool.base.tables import TextTable
from moetool.caching.layer_slots import policy_label
from moetool.report.html_page import Section, render_page
from moetool.tuning.advice import Advice, MemoryLine
from moetool.tuning.advice_counts import HOT_SHARE

_NEAR_POINTS = 0.10
_PAYS = 1.05
_STABLE = 0.05
_LEGEND = (
    "pool: one for all layers, or layer: equal slots per layer",
    "hit rate: share of needed experts that were resident, from an empty pool; Belady: the bound without prefetching",
    "pinned: the most used experts stay resident; first loads are not counted, so it may exceed Belady",
    "loads/token: experts loaded on demand by the best policy (by Belady)",
    "prefetching: speed-up of a token by prefetching over that link (below 1: slower)",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer(JsonRecord):
    """One line of advice: a question, its answer and its evidence."""

    question: str
    answer: str
    evidence: str


def answers(advice: Advice) -> list[Answer]:
    """Return the answers in the order of a user's questions."""
    found = [_cache(advice), _distance(advice), *_prefetch(advice), _pinning(advice), *_stability(advice)]
    found += _placements(advice)
    return [one for one in found if one is not None]


def _where(advice: Advice, *, replayed: bool = False) -> str:
    requests = advice.replayed_on if replayed else advice.scored_on
    if advice.replay_held_out or (advice.held_out and not replayed and advice.replayed_on is None):
        return f"on {requests}, not used for choosing"
    if advice.held_out and not replayed:
        return f"on the later half of {requests}, chosen on the earlier one"
    return f"on {requests}, the same as chosen on"


def _cache(advice: Advice) -> Answer | None:
    known = [line for line in advice.lines if line.hit_rate is not None]
    if not known:
        return None
    hits: dict[str, list[str]] = {}
    for line in known:
        hits.setdefault(policy_label(line.policy or "", line.pool), []).append(
            f"{_percent(line.hit_rate)} at {_share(line)}"
        )
    parts = [f"{name} hits {', '.join(rates)}" for name, rates in hits.items()]
    return Answer(question="Which cache policy?", answer="; ".join(parts), evidence=_where(advice, replayed=True))


def _distance(advice: Advice) -> Answer | None:
    known = [line for line in advice.lines if line.hit_rate is not None]
    gaps = [(line.bound - (line.hit_rate or 0.0), line) for line in known if line.bound is not None]
    if not gaps:
        return None
    most, line = max(gaps, key=lambda gap: gap[0])
    verdict = "a better eviction policy can gain little"
    if most > _NEAR_POINTS:
        tried = {policy_label("foresight", form) for form in ("one", "layer")} & set(line.rows)
        verdict = "a trained predictor may close part of it" if tried else "try --policy foresight, which predicts"
    return Answer(
        question="How far from the best possible?",
        answer=f"at most {100 * most:.1f} points of hit rate below Belady, at {_share(line)}: {verdict}",
        evidence=f"threshold: {100 * _NEAR_POINTS:.0f} points; {_where(advice, replayed=True)}",
    )


def _prefetch(advice: Advice) -> list[Answer]:
    found = []
    for place in range(max((len(line.prefetch) for line in advice.lines), default=0)):
        lines = [line for line in advice.lines if len(line.prefetch) > place]
        link = lines[0].prefetch[place]
        paying = [line for line in lines if round(line.prefetch[place].gain, 2) >= _PAYS]  # as printed
        gains = ", ".join(f"{line.prefetch[place].gain:.2f}x at {_share(line)}" for line in lines)
        recalls = [line.lookahead.recall for line in lines if line.lookahead is not None]
        tokens = max(line.lookahead.tokens for line in lines if line.lookahead is not None)
        found.append(
            Answer(
                question="Does prefetching by affinity alone pay over "
                f"{link.link} ({tables.count(link.bytes_s, 'B')}/s)?",
                answer=(f"yes at {', '.join(map(_share, paying))}" if paying else "no") + f": {gains}",
                evidence=(
                    f"pays from {_PAYS:.2f}x; affinity predicts {_percent(min(recalls))} to {_percent(max(recalls))} "
                    f"of the misses of an LRU pool, on {tokens:,} held-out tokens"
                    if advice.replay_held_out
                    else f"pays from {_PAYS:.2f}x; on the tokens of the affinity counts"
                ),
            )
        )
    return found


def _pinning(advice: Advice) -> Answer:
    parts = ", ".join(f"{_percent(line.pinned)} at {_share(line)}" for line in advice.lines)
    known = [line for line in advice.lines if line.hit_rate is not None]
    better = [line for line in known if line.pinned > (line.hit_rate or 0.0) and line.share < 1]
    verdict = "no, the best policy hits more at every size: " if known else "it hits "
    if better:
        verdict = f"it hits more than the best policy at {', '.join(map(_share, better))}: "
    return Answer(
        question="Is pinning the most used experts enough?", answer=f"{verdict}{parts}", evidence=_where(advice)
    )


def _stability(advice: Advice) -> list[Answer]:
    found, share = advice.stability, f"the {tables.percent(HOT_SHARE, '.0f')} hottest experts"
    requests = Answer(
        question="Do hot experts stay hot on other requests?",
        answer=f"{'yes' if found.same - found.own <= _STABLE else 'in part'}: {share} of one half take "
        f"{_percent(found.own)} of the other",
        evidence=f"{_percent(found.same)} of their own half; stable within {100 * _STABLE:.0f} points",
    )
    tasks = Answer(
        question="Do hot experts stay hot in another task?",
        answer=f"{'yes' if found.own - found.other <= _STABLE else 'no'}: {share} of a task take "
        f"{_percent(found.other)} of another's",
        evidence=f"{_percent(found.own)} of other requests of their task; {_percent(HOT_SHARE)} with even use",
    )
    shares = ((requests, found.own), (tasks, found.other))
    return [answer for answer, share_of_other in shares if not math.isnan(share_of_other)]


def _placements(advice: Advice) -> list[Answer]:
    return [
        Answer(
            question=f"What does a planned placement gain ({gain.planner})?",
            answer=f"{gain.measure}: {gain.planned:.3f} against {gain.even:.3f} ({gain.baseline})",
            evidence=_where(advice),
        )
        for gain in advice.placements
    ]


def memory_table(advice: Advice) -> TextTable:
    """Return a table with a row for each memory size."""
    columns: dict[str, Callable[[MemoryLine], str]] = {
        "memory": lambda line: _share(line) + (f" ({tables.count(line.budget_bytes, 'B')})" if advice.sized else ""),
        "best policy": lambda line: line.policy or "-",
        "pool": lambda line: line.pool if line.policy else "-",
        "slots": lambda line: f"{line.slots:,}",
        "hit rate": lambda line: _percent(line.hit_rate),
        "Belady": lambda line: _percent(line.bound),
        "pinned": lambda line: _percent(line.pinned),
        "loads/token": lambda line: "-" if line.loads is None else f"{line.loads:.1f} ({line.bound_loads:.1f})",
        "prefetching": lambda line: ", ".join(f"{link.link} {link.gain:.2f}x" for link in line.prefetch) or "-",
    }
    return tables.table_of("By memory for experts", advice.lines, columns, notes=_LEGEND)


def policy_table(advice: Advice) -> TextTable | None:
    """Return a table of hit rates, a row for each replayed policy; None without any."""
    known = [line for line in advice.lines if line.rows]
    if not known:
        return None
    names = list(dict.fromkeys(name for line in known for name in line.rows))
    rows = tuple((name, *(_percent(line.rows.get(name)) for line in known)) for name in names)
    return TextTable(title="Hit rate by memory for experts", columns=("policy", *map(_share, known)), rows=rows)


def section(advice: Advice) -> Section:
    return Section(
        name="Advice",
        notes=[
            f"Chosen on {advice.chosen_on}, scored {_where(advice)}."
            + (
                f" Policies were replayed on {advice.replayed_on} of these, from an empty pool."
                if advice.replayed_on
                else ""
            ),
            *advice.unknown,
        ],
        tables=[
            TextTable(
                title="Answers",
                num_text=3,
                columns=("question", "answer", "evidence"),
                rows=[(one.question, one.answer, one.evidence) for one in answers(advice)],
            ),
            memory_table(advice),
            *([policies] if (policies := policy_table(advice)) else []),
        ],
    )


def page(advice: Advice, source: str) -> str:
    """Return the page of `moetool advise --out`."""
    return render_page(
        title=f"Advice for {advice.model}",
        heading=f"Caching, prefetching and placing the experts of {advice.model}",
        shape=advice.shape,
        facts=[("source", source), ("chosen on", advice.chosen_on), ("scored on", advice.scored_on)],
        sections=[section(advice)],
    )


def _share(line: MemoryLine) -> str:
    return tables.percent(line.share, ".4g")


def _percent(rate: float | None) -> str:
    return "-" if rate is None else tables.percent(rate)
