"""Ranking scores of a router, and output norms of the chosen experts."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.hooks import RemovableHandle

from moetool.base import families
from moetool.base.errors import UsageError
from moetool.models.experts.expert_form import Call
from moetool.models.experts.moe_layers import MoeLayer
from moetool.models.families import router_rules
from moetool.models.router_hooks import is_unrecorded, to_float16

_BIASES = ("e_score_correction_bias", "expert_bias")
"""Names of the correction bias, which affects the choice of experts but not their weights."""


class SelectionScores:
    """Scores of all experts plus the router's correction bias (as in DeepSeek-V3), from logits.

    A token's top-k are the largest of them, within the groups chosen by a group-limited router.

    Raises:
        UsageError: the family's rule from logits to scores is unknown, or not a function of the logits.
    """

    def __init__(self, model: Any, layers: Sequence[MoeLayer]) -> None:
        config = model.config.get_text_config()
        family = families.known(config.model_type)
        if family is None or family.inferred or family.exception:
            why = family.exception if family is not None and family.exception else "its rule is not in moetool's table"
            raise UsageError(f"cannot keep scores of {config.model_type}: {why}; keep logits")
        self._widths = [layer.num_experts for layer in layers]
        self._rules = [family.rule(config, layer.router) for layer in layers]
        self._biases = [_correction_bias(model, layer) for layer in layers]

    def __call__(self, logits_TF: torch.Tensor) -> np.ndarray:
        """scores_TF float16 of logits of all layers."""
        parts = []
        for logits_TE, rule, bias_E in zip(
            logits_TF.split(self._widths, dim=1), self._rules, self._biases, strict=True
        ):
            scores_TE = router_rules.scores(rule, logits_TE)
            parts.append(scores_TE if bias_E is None else scores_TE + bias_E.float())
        return to_float16(torch.cat(parts, dim=1))


def _correction_bias(model: Any, layer: MoeLayer) -> torch.Tensor | None:
    block = model.get_submodule(layer.path.rpartition(".")[0])
    for name, value in (*block.named_buffers(), *block.named_parameters()):
        if name.rpartition(".")[2] in _BIASES and value.numel() == layer.num_experts:
            return value.detach().reshape(-1)
    return None


Norms = Callable[[torch.Tensor], None]
"""Called with norms_TK float32 of one layer in one forward."""


def watch_norms(layer: MoeLayer, on_norms: Norms) -> RemovableHandle:
    """Call `on_norms` whenever a layer computes its experts, with the norm of each one's output before its weight.

    Experts in a pool (`moetool.runtime.experts.forward`) provide their outputs; experts in memory are computed a second
    time, one choice of each token at a time.

    Raises:
        UsageError: the family does not pass routes to its experts.
    """
    if layer.form.call not in (Call.INTERFACE, Call.EXPERTS):
        raise UsageError(f"cannot keep norms of {type(layer.experts).__name__}: its arguments lack the routes")
    pool = getattr(layer.experts, "moetool_binding", None)
    if pool is not None:
        handle: RemovableHandle = pool[0].watch_products(layer, lambda products_TKD: on_norms(_norms(products_TKD)))
        return handle

    def before(module: Any, args: tuple[torch.Tensor, ...]) -> None:
        if is_unrecorded():
            return
        hidden, index_TK, weights_TK = args[:3]
        ones_T1 = torch.ones_like(weights_TK[:, :1])
        with torch.no_grad():
            outputs = [module.forward(hidden, index_TK[:, k : k + 1], ones_T1) for k in range(index_TK.shape[1])]
            on_norms(torch.stack([_norms(output.reshape(len(index_TK), -1)) for output in outputs], dim=1))

    handle = layer.experts.register_forward_pre_hook(before)
    return handle


def _norms(outputs: torch.Tensor) -> torch.Tensor:
    return outputs.float().norm(dim=-1)
