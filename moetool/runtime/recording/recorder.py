"""Record the routers of a running model."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch.utils.hooks import RemovableHandle

from moetool.base import families
from moetool.models.experts.moe_layers import MoeLayer
from moetool.models.router_hooks import is_unrecorded, logits_ahead, read_logits, to_float16, watch
from moetool.models.router_scores import SelectionScores, watch_norms
from moetool.runtime.decoding import Batch
from moetool.runtime.recording.resident_gates import ResidentForward
from moetool.trace.rows import TokenBatch

_FROM_LOGITS = frozenset({"logits", "logits32", "scores"})


class GateRecorder:
    """Hooks on the routers and experts of a model that collect one forward at a time.

    Experts and weights are those that the model used (`moetool.models.router_hooks.watch`).

    Args:
        keep: `logits`, `hidden`, `ahead`, `resident`, `scores`, `logits32`, `norms` and `embeddings` besides the
            experts and their weights.
        ahead: number of layers that `ahead` looks ahead.
        resident: share of a layer's experts that `resident` assumes resident.
        watch_partial: registers a function that receives the logits of each layer but the first, if a server computes
            `resident` itself (`ExpertRuntime.watch_partial_logits`).

    Effects: adds forward hooks, which `close` removes.

    Raises:
        UsageError: the model does not provide a column (`moetool.runtime.recording.resident_gates`,
            `moetool.models.router_scores`).
    """

    def __init__(
        self,
        model: Any,
        layers: list[MoeLayer],
        keep: Iterable[str],
        ahead: int = 3,
        *,
        resident: float = 0.5,
        watch_partial: Callable[[Callable[[torch.Tensor], None]], RemovableHandle] | None = None,
    ) -> None:
        keep = frozenset(keep)
        self._held: list[tuple[Batch, dict[str, list[torch.Tensor]], torch.Tensor | None]] = []
        self._experts: list[torch.Tensor] = []
        self._weights: list[torch.Tensor] = []
        self._keep = keep
        self._scores = SelectionScores(model, layers) if "scores" in keep else None
        self._logits: list[torch.Tensor] | None = [] if keep & _FROM_LOGITS else None
        self._norms: list[torch.Tensor] | None = [] if "norms" in keep else None
        self._hidden: list[torch.Tensor] | None = [] if "hidden" in keep else None
        self._ahead: list[torch.Tensor] | None = [] if "ahead" in keep else None
        self._resident: list[torch.Tensor] | None = [] if "resident" in keep else None
        made_here = self._resident is not None and watch_partial is None
        self._resident_forward = ResidentForward(model, layers, resident, self._on_resident) if made_here else None
        self._distance = ahead
        self._layers = layers
        self._embedding: torch.Tensor | None = None
        self._handles: list[RemovableHandle] = []
        if self._resident is not None and watch_partial is not None:
            self._handles.append(watch_partial(self._on_resident))
        self._family = families.known(model.config.get_text_config().model_type)
        for layer in layers:
            self._handles.append(watch(layer, self._on_routes))
            if self._norms is not None:
                self._handles.append(watch_norms(layer, self._norms.append))
            if keep & {*_FROM_LOGITS, "hidden", "ahead"}:
                self._handles.append(layer.router.register_forward_hook(self._on_router(layer), with_kwargs=True))
        if "embeddings" in keep:
            self._handles.append(model.get_input_embeddings().register_forward_hook(self._on_embedding))

    def close(self) -> None:
        """Remove the hooks."""
        while self._handles:
            self._handles.pop().remove()
        if self._resident_forward is not None:
            self._resident_forward.close()

    def begin_batch(self) -> None:
        """Reset the assumed residents of column `resident`."""
        if self._resident_forward is not None:
            self._resident_forward.begin()

    def discard(self) -> None:
        """Drop the data collected since the last `hold` or `take`, after a failed forward."""
        for columns in self._columns().values():
            columns.clear()
        self._embedding = None

    def take(self, batch: Batch) -> tuple[TokenBatch, np.ndarray | None]:
        """Return the last forward's rows and embeddings, as `rows` does."""
        self.hold(batch)
        return self.rows()

    def hold(self, batch: Batch) -> None:
        """Keep the last forward's data on its device."""
        if self._resident is not None:
            self._resident.append(torch.zeros_like(self._resident[-1]))  # after the last layer
        self._held.append((batch, {name: list(tensors) for name, tensors in self._columns().items()}, self._embedding))
        self.discard()

    def rows(self) -> tuple[TokenBatch, np.ndarray | None]:
        """Return and release the rows of all held forwards, at least one.

        Data stays on the model's device until then: each column costs one copy, not one per layer.

        Returns:
            The rows, and the output of the embedding layer [T, D] float32 or None.
        """
        held, self._held = self._held, []
        batches = [batch for batch, _, _ in held]
        joined = {name: _join([columns[name] for _, columns, _ in held]) for name in held[0][1]}
        logits_TF = joined.pop("logits", None)
        halves = {name: to_float16(values) for name, values in joined.items() if name != "experts"}
        if logits_TF is not None and "logits" in self._keep:
            halves["logits"] = to_float16(logits_TF)
        wide = None if logits_TF is None or "logits32" not in self._keep else logits_TF.float().cpu().numpy()
        sizes = [len(batch.token_id_T) for batch in batches]
        rows = TokenBatch(
            request_T=_chain((batch.info.request_T for batch in batches), np.int32),
            forward_T=np.repeat(np.array([batch.info.forward_id for batch in batches], np.int32), sizes),
            phase_T=_chain((batch.info.phase_T for batch in batches), np.uint8),
            iteration_T=_chain((batch.iteration_T for batch in batches), np.int32),
            position_T=_chain((batch.info.position_T for batch in batches), np.int32),
            token_id_T=_chain((batch.token_id_T for batch in batches), np.int32),
            experts_TS=joined["experts"].cpu().numpy().astype(np.uint16),
            weights_TS=halves["weights"],
            logits_TF=halves.get("logits"),
            hidden_TH=halves.get("hidden"),
            ahead_TR=halves.get("ahead"),
            resident_TW=halves.get("resident"),
            scores_TF=None if self._scores is None or logits_TF is None else self._scores(logits_TF),
            logits32_TF=wide,
            norms_TS=halves.get("norms"),
        )
        embeddings = [embedding for _, _, embedding in held if embedding is not None]
        return rows, torch.cat(embeddings).float().cpu().numpy() if embeddings else None

    def _columns(self) -> dict[str, list[torch.Tensor]]:
        """Collected tensors, one per layer."""
        columns = {
            "experts": self._experts,
            "weights": self._weights,
            "logits": self._logits,
            "hidden": self._hidden,
            "ahead": self._ahead,
            "resident": self._resident,
            "norms": self._norms,
        }
        return {name: tensors for name, tensors in columns.items() if tensors is not None}

    def _on_routes(self, experts_TK: torch.Tensor, weights_TK: torch.Tensor) -> None:
        self._experts.append(_kept(experts_TK))
        self._weights.append(_kept(weights_TK))

    def _on_router(self, layer: MoeLayer) -> Any:
        following = self._layers[layer.index + 1 : layer.index + 1 + self._distance]

        def hook(module: Any, args: tuple[torch.Tensor, ...], kwargs: dict[str, Any], output: Any) -> None:
            if is_unrecorded():
                return
            if self._logits is not None:
                self._logits.append(_kept(read_logits(layer, output, self._family)))
            if self._hidden is not None:
                self._hidden.append(_kept(args[0].reshape(-1, args[0].shape[-1])))
            if self._ahead is not None:
                self._ahead.append(self._look_ahead(following, args, kwargs))

        return hook

    def _look_ahead(self, following: list[MoeLayer], args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
        """[T, A * E] of the widest layer, 0 beyond the last layer."""
        num_tokens = args[0].reshape(-1, args[0].shape[-1]).shape[0]
        width = max(layer.num_experts for layer in self._layers)
        looked_ATE = args[0].new_zeros(self._distance, num_tokens, width, dtype=torch.float32)
        if following:
            logits_ATE = logits_ahead(following, args, kwargs, self._family)
            looked_ATE[: len(following), :, : logits_ATE.shape[2]] = logits_ATE
        return looked_ATE.transpose(0, 1).reshape(num_tokens, -1)

    def _on_resident(self, logits_TE: torch.Tensor) -> None:
        assert self._resident is not None
        width = max(layer.num_experts for layer in self._layers)
        self._resident.append(torch.nn.functional.pad(logits_TE, (0, width - logits_TE.shape[1])))

    def _on_embedding(self, module: Any, args: Any, output: torch.Tensor) -> None:
        self._embedding = output.reshape(-1, output.shape[-1])


def _kept(values: torch.Tensor) -> torch.Tensor:
    """A copy on a CPU, where the next layers of a recorded step use the same memory."""
    return values.clone() if values.device.type == "cpu" else values


def _join(forwards: list[list[torch.Tensor]]) -> torch.Tensor:
    """[T, sum of widths] from one [T, width] tensor a layer, of each forward."""
    layers = forwards[0] if len(forwards) == 1 else [torch.cat(parts) for parts in zip(*forwards, strict=True)]
    return torch.cat([layer.detach() for layer in layers], dim=1)


def _chain(parts: Iterable[tuple[int, ...]], dtype: Any) -> np.ndarray:
    return np.concatenate([np.asarray(part, dtype) for part in parts])
