"""Forwards and gate events of a trace, for policies and predictors."""

import numpy as np

from moetool.base.types import ForwardInfo, GateEvent, ModelSpec
from moetool.trace.rows import TokenBatch


def to_forward(rows: TokenBatch, forward_id: int, *, embedding_TD: np.ndarray | None = None) -> ForwardInfo:
    return ForwardInfo(
        forward_id=forward_id,
        request_T=tuple(rows.request_T.tolist()),
        phase_T=tuple(rows.phase_T.tolist()),
        position_T=tuple(rows.position_T.tolist()),
        embedding_TD=embedding_TD,
        token_id_T=tuple(rows.token_id_T.tolist()),
        recorded_id=int(rows.forward_T[0]),
    )


def to_events(
    spec: ModelSpec, rows: TokenBatch, forward_id: int, *, embedding_TD: np.ndarray | None = None
) -> tuple[ForwardInfo, list[GateEvent]]:
    """Return the rows of one forward as a ForwardInfo and its gate events, one per layer."""
    info = to_forward(rows, forward_id, embedding_TD=embedding_TD)
    return info, gate_events(spec, rows, info)


def gate_events(spec: ModelSpec, rows: TokenBatch, info: ForwardInfo) -> list[GateEvent]:
    """Return the gate events of the rows of a forward, one per layer."""
    events = []
    top = np.concatenate([[0], np.cumsum(spec.top_k_L)])
    wide = np.concatenate([[0], np.cumsum(spec.num_experts_L)])
    for layer in range(spec.num_layers):
        span = slice(top[layer], top[layer + 1])
        weights = None if rows.weights_TS is None else rows.weights_TS[:, span].astype(np.float32)
        scores = None
        if rows.logits_TF is not None:
            logits = rows.logits_TF[:, wide[layer] : wide[layer + 1]].astype(np.float32)
            scores = router_scores(logits, spec.score_function)
        hidden = ahead = resident = None
        if rows.hidden_TH is not None:
            width = spec.hidden_size
            hidden = rows.hidden_TH[:, layer * width : (layer + 1) * width].astype(np.float32)
        if rows.ahead_TR is not None:
            looked = rows.ahead_TR.reshape(len(rows), spec.num_layers, -1, spec.num_experts)[:, layer]
            ahead = ahead_scores(spec, layer, looked.transpose(1, 0, 2))
        if rows.resident_TW is not None:
            said = rows.resident_TW.reshape(len(rows), spec.num_layers, -1)[:, layer]
            resident = next_scores(spec, layer, said)
        events.append(
            GateEvent(
                forward=info,
                layer=layer,
                experts_TK=tuple(map(tuple, rows.experts_TS[:, span].tolist())),
                weights_TK=weights,
                scores_TE=scores,
                hidden_TD=hidden,
                ahead_ATE=ahead,
                resident_TE=resident,
            )
        )
    return events


def router_scores(logits_TE: np.ndarray, score_function: str) -> np.ndarray:
    """Return a router's scores from its logits, by `ModelSpec.score_function`: float32 [T, E]."""
    if score_function == "sigmoid":
        return 1.0 / (1.0 + np.exp(-logits_TE))
    if score_function == "sqrtsoftplus":
        return np.sqrt(np.logaddexp(0.0, logits_TE))
    shifted = np.exp(logits_TE - logits_TE.max(axis=1, keepdims=True))
    return shifted / shifted.sum(axis=1, keepdims=True)


def ahead_scores(spec: ModelSpec, layer: int, logits_ATE: np.ndarray) -> np.ndarray:
    """Return the scores of the routers after `layer` from their logits: float32 [A, T, E], without layers beyond L."""
    following = spec.num_layers - 1 - layer
    scores_ATE = np.zeros((min(len(logits_ATE), following), *logits_ATE.shape[1:]), np.float32)
    for a in range(len(scores_ATE)):
        num_experts = spec.num_experts_L[layer + 1 + a]
        logits_TE = logits_ATE[a, :, :num_experts].astype(np.float32)
        scores_ATE[a, :, :num_experts] = router_scores(logits_TE, spec.score_function)
    return scores_ATE


def next_scores(spec: ModelSpec, layer: int, logits_TE: np.ndarray) -> np.ndarray:
    """Return the scores of the router after `layer` from its logits: float32 [T, E]; 0 after the last layer."""
    ahead_ATE = ahead_scores(spec, layer, logits_TE[None])
    return ahead_ATE[0] if len(ahead_ATE) else np.zeros(logits_TE.shape, np.float32)
