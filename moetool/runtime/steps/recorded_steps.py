"""Run decode steps on a CPU as recorded programs, with stops only where Python has to decide or to observe."""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from moetool.models.experts.moe_layers import MoeLayer
from moetool.runtime.experts.forward import ExpertRuntime
from moetool.runtime.experts.machines import StepEvent
from moetool.runtime.kv.pages import KvBatch, KvPages
from moetool.runtime.steps.lowering import ExpertCall, LoweredStep, PageStrides, lower
from moetool.runtime.steps.recorder import ModuleCall, Unrecordable, record_step

_LOG = logging.getLogger(__name__)
MOST_ROWS = 8
"""Most sequences of a recorded step; the products of more rows are bound by arithmetic, not by calls."""


class RecordedSteps:
    """Recorded programs of a model's decode steps, one for each number of rows.

    Args:
        model: on a CPU; its modules compute what no program does.
        runtime: decides about experts.
        pages: the KV cache; its memory may move from step to step, but not its strides.

    Attributes:
        refused: why steps are not recorded; empty if they are.
        steps: number of steps run as programs.
        calls: calls of programs from Python in all of them.

    Effects: records steps of one row now, others when they first occur; keeps a workspace for each.
    """

    def __init__(self, model: Any, layers: Sequence[MoeLayer], runtime: ExpertRuntime, pages: KvPages) -> None:
        self._model, self._layers, self._runtime, self._pages = model, layers, runtime, pages
        self._steps: dict[int, LoweredStep] = {}
        self._scores = torch.zeros(0, dtype=torch.float32)
        self.refused = "" if model.dtype == torch.bfloat16 else f"the data type is {str(model.dtype)[6:]}"
        if any(keys is not None for keys in pages.index_keys):
            self.refused = "recorded steps have no function for its indexers"
        self.steps = self.calls = 0
        self._watched = {id(layer.router) for layer in layers} | {id(layer.experts) for layer in layers}
        self._hooks_of: dict[int, tuple[Any, Any]] = {}
        self._others: list[Any] = []
        for module in model.modules():
            hooks = (module._forward_pre_hooks, module._forward_hooks)
            called = module is model or module is model.get_input_embeddings() or _is_rotary(module)
            if id(module) in self._watched:
                self._hooks_of[id(module)] = hooks
            elif not called:
                self._others += hooks
        self._record(1)

    def takes(self, batch: KvBatch) -> bool:
        """Whether a batch's forward runs as a program now: each sequence has one new token, and no hook needs more."""
        rows = batch.query_ends[-1]
        if self.refused or rows != len(batch.query_ends) - 1 or rows > MOST_ROWS or any(self._others):
            return False
        self._record(rows)
        return rows in self._steps

    def _record(self, rows: int) -> None:
        """Record the steps of so many rows, unless that is done or refused."""
        if self.refused or rows in self._steps:
            return
        try:
            recording = record_step(self._model, self._layers, rows)
            self._steps[rows] = lower(recording, self._strides, self._runtime.native_weights)
        except Exception as error:  # a model's forward may do anything
            self.refused = str(error)
            level = logging.INFO if isinstance(error, Unrecordable) else logging.WARNING
            _LOG.log(level, "decode steps run module by module: %s", error)

    def run(self, ids: torch.Tensor, positions: torch.Tensor, batch: KvBatch) -> torch.Tensor:
        """Run a step that `takes` accepts; returns its logits [1, T, V], valid until the next step.

        Args:
            ids, positions: [1, T] int64.
        """
        step = self._steps[ids.shape[1]]
        recording = step.recording
        recording.ids.copy_(ids)
        recording.positions.copy_(positions)
        for before in recording.before:
            made = before.module(*before.args, **before.kwargs)
            for target, value in zip(tree_leaves(before.output), tree_leaves(made), strict=True):
                target.copy_(value)
        spans = self._bind(step, batch)
        self.steps += 1
        decided = 0  # number of layers whose events are reported or deferred
        at, ahead = 0, self._runtime.runs_ahead
        for place, call in self._stops(step, ahead):
            while at < place:
                at = self._run(step, at, place, ahead)
                decided = self._defer(step, decided, at)
                if at < place:
                    at = self._decide(step, step.experts[decided])
                    decided += 1
            if isinstance(call, ModuleCall):
                self._observe(call)
            elif call is not None:
                at = self._decide(step, call)
                decided += 1
        del spans
        return step.logits

    def _run(self, step: LoweredStep, first: int, end: int, ahead: bool) -> int:
        self.calls += 1
        return step.program.run(first, end, torch.get_num_threads(), complete=ahead)

    def _defer(self, step: LoweredStep, first: int, place: int) -> int:
        """Defer the events of layers computed before a position; returns the number of layers decided so far."""
        while first < len(step.experts) and step.experts[first].first < step.experts[first].after <= place:
            self._runtime.deferred_events.append((step.experts[first].layer, step.experts[first].inputs[1]))
            first += 1
        return first

    def _stops(self, step: LoweredStep, ahead: bool) -> list[tuple[int, ModuleCall | ExpertCall | None]]:
        """Positions at which Python observes or decides in any case, and the end."""
        stops: list[tuple[int, ModuleCall | ExpertCall | None]] = [(len(step.program), None)]
        stops += [(call.place, call) for call in step.routers if any(self._hooks_of[id(call.module)])]
        for call in step.experts:
            native = ahead and call.products is not None and self._runtime.locates(call.layer)
            if not native or any(self._hooks_of[id(call.layer.experts)]):
                stops.append((call.first, call))
        return sorted(stops, key=lambda stop: (stop[0], isinstance(stop[1], ExpertCall)))

    def _observe(self, call: ModuleCall) -> None:
        """Call a router's hooks with what it has read and returned."""
        module = call.module
        _call_hooks(module, module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs, call.args, call.kwargs)
        hooks = (module._forward_hooks, module._forward_hooks_with_kwargs)
        _call_hooks(module, *hooks, call.args, call.kwargs, call.output)

    def _decide(self, step: LoweredStep, call: ExpertCall) -> int:
        """Let the runtime decide about a layer's experts; returns where the program goes on."""
        experts = call.layer.experts
        self._runtime.report_deferred()
        if call.products is None or experts._forward_hooks or not self._runtime.locates(call.layer):
            call.output.copy_(experts(*call.inputs).view(call.output.shape))
            return call.after
        _call_hooks(experts, experts._forward_pre_hooks, experts._forward_pre_hooks_with_kwargs, call.inputs, {})

        def compute_located() -> None:
            self._run(step, call.first, call.summed, False)

        event = StepEvent(*call.inputs, call.products, compute_located)
        return call.first if self._runtime.locate(call.layer, event) else call.summed

    def _strides(self, layer: int) -> PageStrides:
        key, value = self._rows(layer)
        return PageStrides(2 * key.stride(0), 2 * key.stride(1), 2 * value.stride(0), 2 * value.stride(1))

    def _rows(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's keys and values; latents are both."""
        key, value = self._pages.keys[layer], self._pages.values[layer]
        return key, key if value is None else value

    def _bind(self, step: LoweredStep, batch: KvBatch) -> Any:
        """Write the addresses of the KV cache and of the batch's rows; returns what must stay alive meanwhile."""
        ends = batch.key_ends
        written, positions = batch.write_row_T.data_ptr(), batch.key_rows.data_ptr()
        spans: dict[int | None, np.ndarray] = {}
        pages = step.pages_L5
        num_keys = 0
        for layer, window in step.windows.items():
            if window not in spans:
                spans[window] = _spans(ends, window)
                num_keys = max(num_keys, int(spans[window][:, 1].sum()))
            key, value = self._rows(layer)
            pages[layer] = (key.data_ptr(), value.data_ptr(), written, positions, spans[window].ctypes.data)
        a_key, always = step.score_bytes
        if self._scores.nbytes < a_key * num_keys + always:
            self._scores = torch.zeros(2 * (a_key * num_keys + always) // 4 + 16, dtype=torch.float32)
        step.room[0] = self._scores.data_ptr()
        return spans


def _call_hooks(module: Any, hooks: Any, with_kwargs: Any, args: Any, kwargs: Any, *output: Any) -> None:
    for number, hook in hooks.items():
        given = (args, kwargs, *output) if with_kwargs.get(number) else (args, *output)
        if hook(module, *given) is not None:
            raise RuntimeError(f"a hook of {type(module).__name__} replaces what it observes")


def _spans(ends: Sequence[int], window: int | None) -> np.ndarray:
    """First key and number of keys of each sequence."""
    last = np.array(ends[1:], np.int64)
    first = np.array(ends[:-1], np.int64)
    if window is not None:
        first = np.maximum(first, last - window)
    return np.stack([first, last - first], axis=1)


def _is_rotary(module: Any) -> bool:
    return type(module).__name__.endswith("RotaryEmbedding")
