"""Seconds of a decode step's layers without their routed experts, as served: recorded steps included."""

import time
from typing import Any, cast

import torch

from moetool.base.errors import MoetoolError
from moetool.models.experts.moe_layers import MoeLayer
from moetool.models.loading import LoadedModel
from moetool.runtime.experts.binding import bind_experts
from moetool.runtime.loop.batching import Batcher
from moetool.runtime.loop.own_caches import open_batcher
from moetool.runtime.request import SamplingParams

_STEPS = 12
_KV_TOKENS = 64


def layer_seconds(loaded: LoadedModel) -> float:
    """Return the seconds of a decode step of one request without its routed experts, by MoE layer.

    A step's embedding, dense layers and head count too, since transfers go on meanwhile. Of a few steps with a short
    context the fastest counts: other processes only add.

    Effects: binds the model's experts to ones that compute nothing; has the model's attention meanwhile.

    Raises:
        MoetoolError: a step failed.
    """
    absent = _NoExperts()
    bind_experts(loaded, absent)
    own = loaded.checkpoint.cache_size(loaded.model.dtype)
    batcher = open_batcher(loaded.model, max_requests=1, kv_tokens=_KV_TOKENS, max_batch_tokens=1, own=own)
    try:
        if isinstance(batcher, Batcher):
            batcher.record_steps(loaded.layers, cast(Any, absent))
        batcher.add(0, [0], SamplingParams(max_tokens=_STEPS + 1, ignore_eos=True))
        seconds = []
        while not batcher.idle:
            began = time.perf_counter()
            (output,) = batcher.step()
            if output.finish == "error":
                raise MoetoolError(
                    f"the device's time of a layer cannot be measured ({output.error}); serve with host_compute=off"
                )
            seconds.append(time.perf_counter() - began)
    finally:
        batcher.close()
    return min(seconds[1:]) / len(loaded.layers)


class _NoExperts:
    """Takes the place of the experts (`ComputesExperts`, `StepExperts`); their output is zero.

    The host receives the routes of each layer, as the residency does.
    """

    defers_events = runs_ahead = False

    def __init__(self) -> None:
        self.deferred_events: list[Any] = []
        self.recorded: dict[int, Any] = {}

    def forward(
        self, layer: MoeLayer, hidden_TD: torch.Tensor, index_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> torch.Tensor:
        index_TK.tolist()
        return torch.zeros_like(hidden_TD)

    scaled_products = forward

    def computes_by_table(self, layer: MoeLayer, num_rows: int) -> bool:
        return False

    def native_weights(self, layer: MoeLayer) -> None:
        return None

    def report_deferred(self) -> None: ...
