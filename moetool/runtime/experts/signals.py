"""Signals of a running model for policies and predictors, exactly as a trace holds them."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.utils.hooks import RemovableHandle

from moetool.base import families
from moetool.base.types import ForwardInfo, GateEvent, ModelSpec
from moetool.models.experts.moe_layers import MoeLayer
from moetool.models.router_hooks import is_unrecorded, logits_ahead, read_logits, to_float16
from moetool.trace.events import ahead_scores, router_scores


class Signals:
    """Hooks on the routers and the embedding of a model that fill the optional fields of forwards and gate events.

    All values are rounded to float16, as in a trace, so that a replay of the log takes the server's decisions.

    Args:
        needs: `logits`, `hidden`, `ahead` and `embeddings`, of which the first three fill events; `resident` is filled
            while an event runs (`moetool.runtime.experts.forward`).
        ahead: number of layers that `ahead` looks ahead.
        on_embedded: called when the embedding layer has run, with embedding_TD float32: each token's request's mean.
            Only where `embeddings` is needed.

    Effects: adds forward hooks, which `close` removes.
    """

    def __init__(
        self,
        model: Any,
        layers: list[MoeLayer],
        spec: ModelSpec,
        needs: Iterable[str],
        *,
        ahead: int = 1,
        on_embedded: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        self._needs = frozenset(needs)
        self._spec = spec
        self._layers = layers
        self._distance = ahead
        self._family = families.known(model.config.get_text_config().model_type)
        self._seen: dict[int, dict[str, np.ndarray]] = {}
        self._handles: list[RemovableHandle] = []
        if self._needs & {"logits", "hidden", "ahead"}:
            for layer in layers:
                self._handles.append(layer.router.register_forward_hook(self._on_router(layer), with_kwargs=True))
        if "embeddings" in self._needs and on_embedded is not None:

            def embedded(module: Any, args: Any, output: torch.Tensor) -> None:
                on_embedded(output.reshape(-1, output.shape[-1]))

            self._handles.append(model.get_input_embeddings().register_forward_hook(embedded))

    def close(self) -> None:
        """Remove the hooks."""
        while self._handles:
            self._handles.pop().remove()

    def fill(self, event: GateEvent) -> GateEvent:
        """Fill the event with its layer's router outputs of this forward."""
        seen: dict[str, Any] | None = self._seen.pop(event.layer, None)
        return replace(event, **seen) if seen else event

    def _on_router(self, layer: MoeLayer) -> Any:
        spec, start = self._spec, layer.index + 1
        following = self._layers[start : start + self._distance]

        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if is_unrecorded():
                return
            seen: dict[str, np.ndarray] = {}
            self._seen[layer.index] = seen
            if "logits" in self._needs:
                logits_TE = to_float16(read_logits(layer, output, self._family)).astype(np.float32)
                seen["scores_TE"] = router_scores(logits_TE, spec.score_function)
            if "hidden" in self._needs:
                seen["hidden_TD"] = to_float16(args[0].reshape(-1, args[0].shape[-1])).astype(np.float32)
            if "ahead" in self._needs:
                tokens = args[0].reshape(-1, args[0].shape[-1]).shape[0]
                logits_ATE = np.zeros((len(following), tokens, spec.num_experts), np.float16)
                if following:
                    looked_ATE = to_float16(logits_ahead(following, args, kwargs, self._family))
                    logits_ATE[:, :, : looked_ATE.shape[2]] = looked_ATE
                seen["ahead_ATE"] = ahead_scores(spec, layer.index, logits_ATE)

        return hook


def request_means(info: ForwardInfo, embedding_TD: torch.Tensor) -> np.ndarray:
    """Mean over each token's request in this forward: float32 [T, D], of float16 precision."""
    rows_TD = embedding_TD.detach().float().cpu().numpy()
    request_T = np.asarray(info.request_T)
    mean_TD = np.empty_like(rows_TD)
    for request in dict.fromkeys(info.request_T):
        mine = request_T == request
        mean_TD[mine] = (rows_TD[mine].sum(axis=0) / mine.sum()).astype(np.float16).astype(np.float32)
    return mean_TD
