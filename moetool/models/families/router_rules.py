"""A router's rule applied: scores of its logits, and weights of the chosen experts."""

import torch

from moetool.base.families import Rule


def scores(rule: Rule, logits_TE: torch.Tensor) -> torch.Tensor:
    """Return scores [T, E] float32 over all experts."""
    logits_TE = logits_TE.float()
    if rule.score == "sigmoid":
        return logits_TE.sigmoid()
    if rule.score == "sqrtsoftplus":
        return logits_TE.logaddexp(logits_TE.new_zeros(())).sqrt()
    return logits_TE.softmax(dim=-1)


def weigh(rule: Rule, scores_TE: torch.Tensor, index_TK: torch.Tensor) -> torch.Tensor:
    """Return weights [T, K] float32 of the experts `index_TK`, from scores."""
    scores_TK = scores_TE.gather(1, index_TK)
    if rule.renormalize:
        scores_TK = scores_TK / scores_TK.sum(dim=-1, keepdim=True)
    return scores_TK * rule.scale
