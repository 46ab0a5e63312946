"""Findings about caching, prediction and placement, as computed sentences.

Each sentence holds its numbers and its rule. `moetool.report.advice_page` covers best policies, pinning, prefetching
and hot experts across tasks, with held-out evidence.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from moetool.json_files import JsonRecord
from moetool.report.trace_measures import TraceMeasures
from moetool.tables import percent

FEW_USES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding(JsonRecord):
    """One finding.

    Attributes:
        topic: `caching`, `prediction` or `placement`.
        text: numbers and conclusion.
        rule: threshold of the conclusion.
    """

    topic: str
    text: str
    rule: str


def findings(made: TraceMeasures) -> list[Finding]:
    """Return findings about this trace, by topic."""
    rules: tuple[Callable[[TraceMeasures], Finding | None], ...]
    rules = (_distances, _prompts, _repeats, _levels, _router, _hottest, _layers)
    return [finding for rule in rules if (finding := rule(made)) is not None]


def caveat(made: TraceMeasures) -> str | None:
    """Return a warning if the trace has too few tokens."""
    tokens, spec = len(made.routes.experts_TS), made.routes.spec
    uses = min(tokens * top_k / num for top_k, num in zip(spec.top_k_L, spec.num_experts_L, strict=True))
    if uses >= FEW_USES:
        return None
    return (
        f"Few tokens: an expert was chosen {uses:.1f} times on average; below {FEW_USES} times the numbers say "
        f"little about other requests. Capture more first."
    )


def _distances(made: TraceMeasures) -> Finding | None:
    reuse, total = made.reuse, made.routes.spec.total_experts
    half, most = reuse.slots_for(0.5), reuse.slots_for(0.9)
    if half is None or most is None:
        return None
    text = (
        f"Half of the reuses are within {half:,} distinct experts and 90 % within {most:,}, which is "
        f"{percent(most / total, '.0f')} of the model's {total:,}. "
    )
    if most > total / 2:
        text += "Reuse distances are long: an LRU pool needs most of the model to serve well."
    else:
        text += "Reuse distances are short: an LRU pool of less than half of the experts serves well."
    return Finding(topic="caching", text=text, rule="long: 90 % of the reuses need more than half of all experts")


def _prompts(made: TraceMeasures) -> Finding | None:
    share, tokens = made.reuse.prompt_share, made.reuse.prompt_tokens
    if share is None or tokens is None or tokens < 2:
        return None
    text = f"A forward with prompt tokens (median {tokens:,}) needs {percent(share, '.0f')} of each layer's experts. "
    if share > 0.5:
        text += "Prompts load most of the model: prefetch whole layers, as moesys does, and compare caches in decode."
    else:
        text += "Prompts need a part of each layer: a cache pays there too."
    return Finding(topic="caching", text=text, rule="most: more than half of the experts")


def _repeats(made: TraceMeasures) -> Finding | None:
    repeat = made.affinity.repeat_L
    if np.isnan(repeat).all():
        return None
    spec = made.routes.spec
    chance = float(np.mean([k / e for k, e in zip(spec.top_k_L, spec.num_experts_L, strict=True)]))
    mean = float(np.nanmean(repeat))
    text = (
        f"A token shares {percent(mean, '.0f')} of its experts with the previous token in the same layer, against "
        f"{percent(chance, '.0f')} by chance. "
    )
    text += (
        "Recent tokens predict the next token's experts well."
        if mean >= 2 * chance
        else "Recent tokens predict the next token's experts poorly."
    )
    return Finding(topic="prediction", text=text, rule="good from twice chance")


def _levels(made: TraceMeasures) -> Finding | None:
    found, spec = made.spread, made.routes.spec
    if np.isnan(found.request_QL).all():
        return None
    bits, even = float(np.nanmean(found.request_QL)), float(np.mean(np.log2(spec.num_experts_L)))
    lengths = np.array([len(made.routes.steps(request)) for request in range(len(made.routes.requests))])
    text = (
        f"A request (median {int(np.median(lengths)):,} tokens) effectively uses {2**bits:.0f} of the {2**even:.0f} "
        f"experts of a layer (entropy {bits:.1f} bits); one token uses {2 ** found.token_L.mean():.0f}. "
    )
    if bits > 0.9 * even:
        text += "Summed over a request, expert use is nearly uniform: predict from iterations, not from requests."
    else:
        text += "A request uses a subset of the experts: its own history (activation matrices) helps prediction."
    return Finding(topic="prediction", text=text, rule="nearly even: above 90 % of log2 E bits")


def _router(made: TraceMeasures) -> Finding | None:
    if made.router is None or np.isnan(made.router.token_QL).all():
        return None
    fine, coarse = float(np.nanmean(made.router.token_QL)), float(np.nanmean(made.router.request_QL))
    text = (
        f"Router probabilities have an entropy of {fine:.1f} bits for a token, {coarse:.1f} for the mean of a request. "
    )
    if coarse - fine >= 0.5:
        text += "Iterations are sharper than requests, as FineMoE finds: predict from maps of iterations (finemoe)."
    else:
        text += "Iterations are hardly sharper than requests: maps of iterations (finemoe) add little."
    return Finding(topic="prediction", text=text, rule="sharper from half a bit")


def _hottest(made: TraceMeasures) -> Finding:
    found, spec = made.popularity, made.routes.spec
    median, layer = float(np.median(found.uneven_L)), int(found.uneven_L.argmax())
    text = (
        f"In the median layer the most used expert has {median:.1f} times the mean load; "
        f"{found.uneven_L[layer]:.1f} times in layer {spec.layer_ids_L[layer]}. The median Gini coefficient is "
        f"{np.median(found.gini_L):.2f}. "
    )
    if median >= 2:
        text += "It is the bottleneck of expert parallelism: replicate it (redundant, eplb)."
    else:
        text += "Load is nearly balanced: replicas gain little."
    return Finding(topic="placement", text=text, rule="replicas from twice the mean")


def _layers(made: TraceMeasures) -> Finding | None:
    spec = made.routes.spec
    if spec.num_layers < 2:
        return None
    effective_L = 2.0**made.popularity.bits_L
    low, high = int(effective_L.argmin()), int(effective_L.argmax())
    ratio = effective_L[high] / effective_L[low]
    text = (
        f"Layer {spec.layer_ids_L[low]} effectively uses {effective_L[low]:.0f} experts, "
        f"{effective_L[high]:.0f} in layer {spec.layer_ids_L[high]}. "
    )
    if ratio >= 1.25:
        text += "A placement should give layers different shares of memory (prism does)."
    else:
        text += "A placement may give every layer the same memory."
    return Finding(topic="placement", text=text, rule="different from a ratio of 1.25")
