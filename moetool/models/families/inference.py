"""Inference of an unlisted family's routing by running its router on synthetic inputs."""

import copy
from typing import Any

import torch

from moetool.base.families import Family, Rule, Score, unlisted
from moetool.models.families import router_rules

_TOKENS = 64
_UNKNOWN = "the rule from its router's logits to weights is unknown"
_SCORES: tuple[Score, ...] = ("softmax", "sigmoid", "sqrtsoftplus")


def infer_family(model_type: str, router: Any, hidden_size: int) -> Family:
    """Infer a family from its router.

    Args:
        router: router of one MoE layer, on the meta device.
        hidden_size: width of its hidden states.
    """
    found = _rule(router, hidden_size)
    if found is None:
        return unlisted(model_type, exception=_UNKNOWN)
    score, renormalize = found
    return unlisted(model_type, score=score, renormalize=renormalize)


def _rule(router: Any, hidden_size: int) -> tuple[Score, bool] | None:
    """Rule from logits to scores, and whether chosen scores are normalized; None if unknown."""
    trial = copy.deepcopy(router).to_empty(device="cpu").float()
    draw = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        for tensor in (*trial.parameters(), *trial.buffers()):
            if tensor.is_floating_point():
                tensor.normal_(0, hidden_size**-0.5, generator=draw) if tensor.dim() > 1 else tensor.zero_()
            else:
                tensor.zero_()
        try:
            outputs = trial(torch.randn(_TOKENS, hidden_size, generator=draw))
        except Exception:  # a router may need other arguments; then its rule stays unknown
            return None
    logits, weights, index = _outputs(outputs)
    if logits is None or weights is None or index is None:
        return None
    scale = Family(name="").rule(None, router).scale
    for score in _SCORES:
        for renormalize in (True, False):
            rule = Rule(score=score, renormalize=renormalize, scale=scale)
            made = router_rules.weigh(rule, router_rules.scores(rule, logits), index)
            if torch.allclose(made, weights.float(), rtol=1e-3, atol=1e-5):
                return score, renormalize
    return None


def _outputs(outputs: Any) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Find logits [T, E], weights [T, K] and indices [T, K] in a router's output."""
    tensors = [out for out in (outputs if isinstance(outputs, tuple) else ()) if isinstance(out, torch.Tensor)]
    index = next((t for t in tensors if not t.is_floating_point() and t.shape[:1] == (_TOKENS,)), None)
    if index is None:
        return None, None, None
    floats = [t for t in tensors if t.is_floating_point()]
    weights = next((t for t in floats if t.shape == index.shape), None)
    logits = next((t for t in floats if len(t) == _TOKENS and t.shape[-1] > index.shape[-1]), None)
    return logits, weights, index.long()
