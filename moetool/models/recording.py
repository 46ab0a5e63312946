"""Recording what the routers of a running model do."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch.utils.hooks import RemovableHandle

from moetool.models.batching import Batch
from moetool.models.spec import MoeLayer
from moetool.trace import TokenBatch


class GateRecorder:
    """Hooks on the routers and experts of a model that collect one forward at a time.

    The experts and weights are those that were really used: a pre-hook on the experts module sees them after
    grouping, bias and correction. They are never computed again from the logits.

    Args:
        keep: `logits`, `hidden` and `embeddings` besides the experts and their weights.

    Effects: adds forward hooks, which `close` removes.
    """

    def __init__(self, model: Any, layers: list[MoeLayer], keep: Iterable[str]) -> None:
        keep = frozenset(keep)
        self._experts: list[torch.Tensor] = []
        self._weights: list[torch.Tensor] = []
        self._logits: list[torch.Tensor] | None = [] if "logits" in keep else None
        self._hidden: list[torch.Tensor] | None = [] if "hidden" in keep else None
        self._embedding: torch.Tensor | None = None
        self._handles: list[RemovableHandle] = []
        index = getattr(model._can_record_outputs.get("router_logits"), "index", 0)
        for layer in layers:
            self._handles.append(layer.experts.register_forward_pre_hook(self._on_experts))
            if self._logits is not None or self._hidden is not None:
                self._handles.append(layer.router.register_forward_hook(self._on_router(index)))
        if "embeddings" in keep:
            self._handles.append(model.get_input_embeddings().register_forward_hook(self._on_embedding))

    def close(self) -> None:
        """Remove the hooks."""
        while self._handles:
            self._handles.pop().remove()

    def discard(self) -> None:
        """Forget what the hooks have collected since the last `take`: that forward failed."""
        for columns in (self._experts, self._weights, self._logits, self._hidden):
            if columns is not None:
                columns.clear()
        self._embedding = None

    def take(self, batch: Batch) -> tuple[TokenBatch, np.ndarray | None]:
        """The rows of the forward that has just run, and its embeddings.

        Returns:
            The rows, and the output of the embedding layer [T, D] float32 or None.
        """
        info = batch.info
        rows = TokenBatch(
            request_T=np.asarray(info.request_T, np.int32),
            forward_T=np.full(len(info.request_T), info.forward_id, np.int32),
            phase_T=np.asarray(info.phase_T, np.uint8),
            iteration_T=np.asarray(batch.iteration_T, np.int32),
            position_T=np.asarray(info.position_T, np.int32),
            token_id_T=np.asarray(batch.token_id_T, np.int32),
            experts_TS=_columns(self._experts, np.uint16),
            weights_TS=_columns(self._weights, np.float16),
            logits_TF=None if self._logits is None else _columns(self._logits, np.float16),
            hidden_TH=None if self._hidden is None else _columns(self._hidden, np.float16),
        )
        embedding = None if self._embedding is None else self._embedding.float().numpy()
        self.discard()
        return rows, embedding

    def _on_experts(self, module: Any, args: tuple[torch.Tensor, ...]) -> None:
        self._experts.append(args[1])
        self._weights.append(args[2])

    def _on_router(self, index: int) -> Any:
        def hook(module: Any, args: tuple[torch.Tensor, ...], output: Any) -> None:
            if self._logits is not None:
                self._logits.append(output[index] if isinstance(output, tuple) else output)
            if self._hidden is not None:
                self._hidden.append(args[0].reshape(-1, args[0].shape[-1]))

        return hook

    def _on_embedding(self, module: Any, args: Any, output: torch.Tensor) -> None:
        self._embedding = output.reshape(-1, output.shape[-1])


def _columns(layers: list[torch.Tensor], dtype: Any) -> np.ndarray:
    """[T, sum of widths] from one [T, width] tensor a layer, saturating where float16 cannot hold a value."""
    joined = torch.cat([t.detach() for t in layers], dim=1)
    if joined.is_floating_point():
        limit = torch.finfo(torch.float16).max
        joined = joined.float().clamp(-limit, limit)
    return joined.cpu().numpy().astype(dtype)
