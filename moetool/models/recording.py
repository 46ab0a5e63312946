"""Recording what the routers of a running model do."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch.utils.hooks import RemovableHandle

from moetool.models.decoding import Batch
from moetool.models.families import FAMILIES
from moetool.models.routing import watch
from moetool.models.spec import MoeLayer
from moetool.trace import TokenBatch


class GateRecorder:
    """Hooks on the routers and experts of a model that collect one forward at a time.

    The experts and weights are those that were really used (`moetool.models.routing.watch`).

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
        family = FAMILIES.get(model.config.get_text_config().model_type)
        self._probabilities = family is not None and family.probabilities
        for layer in layers:
            self._handles.append(watch(layer, self._on_routes))
            if self._logits is not None or self._hidden is not None:
                self._handles.append(layer.router.register_forward_hook(self._on_router(layer)))
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

        Until here everything stays on the model's device: each column costs one copy from it, not one a layer.

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
        embedding = None if self._embedding is None else self._embedding.float().cpu().numpy()
        self.discard()
        return rows, embedding

    def _on_routes(self, experts_TK: torch.Tensor, weights_TK: torch.Tensor) -> None:
        self._experts.append(experts_TK)
        self._weights.append(weights_TK)

    def _on_router(self, layer: MoeLayer) -> Any:
        def hook(module: Any, args: tuple[torch.Tensor, ...], output: Any) -> None:
            if self._logits is not None:
                logits = output[layer.logits_index] if isinstance(output, tuple) else output
                logits = logits[:, : layer.num_experts]  # zaya has a further one, for no expert
                self._logits.append(logits.log() if self._probabilities else logits)
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
