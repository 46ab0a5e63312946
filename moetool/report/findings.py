"""What the measures mean for caching, prediction and placement, in sentences that are computed.

Each sentence holds the numbers that it rests on, and the rule by which it was chosen over its opposite.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from moetool.report.measures import SHARES
from moetool.report.trace_measures import BOUND, TraceMeasures
from moetool.tuning.replay import ReplayRow

TOPICS = ("caching", "prediction", "placement")
FEW_USES = 20
_QUARTER = SHARES.index(0.25)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that the numbers say.

    Attributes:
        topic: one of `TOPICS`.
        text: the numbers, and what follows.
        rule: the threshold that decided what follows.
    """

    topic: str
    text: str
    rule: str

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(self)


def findings(made: TraceMeasures) -> list[Finding]:
    """All that can be said of this trace, by topic."""
    looks: tuple[Callable[[TraceMeasures], Finding | None], ...] = (
        _headroom,
        _recency_or_frequency,
        _distances,
        _frequency,
        _prompts,
        _affinity,
        _repeats,
        _levels,
        _router,
        _tasks,
        _hottest,
        _layers,
    )
    return [finding for look in looks if (finding := look(made)) is not None]


def caveat(made: TraceMeasures) -> str | None:
    """Says that there is too little to count, if so."""
    tokens, spec = len(made.routes.experts_TS), made.routes.spec
    uses = min(tokens * top_k / num for top_k, num in zip(spec.top_k_L, spec.num_experts_L, strict=True))
    if uses >= FEW_USES:
        return None
    return (
        f"Few tokens: an expert was chosen {uses:.1f} times on average, and below {FEW_USES} times numbers say little "
        f"of other requests. Capture more before deciding by them."
    )


def _headroom(made: TraceMeasures) -> Finding:
    budget = _near_quarter(made)
    rows = {row.policy: row for row in made.rows if row.budget_bytes == budget}
    bound = rows.pop(BOUND)
    share = f"{100 * budget / made.whole_bytes:.4g} % of the experts ({bound.slots:,} slots)"
    if not rows:
        text = f"With room for {share}, {BOUND} hits {_percent(bound)}; none that loads on demand makes fewer loads."
        return Finding(topic="caching", text=text, rule="one policy was replayed, and it is the bound")
    best = max(rows.values(), key=lambda row: row.counts.hit_rate)
    points = 100 * (bound.counts.hit_rate - best.counts.hit_rate)
    each = ", ".join(f"{name} {_percent(row)}" for name, row in rows.items())
    text = f"With room for {share}, the hit rates are {each}, and {BOUND}, which knows the future, {_percent(bound)}. "
    if points > 10:
        text += (
            f"{best.policy} leaves {points:.1f} points to gain: policies that foresee more than they have seen "
            f"(foresight, or one with a predictor) are worth replaying."
        )
    else:
        text += f"{best.policy} leaves {points:.1f} points: keeping experts more cleverly can gain little here."
    return Finding(topic="caching", text=text, rule="worth it from 10 points below the bound")


def _recency_or_frequency(made: TraceMeasures) -> Finding | None:
    rows = {(row.policy, row.budget_bytes): row.counts.hit_rate for row in made.rows}
    budgets = sorted({row.budget_bytes for row in made.rows})
    if not {("lru", budgets[0]), ("lfu", budgets[0])} <= rows.keys():
        return None
    ahead = {"lru": [], "lfu": [], "neither": []}  # type: dict[str, list[str]]
    for budget in budgets:
        points = 100 * (rows["lru", budget] - rows["lfu", budget])
        leader = "lru" if points > 1 else "lfu" if points < -1 else "neither"
        ahead[leader].append(f"{100 * budget / made.whole_bytes:.4g}")
    parts = [f"{name} leads at {_listed(shares)} % of the memory" for name, shares in ahead.items() if shares]
    text = f"Recent use against frequent use: {'; '.join(parts)}. "
    if ahead["lru"] and ahead["lfu"]:
        text += "Which of the two to take depends on the memory; a policy that weighs both is worth a try."
    elif ahead["lru"] or ahead["lfu"]:
        text += "What was used last tells more." if ahead["lru"] else "What was used often tells more."
    else:
        text += "They tell the same."
    return Finding(topic="caching", text=text, rule="a lead of more than 1 point of hit rate counts")


def _distances(made: TraceMeasures) -> Finding | None:
    reuse, total = made.reuse, made.routes.spec.total_experts
    half, most = reuse.slots_for(0.5), reuse.slots_for(0.9)
    if half is None or most is None:
        return None
    text = (
        f"Half of the reuses come back within {half:,} distinct experts and 90 % within {most:,}, which is "
        f"{percent(most / total)} of the model's {total:,}. "
    )
    if most > total / 2:
        text += "Reuse is far apart: an LRU pool must hold most of the model before it serves well."
    else:
        text += "Reuse is near: an LRU pool of less than half of the experts serves well."
    return Finding(topic="caching", text=text, rule="far: 90 % of the reuses need more than half of all experts")


def _frequency(made: TraceMeasures) -> Finding:
    covered = made.coverage.mixed[_QUARTER]
    text = (
        f"The 25 % most used experts of each layer take {percent(covered)} of the choices of "
        f"{made.routes.others}, on which they were not counted (25 % if use were even). "
    )
    if covered >= 0.5:
        text += "Pinning popular experts is a sound start."
    elif covered >= 0.325:
        text += "Popularity helps some; a fixed set of experts is a weak cache."
    else:
        text += "Popularity hardly tells experts apart; a fixed set serves little better than any other."
    return Finding(topic="caching", text=text, rule="sound from twice the even share, some help from 1.3 times")


def _prompts(made: TraceMeasures) -> Finding | None:
    share, tokens = made.reuse.prompt_share, made.reuse.prompt_tokens
    if share is None or tokens is None or tokens < 2:
        return None
    text = f"A forward with prompt tokens (median {tokens:,}) needs {percent(share)} of each layer's experts. "
    if share > 0.5:
        text += "Prompts load most of the model: read whole layers ahead, as moesys does, and judge caches by decoding."
    else:
        text += "Prompts need a part of each layer: loading on demand, and a cache, pay there too."
    return Finding(topic="caching", text=text, rule="most: more than half of the experts")


def _affinity(made: TraceMeasures) -> Finding | None:
    found = made.affinity
    if not len(found.match_M) or np.isnan(found.match_M).all():
        return None
    match, popular, chance = (float(np.nanmean(x)) for x in (found.match_M, found.popular_M, found.chance_M))
    text = (
        f"Affinity to the experts just chosen finds {percent(match)} of the next layer's on "
        f"{made.routes.others}, popularity {percent(popular)}, chance {percent(chance)}. "
    )
    if match - popular >= 0.1:
        text += "The path tells what comes: prefetching by it (duoserve, foresight, a trained predictor) can pay."
    else:
        text += "The path adds little to popularity: prefetching by affinity will mostly load what is not needed."
    return Finding(topic="prediction", text=text, rule="pays from 10 points above popularity")


def _repeats(made: TraceMeasures) -> Finding | None:
    repeat = made.affinity.repeat_L
    if np.isnan(repeat).all():
        return None
    spec = made.routes.spec
    chance = float(np.mean([k / e for k, e in zip(spec.top_k_L, spec.num_experts_L, strict=True)]))
    mean = float(np.nanmean(repeat))
    text = (
        f"A token uses {percent(mean)} of the experts that the token before it used in the same layer, against "
        f"{percent(chance)} by chance. "
    )
    text += (
        "The last tokens are a good guess of the next one's experts."
        if mean >= 2 * chance
        else "The last tokens say little of the next one's experts."
    )
    return Finding(topic="prediction", text=text, rule="good from twice chance")


def _levels(made: TraceMeasures) -> Finding | None:
    found, spec = made.spread, made.routes.spec
    if np.isnan(found.request_QL).all():
        return None
    bits, even = float(np.nanmean(found.request_QL)), float(np.mean(np.log2(spec.num_experts_L)))
    lengths = np.array([len(made.routes.steps(request)) for request in range(len(made.routes.requests))])
    text = (
        f"A request (median {int(np.median(lengths)):,} tokens counted) spreads over as many experts of a layer as "
        f"{2**bits:.0f} of {2**even:.0f} used alike ({bits:.1f} bits); one token uses {2 ** found.token_L.mean():.0f}. "
    )
    if bits > 0.9 * even:
        text += "Added up over a request the pattern is nearly even: predict from iterations, not from requests."
    else:
        text += "A request keeps to a part of the experts: its own past (activation matrices) narrows the choice."
    return Finding(topic="prediction", text=text, rule="nearly even: above 90 % of log2 E bits")


def _router(made: TraceMeasures) -> Finding | None:
    if made.router is None or np.isnan(made.router.token_QL).all():
        return None
    fine, coarse = float(np.nanmean(made.router.token_QL)), float(np.nanmean(made.router.request_QL))
    text = f"The routers' probabilities have {fine:.1f} bits for a token and {coarse:.1f} for the mean over a request. "
    if coarse - fine >= 0.5:
        text += "Iterations are sharper than requests, as FineMoE finds: maps of iterations hold what requests blur."
    else:
        text += "Iterations are hardly sharper than requests: maps of iterations (finemoe) hold little more."
    return Finding(topic="prediction", text=text, rule="sharper from half a bit")


def _tasks(made: TraceMeasures) -> Finding:
    found = made.coverage
    rule = "its own placement from 5 points; blind within 5 points of the even share"
    if not found.other:
        text = "The trace has one task, so it cannot say whether another one would want other experts."
        return Finding(topic="placement", text=text, rule="two tasks are needed")
    own, other, mixed = (part[_QUARTER] for part in (found.own, found.other, found.mixed))
    text = (
        f"The 25 % most used experts of a task take {percent(own)} of its other requests' choices, "
        f"{percent(other)} of another task's, and those of all tasks together {percent(mixed)}. "
    )
    if own - mixed >= 0.05:
        text += "Tasks want experts of their own: a server for one task should hold that task's"
    else:
        text += "One placement serves all tasks about as well as one for each"
    if abs(other - 0.25) <= 0.05:
        text += ", and a placement made for another task is as good as blind."
    elif other < 0.25:
        text += ", and a placement made for another task is worse than a blind one."
    else:
        text += "; what one task uses is of some use to another."
    return Finding(topic="placement", text=text, rule=rule)


def _hottest(made: TraceMeasures) -> Finding:
    found, spec = made.popularity, made.routes.spec
    median, layer = float(np.median(found.uneven_L)), int(found.uneven_L.argmax())
    text = (
        f"The most used expert has {median:.1f} times the mean of its layer in the median layer, and "
        f"{found.uneven_L[layer]:.1f} times in layer {spec.layer_ids_L[layer]}; the median Gini coefficient is "
        f"{np.median(found.gini_L):.2f}. "
    )
    if median >= 2:
        text += "With experts spread over GPUs one by one, the busiest would wait on it: copy it (redundant, eplb)."
    else:
        text += "Loads are near even: copies of experts buy little balance."
    return Finding(topic="placement", text=text, rule="copies from twice the mean")


def _layers(made: TraceMeasures) -> Finding | None:
    spec = made.routes.spec
    if spec.num_layers < 2:
        return None
    effective_L = 2.0**made.popularity.bits_L
    low, high = int(effective_L.argmin()), int(effective_L.argmax())
    ratio = effective_L[high] / effective_L[low]
    text = (
        f"Layer {spec.layer_ids_L[low]} uses as many experts as {effective_L[low]:.0f} used alike, layer "
        f"{spec.layer_ids_L[high]} {effective_L[high]:.0f}. "
    )
    if ratio >= 1.25:
        text += "Share memory out by layers (prism, or one pool for all), not alike."
    else:
        text += "Layers are alike: the same memory for each costs little."
    return Finding(topic="placement", text=text, rule="by layers from a ratio of 1.25")


def _near_quarter(made: TraceMeasures) -> int:
    """The replayed budget that is nearest to a quarter of all experts."""
    return min(sorted({row.budget_bytes for row in made.rows}), key=lambda budget: abs(budget - made.whole_bytes / 4))


def _percent(row: ReplayRow) -> str:
    return f"{100 * row.counts.hit_rate:.1f} %"


def percent(share: float) -> str:
    """A share as whole percent."""
    return f"{100 * share:.0f} %"


def _listed(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
