"""Routing differences of two traces of the same tokens, by layer: effects of quantization, fine-tuning or an engine."""

from dataclasses import dataclass

import numpy as np

from moetool.base.errors import MismatchError
from moetool.base.json_files import JsonRecord
from moetool.base.types import ModelSpec
from moetool.trace.events import router_scores
from moetool.trace.reader import Trace
from moetool.trace.rows import TokenBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerDiff:
    """One MoE layer.

    Attributes:
        layer: absolute index.
        flip_rate: share of the experts chosen in the first trace that the second one did not choose.
        changed: share of the tokens with any such expert (a flip).
        margin: median gap between the scores of the k-th and the next expert in the first trace; None without logits.
        flipped_margin: the same over the tokens that changed; small gaps mean that near ties flipped.
        use_bits: Jensen-Shannon divergence of expert use, in bits.
        score_bits: mean over tokens of the divergence of the routers' distributions, in bits; None without logits.
    """

    layer: int
    flip_rate: float
    changed: float
    margin: float | None
    flipped_margin: float | None
    use_bits: float
    score_bits: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceDiff(JsonRecord):
    """Differences of all layers, and the extent of the comparison.

    Attributes:
        requests: number of requests in both traces.
        tokens: compared tokens: each request up to the first token that differs.
        left_out: later tokens of the first trace in those requests.
        only_a, only_b: requests without a counterpart.
    """

    requests: int
    tokens: int
    left_out: int
    only_a: int
    only_b: int
    layers: tuple[LayerDiff, ...]

    @property
    def equal_share(self) -> float:
        """Return the mean over layers of the share of tokens with the same experts in both traces."""
        return 1 - float(np.mean([layer.changed for layer in self.layers]))

    @property
    def flip_rate(self) -> float:
        """Return the mean flip rate over layers."""
        return float(np.mean([layer.flip_rate for layer in self.layers]))


def diff(a: Trace, b: Trace) -> TraceDiff:
    """Compare two traces token by token.

    Requests are matched by their pair id, else by dataset, task and prompt. Where no names are equal, as in a server's
    log and the trainer's file, those with equal token ids are matched, then those of which one begins with the
    other's ids. Tokens are compared up to the first id that differs. If ids are withheld in one of them, prompt tokens
    are compared.

    Raises:
        MismatchError: the models' shapes differ, or no request is in both.
    """
    for name in ("layer_ids_L", "num_experts_L", "top_k_L"):
        if getattr(a.spec, name) != getattr(b.spec, name):
            raise MismatchError(
                f"{b.path} is of {b.spec.name} with other {name.removesuffix('_L')} than {a.spec.name} of {a.path}; "
                f"expected two traces of one model's routers"
            )
    pairs, only_a, only_b = _pairs(a, b)
    columns = sorted(a.columns & b.columns & {"logits"})
    theirs = {int(rows.request_T[0]): rows for rows in b.whole_requests(columns)}
    sums = _Sums(a.spec, bool(columns), "logits" in a.columns)
    left_out = requests = 0
    for rows in a.whole_requests(sorted(a.columns & {"logits"})):
        other = theirs.get(pairs.get(int(rows.request_T[0]), -1))
        if other is None:
            continue
        shared = _shared(rows, other)
        left_out += len(rows) - shared
        requests += shared > 0
        sums.add(rows.select(slice(shared)), other.select(slice(shared)))
    if not sums.tokens:
        raise MismatchError(f"{a.path} and {b.path} share no tokens, expected traces of the same prompts")
    return TraceDiff(
        requests=requests, tokens=sums.tokens, left_out=left_out, only_a=only_a, only_b=only_b, layers=sums.layers()
    )


def _pairs(a: Trace, b: Trace) -> tuple[dict[int, int], int, int]:
    """Return the request of b for each of a, and the unmatched counts. Repeated prompts are paired in order."""

    def keyed(trace: Trace) -> dict[tuple[str, str, str, int], int]:
        seen: dict[tuple[str, str, str], int] = {}
        found = {}
        for row in trace.requests.to_pylist():
            key = ("", "", row["pair"]) if row["pair"] else (row["dataset"], row["task"], row["prompt_id"])
            seen[key] = seen.get(key, -1) + 1
            found[(*key, seen[key])] = row["request"]
        return found

    mine, theirs = keyed(a), keyed(b)
    pairs = {mine[key]: theirs[key] for key in mine.keys() & theirs.keys()} or _same_tokens(a, b)
    if not pairs:
        raise MismatchError(f"{a.path} and {b.path} have no prompt in common, expected traces of the same prompts")
    return pairs, len(mine) - len(pairs), len(theirs) - len(pairs)


def _same_tokens(a: Trace, b: Trace) -> dict[int, int]:
    """Pair requests with equal tokens, then those of which one begins with all tokens of the other."""
    requests: dict[bytes, tuple[list[int], list[int]]] = {}  # of both traces, by their tokens
    for which, trace in enumerate((a, b)):
        for rows in trace.whole_requests():
            if rows.position_T[0] == 0 and (rows.token_id_T >= 0).all():
                text = rows.token_id_T.astype(">i4").tobytes()
                requests.setdefault(text, ([], []))[which].append(int(rows.request_T[0]))
    pairs: dict[int, int] = {}
    begun: list[tuple[bytes, int, int]] = []  # texts of one trace, each begins with the one before it
    for text in sorted(requests):  # a text follows those that it begins with
        mine, theirs = requests[text]
        pairs |= zip(mine, theirs, strict=False)
        while begun and not text.startswith(begun[-1][0]):
            begun.pop()
        which = int(len(theirs) > len(mine))
        for request in (mine, theirs)[which][min(len(mine), len(theirs)) :]:
            if begun and begun[-1][1] != which:
                other = begun.pop()[2]
                pairs |= {other: request} if which else {request: other}
            else:
                begun.append((text, which, request))
    return pairs


def _shared(rows: TokenBatch, other: TokenBatch) -> int:
    """Return the length of two requests' common token prefix."""
    num = min(len(rows), len(other))
    mine, theirs = rows.select(slice(num)), other.select(slice(num))
    withheld_T = (mine.token_id_T < 0) | (theirs.token_id_T < 0)
    prompt_T = (mine.phase_T == 0) & (theirs.phase_T == 0)
    same_T = (mine.position_T == theirs.position_T) & np.where(
        withheld_T, prompt_T, mine.token_id_T == theirs.token_id_T
    )
    return num if same_T.all() else int(np.argmin(same_T))


class _Sums:
    """Sums over tokens."""

    def __init__(self, spec: ModelSpec, both_logits: bool, logits: bool) -> None:
        self.tokens = 0
        self._spec, self._both, self._logits = spec, both_logits, logits
        self._flips_L = np.zeros(spec.num_layers)
        self._changed_L = np.zeros(spec.num_layers)
        self._use_2LE = np.zeros((2, spec.num_layers, spec.num_experts))
        self._score_bits_L = np.zeros(spec.num_layers)
        self._margins: list[list[np.ndarray]] = [[] for _ in range(spec.num_layers)]
        self._flipped: list[list[np.ndarray]] = [[] for _ in range(spec.num_layers)]

    def add(self, rows: TokenBatch, other: TokenBatch) -> None:
        spec = self._spec
        top, wide = (np.concatenate([[0], np.cumsum(widths)]) for widths in (spec.top_k_L, spec.num_experts_L))
        self.tokens += len(rows)
        for layer, top_k in enumerate(spec.top_k_L):
            mine_TK, theirs_TK = (part.experts_TS[:, top[layer] : top[layer + 1]] for part in (rows, other))
            kept_T = (mine_TK[:, :, None] == theirs_TK[:, None, :]).any(axis=2).sum(axis=1)
            self._flips_L[layer] += (top_k - kept_T).sum()
            self._changed_L[layer] += (kept_T < top_k).sum()
            for which, part in enumerate((mine_TK, theirs_TK)):
                self._use_2LE[which, layer] += np.bincount(part.ravel(), minlength=spec.num_experts)
            if rows.logits_TF is None:
                continue
            mine_TE = self._scores(rows, wide, layer)
            if top_k < mine_TE.shape[1]:
                ordered_TE = -np.sort(-mine_TE, axis=1)
                margin_T = ordered_TE[:, top_k - 1] - ordered_TE[:, top_k]
                self._margins[layer].append(margin_T)
                self._flipped[layer].append(margin_T[kept_T < top_k])
            if self._both:
                self._score_bits_L[layer] += divergence(mine_TE, self._scores(other, wide, layer)).sum()

    def _scores(self, rows: TokenBatch, wide: np.ndarray, layer: int) -> np.ndarray:
        assert rows.logits_TF is not None
        logits_TE = rows.logits_TF[:, wide[layer] : wide[layer + 1]].astype(np.float32)
        return router_scores(logits_TE, self._spec.score_function)

    def layers(self) -> tuple[LayerDiff, ...]:
        use_bits_L = divergence(self._use_2LE[0], self._use_2LE[1])
        return tuple(
            LayerDiff(
                layer=layer_id,
                flip_rate=float(self._flips_L[i] / (self.tokens * self._spec.top_k_L[i])),
                changed=float(self._changed_L[i] / self.tokens),
                margin=_median(self._margins[i]),
                flipped_margin=_median(self._flipped[i]),
                use_bits=float(use_bits_L[i]),
                score_bits=float(self._score_bits_L[i] / self.tokens) if self._both else None,
            )
            for i, layer_id in enumerate(self._spec.layer_ids_L)
        )


def _median(parts: list[np.ndarray]) -> float | None:
    values = np.concatenate(parts) if parts else np.zeros(0)
    return float(np.median(values)) if len(values) else None


def divergence(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the Jensen-Shannon divergence along the last axis, in bits: 0 for equal shares, 1 for disjoint ones."""
    a, b = (x / np.maximum(x.sum(axis=-1, keepdims=True), 1e-30) for x in (a, b))
    bits: np.ndarray = _bits((a + b) / 2) - (_bits(a) + _bits(b)) / 2
    return np.maximum(bits, 0.0)


def _bits(share: np.ndarray) -> np.ndarray:
    return -(share * np.log2(np.where(share > 0, share, 1.0))).sum(axis=-1)
