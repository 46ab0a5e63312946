"""The unseen requests of a trace, on which predictors may be scored."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moetool.base.errors import UsageError
from moetool.base.tables import numbered
from moetool.trace.reader import Trace
from moetool.trace.same_prompts import Overlap, overlap

Part = Collection[int] | Mapping[int, range]
"""Some requests of a trace: whole, or with the range of their tokens, counted in the order of their forwards."""

Card = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unseen:
    """Tokens on which several predictors are scored together, so that their rows are comparable.

    Attributes:
        part: requests, or a range of each one's tokens.
        requests: `test` (of the training trace of one of them), `end` (the last tokens of each request, after a split
            in time) or `all`.
        num_skipped: number of other requests with tokens.
        undecided: number of requests that may repeat a training prompt (`moetool.trace.same_prompts.Overlap`).
    """

    part: Part
    requests: str
    num_skipped: int
    undecided: int = 0


def held_out(card: Card, trace: Trace, known: Overlap | None = None) -> frozenset[int]:
    """Return the requests of a trace that are wholly unseen by a predictor.

    Prompts are identified by content (`moetool.trace.same_prompts`). On its training trace these are its test requests,
    except those that repeat another prompt.

    Args:
        known: `overlap(trace, card["seen_prompts"])`, if computed before.

    Raises:
        UsageError: there are none.
    """
    if in_time(card, trace):
        raise UsageError(
            f"{card['predictor']} was trained on the first tokens of every request of {trace.path}, expected whole "
            f"requests that it has not seen; capture other prompts"
        )
    rows = [row["request"] for row in trace.requests.to_pylist() if row["tokens"]]
    own = card["trace"]["sha256"] == trace.sha256
    known = known or overlap(trace, card["seen_prompts"])
    unseen = (frozenset(card["requests"]["test"]) if own else frozenset(rows)) - known.repeated
    if not unseen:
        raise UsageError(
            f"{card['predictor']} was trained on all of {trace.path} ({numbered(len(rows), 'prompt')}), expected some "
            f"that it has not seen; capture other prompts"
        )
    return unseen


def in_time(card: Card, trace: Trace) -> dict[str, dict[int, range]] | None:
    """Return the tokens of each part for a split in time; else None."""
    spans = card.get("in_time")
    if spans is None or card["trace"]["sha256"] != trace.sha256:
        return None
    return {name: {int(request): range(*span) for request, span in part.items()} for name, part in spans.items()}


def unseen_by_all(cards: Sequence[Card], trace: Trace) -> Unseen:
    """Return the part of a trace that no predictor has seen. Raises: UsageError: there is none."""
    tokens = {row["request"]: row["tokens"] for row in trace.requests.to_pylist() if row["tokens"]}
    left = {request: range(count) for request, count in tokens.items()}
    ended, undecided = False, 0
    found: dict[str, int] = {}
    made: dict[str, dict[int, range]] = {}
    for card in cards:
        key = str((card["trace"]["sha256"], card["requests"], card["seen_prompts"], card.get("in_time")))
        if key not in made:
            spans = in_time(card, trace)
            ended = ended or spans is not None
            if spans is None:
                known = overlap(trace, card["seen_prompts"])
                made[key] = {r: range(tokens[r]) for r in held_out(card, trace, known)}
                undecided = max(undecided, 0 if card["trace"]["sha256"] == trace.sha256 else known.undecided)
            else:
                made[key] = spans["test"]
        mine = made[key]
        found[str(card["predictor"])] = len(mine)
        left = {r: part for r, span in left.items() if r in mine and (part := _common(span, mine[r]))}
    if not left:
        counts = ", ".join(f"{name} {count}" for name, count in found.items())
        raise UsageError(
            f"none of the {len(tokens)} requests of {trace.path} is unseen by all predictors (by each: {counts}); "
            f"train them on the same trace with the same --seed, evaluate them one by one, or capture other prompts"
        )
    own = any(card["trace"]["sha256"] == trace.sha256 for card in cards)
    return Unseen(
        part=left if ended else frozenset(left),
        requests="end" if ended else "test" if own else "all",
        num_skipped=len(tokens) - len(left),
        undecided=min(undecided, len(left)),
    )


def _common(a: range, b: range) -> range:
    return range(max(a.start, b.start), min(a.stop, b.stop))
