"""Decode steps as CUDA graphs: one launch for everything between two calls of experts.

One token of a large model is thousands of small launches, and asking for them takes a processor ten times as long as
the GPU takes to carry them out. So a step is recorded once for each shape of batch and replayed from then on. Modules
that must run in Python are gaps between two graphs: experts, which ask the residency what is where, and whatever has a
hook. While every expert has a slot and nothing is hooked, a step is one graph.

Recording computes nothing and calls no gap: it only needs the shapes. Kernels and shapes of a replayed step are those
of the step that runs without graphs, so both give the same bits.
"""

import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, Protocol

import torch

from moetool.models.spec import MoeLayer

_LOG = logging.getLogger(__name__)
MOST_PROGRAMS = 16
"""Shapes of batches that have graphs at a time; the oldest gives way. On an H100 eight layers of one take 4 MB."""
_MOST_REQUESTS = 32
"""Requests of a step up to which it has graphs: above it the GPU has enough to do for each launch."""


class StepExperts(Protocol):
    """Computes the experts of a step (`moetool.runtime.expert_forward.ExpertRuntime`).

    Attributes:
        defers_events: whether experts may be computed before the residency gets their event.
        deferred_events: the events of the step that it gets afterwards.
        recorded: graphs of experts that may be used in the step, by layer.
    """

    deferred_events: list[tuple[MoeLayer, torch.Tensor]]
    recorded: Mapping[int, "RecordedExperts"]

    @property
    def defers_events(self) -> bool: ...

    def computes_by_table(self, layer: MoeLayer, num_rows: int) -> bool:
        """Whether `compute_by_table` may be called for so many choices."""

    def compute_by_table(
        self, layer: MoeLayer, hidden_TD: torch.Tensor, index_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> torch.Tensor:
        """The output [T, D] of a layer's experts, all of which are where a table on the device says."""


class RecordedExperts:
    """The products of a layer's experts as a graph, for when the host has brought all of them into slots.

    Args:
        pool: memory of the graphs that it runs between.
        compute: what is recorded.
        hidden_TD, index_TK, weights_TK: its arguments, in memory of the graph before.

    Attributes:
        output_TD: its result, in memory that the graph after reads.
    """

    def __init__(
        self,
        pool: Any,
        compute: Callable[..., torch.Tensor],
        hidden_TD: torch.Tensor,
        index_TK: torch.Tensor,
        weights_TK: torch.Tensor,
    ) -> None:
        self._compute = compute
        self._hidden_TD, self._index_TK, self._weights_TK = hidden_TD, index_TK, weights_TK
        self._other: RecordedExperts | None = None  # for routes that come from elsewhere
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            self.output_TD = compute(hidden_TD, index_TK, weights_TK)
        except BaseException:
            with contextlib.suppress(RuntimeError):
                self._graph.capture_end()
            raise
        self._graph.capture_end()

    def takes(self, hidden_TD: torch.Tensor) -> bool:
        """Whether it was recorded for this input."""
        return hidden_TD.data_ptr() == self._hidden_TD.data_ptr() and hidden_TD.shape == self._hidden_TD.shape

    def run(self, index_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        """The output for what the input's memory holds now, and routes that a hook or a policy may have replaced."""
        if index_TK.data_ptr() == self._index_TK.data_ptr() and weights_TK.data_ptr() == self._weights_TK.data_ptr():
            self._graph.replay()
            return self.output_TD
        if self._other is None or self._other._index_TK.shape != index_TK.shape:
            # In memory of its own: the graphs around it are using theirs now, and observers keep the router's choice.
            pool, routes = torch.cuda.graph_pool_handle(), (index_TK.clone(), weights_TK.clone())
            self._other = RecordedExperts(pool, self._compute, self._hidden_TD, *routes)
        self._other._index_TK.copy_(index_TK)
        self._other._weights_TK.copy_(weights_TK)
        self._other._graph.replay()
        return self._other.output_TD


class DecodeGraphs:
    """Runs the decode steps of a model, and records each shape of them when it comes for the second time.

    Args:
        model: a transformers model on a GPU.
        layers: its MoE layers.
        runtime: computes their experts.
        announce: called once before each step with the model's arguments; gives them with what else the model gets.
        locate: gives the same with what must be computed from them on the device first, inside the graph.

    Effects: keeps graphs and their memory on the GPU. To be called on a stream that is not the default one.
    """

    def __init__(
        self,
        model: Any,
        layers: Sequence[MoeLayer],
        runtime: StepExperts,
        announce: Callable[[dict[str, Any]], dict[str, Any]],
        locate: Callable[[dict[str, Any]], dict[str, Any]],
    ) -> None:
        self._model = model
        self._runtime = runtime
        self._announce = announce
        self._locate = locate
        self._layer_of = {layer.experts: layer for layer in layers}
        self._modules = [module for module in model.modules() if module is not model]
        self._pool = torch.cuda.graph_pool_handle()
        self._programs: OrderedDict[Any, _Program | None] = OrderedDict()  # None: has come once
        self._failed = False

    @property
    def num_recorded(self) -> int:
        """Shapes of batches that have graphs."""
        return sum(program is not None for program in self._programs.values())

    def forget(self) -> None:
        """Drop all graphs: the memory that they read, the KV cache's above all, is going to be another."""
        self._programs.clear()

    def _supports_logits_to_keep(self) -> bool:  # transformers asks a model for it
        return bool(self._model._supports_logits_to_keep())

    def __call__(self, **kwargs: Any) -> SimpleNamespace:
        """The step's `logits`, which hold until the next one."""
        kwargs = self._announce(kwargs)
        program = self._program(kwargs)
        if program is None:
            return SimpleNamespace(logits=self._model(**self._locate(kwargs)).logits)
        self._runtime.deferred_events, self._runtime.recorded = list(program.events), program.recorded
        try:
            return SimpleNamespace(logits=program.replay())
        finally:
            self._runtime.recorded = {}

    def _program(self, kwargs: dict[str, Any]) -> "_Program | None":
        """The graphs of a step, recorded if its shape comes for the second time; None where it has none."""
        num_requests = kwargs["input_ids"].shape[1]
        if self._failed or num_requests > _MOST_REQUESTS:
            return None
        hooked = [module for module in self._modules if module._forward_pre_hooks or module._forward_hooks]
        if any(inner in self._layer_of for module in hooked for inner in list(module.modules())[1:]):
            return None  # a gap within a gap
        whole = self._runtime.defers_events and not hooked
        gaps = [] if whole else [*self._layer_of, *(module for module in hooked if module not in self._layer_of)]
        key = (num_requests, *kwargs["key_rooms"].values(), whole, *map(id, hooked))
        if key not in self._programs:
            self._programs[key] = None
            return None
        program = self._programs[key]
        self._programs.move_to_end(key)
        if program is not None:
            return program
        try:
            program = self._programs[key] = self._record(kwargs, gaps)
        except Exception as error:  # a model may do anything in its forward, and a library may refuse it in many ways
            self._failed = True
            self.forget()
            _LOG.warning("decode steps run without CUDA graphs: %s", error)
            return None
        recorded = [key for key, found in self._programs.items() if found is not None]
        for oldest in recorded[: len(recorded) - MOST_PROGRAMS]:
            del self._programs[oldest]
        return program

    def _record(self, kwargs: dict[str, Any], gaps: list[Any]) -> "_Program":
        torch.cuda.synchronize(self._model.device)
        program = _Program(self._pool)
        try:
            with self._as_gaps(gaps, program), program.recording():
                program.logits = self._model(**self._locate(kwargs)).logits
            program.events = self._runtime.deferred_events
        finally:
            self._runtime.deferred_events = []
        return program

    @contextlib.contextmanager
    def _as_gaps(self, modules: list[Any], program: "_Program") -> Iterator[None]:
        """Have modules recorded as gaps meanwhile, without their hooks."""
        kept = [(m, m._forward_pre_hooks, m._forward_hooks, m.__dict__.get("forward")) for m in modules]
        try:
            for module in modules:
                layer = self._layer_of.get(module)
                made = module.forward if layer is None else partial(self._record_experts, program, layer)
                module._forward_pre_hooks, module._forward_hooks = OrderedDict(), OrderedDict()
                module.forward = partial(program.gap, module, made)
            yield
        finally:
            for module, before, after, forward in kept:
                module._forward_pre_hooks, module._forward_hooks = before, after
                del module.forward
                if forward is not None:
                    module.forward = forward

    def _record_experts(
        self, program: "_Program", layer: MoeLayer, hidden: torch.Tensor, *routes: torch.Tensor
    ) -> torch.Tensor:
        """An output of a layer's experts, whatever they compute, and a graph of it where there can be one."""
        if len(routes) != 2 or not self._runtime.computes_by_table(layer, routes[0].numel()):
            return torch.zeros_like(hidden)
        compute = partial(self._runtime.compute_by_table, layer)
        compute(*map(torch.zeros_like, (hidden.reshape(-1, hidden.shape[-1]), *routes)))  # kernels are compiled now
        found = RecordedExperts(self._pool, compute, hidden.reshape(-1, hidden.shape[-1]), *routes)
        program.recorded[layer.index] = found
        return found.output_TD.view(hidden.shape)


class _Program:
    """Graphs, and the modules that are called between them.

    Attributes:
        recorded: graphs of the products of experts, by layer.
        logits: of the step, in the memory of the last graph.
        events: layers and routes that are computed inside the graphs.
    """

    def __init__(self, pool: Any) -> None:
        self.logits: torch.Tensor | None = None
        self.events: list[tuple[MoeLayer, torch.Tensor]] = []
        self.recorded: dict[int, RecordedExperts] = {}
        self._pool = pool
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._gaps: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[torch.Tensor]]] = []

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record what the calling thread asks of the device on its stream."""
        self._begin()
        try:
            yield
        except BaseException:
            with contextlib.suppress(RuntimeError):
                self._graphs[-1].capture_end()
            raise
        self._graphs[-1].capture_end()

    def gap(self, module: Any, make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """End a graph where a module is called, and begin the next one with outputs of the shape that `make` gives.

        Raises:
            RuntimeError: the module's arguments or outputs are more than tensors at fixed places.
        """
        if "sequence_ends" in kwargs:
            raise RuntimeError(f"{type(module).__name__} has hooks and is told what changes from step to step")
        self._graphs[-1].capture_end()
        output = make(*args, **kwargs)
        self._gaps.append((module, args, kwargs, _tensors(output)))
        self._begin()
        return output

    def replay(self) -> torch.Tensor:
        """Run a step; gives the logits."""
        for graph, (module, args, kwargs, outputs) in zip(self._graphs, self._gaps, strict=False):
            graph.replay()
            for output, found in zip(outputs, _tensors(module(*args, **kwargs)), strict=True):
                if output.data_ptr() != found.data_ptr():
                    output.copy_(found)
        self._graphs[-1].replay()
        assert self.logits is not None
        return self.logits

    def _begin(self) -> None:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")  # other threads copy meanwhile
        self._graphs.append(graph)


def _tensors(output: Any) -> list[torch.Tensor]:
    values = output if isinstance(output, tuple) else (output,)
    if not all(value is None or isinstance(value, torch.Tensor) for value in values):
        raise RuntimeError(f"a module that has hooks returns {type(output).__name__}, expected tensors")
    return [value for value in values if value is not None]
