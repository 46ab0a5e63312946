"""Routes of a trace in a live model: choice of requests, and hooks that replace the routers' choice."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moetool.base import durable
from moetool.base.errors import MismatchError, UsageError
from moetool.base.types import ForwardInfo, GateEvent, ModelSpec, Phase
from moetool.models.experts.expert_form import Call
from moetool.models.experts.moe_layers import MoeLayer
from moetool.prediction.unseen_requests import held_out
from moetool.trace.reader import MANIFEST, Trace
from moetool.trace.rows import TokenBatch
from moetool.trace.writer import TraceWriter

PROMPT_SHARE = 1 / 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedRequest:
    """One replayed request of a trace.

    Attributes:
        request: its number in the trace.
        prompt_tokens: tokens of its one prompt forward.
        tokens: forwarded tokens in all: the prompt, then one per forward.
    """

    request: int
    prompt_tokens: int
    tokens: int


def choose(
    trace: Trace, *, requests: int, new_tokens: int, prompt_share: float | None, predictor: Any = None
) -> list[ReplayedRequest]:
    """First requests of a trace that are long enough and not in the predictor's training data.

    Args:
        new_tokens: tokens to generate; the last of them is not forwarded.
        prompt_share: share of a request's tokens in its prompt (default: the trace's, or a third if the imported file
            has none).

    Raises:
        UsageError: the trace has fewer such requests.
    """
    allowed = None
    if predictor is not None and predictor.card:
        allowed = held_out(predictor.card, trace)
    imported = trace.manifest["provenance"].get("imported")
    if prompt_share is None and imported is not None and imported.get("as") is not None:
        prompt_share = PROMPT_SHARE
    found = []
    for row in trace.requests.to_pylist():
        share = prompt_share
        prompt = row["prompt_tokens"] if share is None else max(1, round(share * row["tokens"]))
        tokens = prompt + new_tokens - 1
        if (allowed is None or row["request"] in allowed) and tokens <= row["tokens"]:
            found.append(ReplayedRequest(request=row["request"], prompt_tokens=prompt, tokens=tokens))
    if len(found) < requests:
        unseen = "" if allowed is None else " that the predictor was not trained on"
        raise UsageError(
            f"{trace.path} holds {len(found)} requests of enough tokens{unseen}, expected {requests}; set "
            "bench.requests or bench.new_tokens lower"
        )
    return found[:requests]


def bench_spec(spec: ModelSpec, trace: Trace) -> ModelSpec:
    """A model's spec with the top-k of the forced routes.

    Raises:
        MismatchError: the trace has fewer layers, other numbers of experts, or more experts a token.
    """
    found, layers = trace.spec, spec.num_layers
    if found.num_layers < layers or found.num_experts_L[:layers] != spec.num_experts_L:
        raise MismatchError(
            f"{trace.path} has {found.num_layers} MoE layers x {found.num_experts} experts, and {spec.name} has "
            f"{layers} x {spec.num_experts}; give routes of the same shape, or fewer --layers"
        )
    top_k_L = found.top_k_L[:layers]
    if any(mine < theirs for mine, theirs in zip(spec.top_k_L, top_k_L, strict=True)):
        raise MismatchError(
            f"{trace.path} has top-{max(top_k_L)} routes, expected at most the top-{max(spec.top_k_L)} of {spec.name}; "
            "give routes of the same shape"
        )
    values: dict[str, Any] = {**spec.to_json(), "top_k_L": list(top_k_L), "has_logits_L": [False] * layers}
    return ModelSpec.from_json(values)


def write_part(trace: Trace, spec: ModelSpec, chosen: Sequence[ReplayedRequest], work: Path) -> Trace:
    """Write the chosen tokens of a trace, first layers only, as a trace of the model that follows them.

    Effects: writes it into `work`, whole or not at all; an earlier one is reused.
    """
    facts = {
        "model": spec.revision,
        "routes": trace.sha256,
        "requests": [[c.request, c.prompt_tokens, c.tokens] for c in chosen],
    }
    out = work / f"routes-{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]}"
    if (out / MANIFEST).is_file():
        return Trace(out)
    width = sum(spec.top_k_L)
    rows = {row["request"]: row for row in trace.requests.to_pylist()}
    with (
        durable.staged_directory(out, overwrite=True, marker=MANIFEST) as staged,
        TraceWriter(staged, spec, ["topk"]) as writer,
    ):
        forwards = 0
        for number, one in enumerate(chosen):
            row = rows[one.request]
            decoded = one.tokens - one.prompt_tokens
            writer.add_request(
                number,
                dataset=row["dataset"],
                task=row["task"],
                prompt_id=row["prompt_id"],
                prompt_tokens=one.prompt_tokens,
                new_tokens=decoded,
            )
            writer.append(_rows(_tokens_of(trace, one), number, one.prompt_tokens, forwards, width))
            forwards += 1 + decoded
        writer.finish(composition={"kind": "sequential"}, provenance={"bench": facts, "model": spec.name})
    return Trace(out)


class ForcedRoutes:
    """Replacement of the routers' choice by a trace's experts and weights.

    The routers still run. Each token takes row `position` of its request.

    Args:
        layers: layers of a model in memory.
        trace: a trace of that model from `write_part`.

    Effects: hooks the layers' experts until `close`. Hooks that come later see the forced routes.

    Raises:
        UsageError: the family's routers return no replaceable choice.
    """

    def __init__(self, layers: Sequence[MoeLayer], trace: Trace) -> None:
        self._first_row: dict[int, int] = {}
        self._rows_T = torch.empty(0, dtype=torch.int64)
        batches = list(trace.batches(["weights"]))
        whole = TokenBatch.concatenate(batches)
        assert whole.weights_TS is not None
        starts = np.flatnonzero(np.diff(whole.request_T, prepend=-1))
        self._start_of = dict(zip(whole.request_T[starts].tolist(), starts.tolist(), strict=True))
        ends = np.cumsum(trace.spec.top_k_L).tolist()
        spans = [slice(end - top_k, end) for end, top_k in zip(ends, trace.spec.top_k_L, strict=True)]
        self._experts = [torch.from_numpy(whole.experts_TS[:, span].astype(np.int64)) for span in spans]
        self._weights = [torch.from_numpy(whole.weights_TS[:, span].astype(np.float32)) for span in spans]
        self._handles: list[Any] = []
        self.attach(layers)

    def attach(self, layers: Sequence[MoeLayer]) -> None:
        """Force the routes on another copy of the model too. Raises: UsageError: see the class."""
        if any(layer.form.call not in (Call.INTERFACE, Call.EXPERTS) for layer in layers):
            raise UsageError("the routers of this family return no replaceable choice; bench a MODEL with --data")
        self._handles += [
            layer.experts.register_forward_pre_hook(lambda _, args, i=layer.index: self._replace(i, args))
            for layer in layers
        ]

    def follow(self, request: int, number: int) -> None:
        """Make the model's `request` follow request `number` of the trace."""
        self._first_row[request] = self._start_of[number]

    def begin_forward(self, info: ForwardInfo) -> None:
        """Announce the next forward."""
        rows = [self._first_row[r] + p for r, p in zip(info.request_T, info.position_T, strict=True)]
        self._rows_T = torch.tensor(rows)

    def close(self) -> None:
        """Restore the routers' choice."""
        for handle in self._handles:
            handle.remove()

    def _replace(self, layer: int, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        hidden, _, weights, *rest = args
        if len(self._rows_T) != hidden.numel() // hidden.shape[-1]:
            raise RuntimeError(f"{len(self._rows_T)} tokens were announced, and the forward has {hidden.shape}")
        if self._rows_T.device != hidden.device:  # the routes move to the model's device at its first forward
            self._rows_T = self._rows_T.to(hidden.device)
            self._experts = [experts.to(hidden.device) for experts in self._experts]
            self._weights = [weights.to(hidden.device) for weights in self._weights]
        forced_TK = self._weights[layer][self._rows_T].to(weights.dtype)
        return hidden, self._experts[layer][self._rows_T], forced_TK, *rest


class CutPredictor:
    """A predictor trained on a model's routes, for a model with only its first layers.

    Args:
        predictor: a `moetool.training.predictor.Predictor`.
        spec: spec of the smaller model.

    Attributes:
        routes: predictions of all layers at once; None if the smaller model lacks layers.
    """

    def __init__(self, predictor: Any, spec: ModelSpec) -> None:
        self.spec = spec
        self.needs = predictor.needs
        self.remembers = predictor.remembers
        self.lookahead = predictor.lookahead
        self.num_bytes = predictor.num_bytes
        whole = predictor.spec.num_layers == spec.num_layers
        self.routes = getattr(predictor, "routes", None) if whole else None
        self._predictor = predictor

    def observe(self, event: GateEvent) -> None:
        """See `Predictor.observe`."""
        self._predictor.observe(event)

    def scores(self, layer: int) -> np.ndarray:
        """See `Predictor.scores`."""
        return self._predictor.scores(layer)


def _tokens_of(trace: Trace, one: ReplayedRequest) -> TokenBatch:
    """The first tokens of a request by position, across forwards."""
    parts = [batch.select(batch.request_T == one.request) for batch in trace.batches(["weights"])]
    rows = TokenBatch.concatenate([part for part in parts if len(part)])
    rows = rows.select(np.argsort(rows.position_T, kind="stable")[: one.tokens])
    if not np.array_equal(rows.position_T, np.arange(one.tokens)):
        raise MismatchError(
            f"request {one.request} of {trace.path} has missing or duplicate positions, as after a restart; capture "
            "again, one prompt after the other"
        )
    return rows


def _rows(tokens: TokenBatch, number: int, prompt_tokens: int, first_forward: int, width: int) -> TokenBatch:
    iteration_T = np.maximum(tokens.position_T - (prompt_tokens - 1), 0).astype(np.int32)
    assert tokens.weights_TS is not None
    return TokenBatch(
        request_T=np.full(len(tokens), number, np.int32),
        forward_T=(first_forward + iteration_T).astype(np.int32),
        phase_T=np.where(iteration_T == 0, Phase.PREFILL, Phase.DECODE).astype(np.uint8),
        iteration_T=iteration_T,
        position_T=tokens.position_T,
        token_id_T=np.full(len(tokens), -1, np.int32),
        experts_TS=tokens.experts_TS[:, :width],
        weights_TS=tokens.weights_TS[:, :width],
    )
