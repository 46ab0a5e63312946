"""Speculative decoding with offloaded experts, priced by replay: one load serves all tokens of a verification."""

import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moetool.bench.bench_result import BenchResult, Row, recorded, table
from moetool.caching._policy import build_policy
from moetool.caching._residency import Counts, Residency
from moetool.errors import UsageError
from moetool.tables import percent
from moetool.trace.reader import Trace
from moetool.trace.rows import TokenBatch
from moetool.types import ForwardInfo, GateEvent, ModelSpec, Phase


@dataclass(frozen=True, kw_only=True)
class DraftOptions:
    """Drafting, and the cost of verification.

    Attributes:
        policy: cache policy, with its default options.
        share: share of experts with a slot.
        length: drafted tokens per verification.
        matched: longest n-gram at the end of the context that is looked up earlier in it.
        accepted: acceptance rates of drafters that cannot run on a trace, such as a draft model; 1 is the bound.
        verify: compute cost of a verification, in forwards of one token.
        compute: compute cost of a token's forward, in loads of all its experts; 0 counts loads only.
        tokens: most tokens of a trace, in whole requests.
        seed: seed of accepted drafts, and of the routes of rejected ones.
    """

    policy: str = "lru"
    share: float = 0.25
    length: int = 4
    matched: int = 3
    accepted: tuple[float, ...] = (0.6, 0.8, 1.0)
    verify: float = 2.2
    compute: float = 0.1
    tokens: int = 2000
    seed: int = 0

    def __post_init__(self) -> None:
        if self.length < 1 or self.matched < 1 or self.tokens < 1 or not 0 < self.share <= 1:
            raise UsageError("expected length, matched and tokens of 1 or more, and a share above 0 and up to 1")
        if not all(0 <= chance <= 1 for chance in self.accepted) or min(self.verify, self.compute) < 0:
            raise UsageError("expected acceptance rates from 0 to 1, and verify and compute of 0 or more")


def price_drafts(traces: Sequence[Trace], options: DraftOptions, file: Path | None = None) -> BenchResult:
    """Replay decoding with and without drafts that one forward verifies.

    A forward takes the newest token and the drafts after it. Accepted drafts take the recorded routes. Routes of
    rejected drafts are not recorded: they take those of the same token earlier in the request if it occurs, else of a
    random token of the trace. Prompts are forwarded as recorded.

    A row is one drafter (`none`, `ngram`, or an acceptance rate) on one trace: `right`, the accepted share of the
    drafted tokens; `tokens_per_forward` and `loads_per_token`, means over decode; `speedup_loads` over `none`, counting
    loads only; `speedup`, with compute time.

    Args:
        file: see `BenchResult`.

    Raises:
        UsageError: a trace has no decoded tokens.
    """
    with recorded("drafts", options, file) as made:
        for trace in traces:
            requests = _requests(trace, options.tokens)
            known = any((request.token_id_T >= 0).all() for request in requests)
            drafters: dict[str, float | None] = {"none": 0.0, **({"ngram": None} if known else {})}
            drafters |= {f"{chance:g}": chance for chance in options.accepted}
            base: _Tally | None = None
            for name, chance in drafters.items():
                tally = _replay(trace.spec, requests, chance, 0 if name == "none" else options.length, options)
                base = base or tally
                made.add(**_row(trace.path.name, name, tally, base, trace.spec, options))
    return made


def tables(made: BenchResult) -> Iterator[Any]:
    """One table."""
    options = made.options
    yield table(
        f"{options['policy']}, {percent(options['share'], '.0f')} of the experts in memory, "
        f"{options['length']} tokens drafted, verified at {options['verify']:g} x the compute of a token",
        made.rows,
        {
            "trace": ("trace", "s"),
            "drafter": ("drafter", "s"),
            "accepted": ("right", ".2f"),
            "tokens/forward": ("tokens_per_forward", ".2f"),
            "loads/token": ("loads_per_token", ".1f"),
            "speedup, loads only": ("speedup_loads", ".2f"),
            "with compute": ("speedup", ".2f"),
        },
    )


@dataclass(slots=True)
class _Tally:
    counts: Counts
    tokens: int = 0
    forwards: int = 0
    drafted: int = 0
    right: int = 0


def _row(trace: str, drafter: str, tally: _Tally, base: _Tally, spec: ModelSpec, options: DraftOptions) -> Row:
    if not base.tokens:
        raise UsageError(f"{trace} has no decoded tokens; capture it with --max-new-tokens")
    one = options.compute * sum(spec.top_k_L)  # in loads
    plain = base.counts.loads + base.forwards * one
    loads, forward = tally.counts.loads, one if drafter == "none" else one * options.verify
    return {
        "trace": trace,
        "drafter": drafter,
        "right": tally.right / tally.drafted if tally.drafted else 0.0,
        "tokens_per_forward": tally.tokens / tally.forwards,
        "loads_per_token": loads / tally.tokens,
        "speedup_loads": base.counts.loads / loads,
        "speedup": plain / (loads + tally.forwards * forward),
    }


def _requests(trace: Trace, tokens: int) -> list[TokenBatch]:
    found: list[TokenBatch] = []
    for request in trace.whole_requests([]):
        if found and sum(map(len, found)) + len(request) > tokens:
            break
        found.append(request)
    return found


def _replay(
    spec: ModelSpec, requests: Sequence[TokenBatch], chance: float | None, length: int, options: DraftOptions
) -> _Tally:
    """Replay with drafts of this length and acceptance rate; None: drafts from n-grams."""
    slots = max(2, round(options.share * spec.total_experts))
    residency = Residency(build_policy(options.policy, spec, {}, slots))
    draw = np.random.default_rng(options.seed)
    pool_TS = np.concatenate([request.experts_TS for request in requests])
    tally = _Tally(Counts())
    number = 0
    for index, request in enumerate(requests):
        prompt = int((request.phase_T == Phase.PREFILL).sum())
        spans = [(0, prompt, request.experts_TS[:prompt])] if prompt else []
        steps = _verified(request, prompt, chance, length, options.matched, draw, pool_TS, tally)
        for begin, end, experts_TS in (*spans, *steps):
            phase = Phase.DECODE if begin >= prompt else Phase.PREFILL
            info, events = _events(spec, experts_TS, number, index, begin, phase)
            residency.begin_forward(info)
            for event in events:
                residency.event(event)
            residency.end_forward(info)
            number += 1
            tally.tokens += (end - begin) if phase is Phase.DECODE else 0
            tally.forwards += phase is Phase.DECODE
        residency.end_request(index)
    tally.counts = residency.decode
    return tally


def _verified(
    request: TokenBatch,
    prompt: int,
    chance: float | None,
    drafted: int,
    matched: int,
    draw: np.random.Generator,
    pool_TS: np.ndarray,
    tally: _Tally,
) -> Iterator[tuple[int, int, np.ndarray]]:
    """Decode forwards: range of true tokens, and the routes of all forwarded tokens."""
    ids, place, length = request.token_id_T.tolist(), prompt, len(request)
    while place < length:
        drafts: list[int | None]
        if chance is None:
            drafts = [*ngram(ids[: place + 1], drafted, matched)]
            good: Iterable[bool] = map(operator.eq, drafts, ids[place + 1 :])
        else:
            drafts = [None] * min(drafted, length - place - 1)
            good = (draw.random() < chance for _ in drafts)
        right = len(list(itertools.takewhile(bool, good)))
        wrong = []
        for draft in drafts[right:]:
            earlier = [t for t in range(place + 1) if ids[t] == draft]
            wrong.append(request.experts_TS[earlier[-1]] if earlier else pool_TS[draw.integers(len(pool_TS))])
        tally.drafted, tally.right = tally.drafted + len(drafts), tally.right + right
        end = place + 1 + right
        yield place, end, np.concatenate([request.experts_TS[place:end], *(row[None] for row in wrong)])
        place = end


def ngram(context: Sequence[int], length: int, matched: int) -> list[int]:
    """Tokens that followed the last occurrence of a context's last tokens, the longest match first.

    Source: prompt lookup decoding (Saxena, 2023).
    """
    for size in range(min(matched, len(context) - 1), 0, -1):
        tail = list(context[-size:])
        for start in range(len(context) - size - 1, -1, -1):
            if list(context[start : start + size]) == tail:
                return list(context[start + size : start + size + length])
    return []


def _events(
    spec: ModelSpec, experts_TS: np.ndarray, number: int, request: int, begin: int, phase: Phase
) -> tuple[ForwardInfo, list[GateEvent]]:
    count = len(experts_TS)
    info = ForwardInfo(
        forward_id=number,
        request_T=(request,) * count,
        phase_T=(phase,) * count,
        position_T=tuple(range(begin, begin + count)),
    )
    ends = np.concatenate([[0], np.cumsum(spec.top_k_L)])
    events = [
        GateEvent(forward=info, layer=layer, experts_TK=tuple(map(tuple, experts_TS[:, a:b].tolist())))
        for layer, (a, b) in enumerate(itertools.pairwise(ends))
    ]
    return info, events
