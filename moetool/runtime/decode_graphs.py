"""Decode steps as CUDA graphs: one launch for everything between two expert calls.

One token of a large model takes thousands of small launches, which take the CPU longer than the GPU takes to run them.
So a step is recorded once per batch shape and replayed from then on. Modules that must run in
Python are gaps between two graphs: experts, which ask the residency for slots, embeddings whose rows are read from
files, and modules with hooks. Without gaps a step is one graph.

Recording computes nothing and calls no gap: it needs only the shapes. A replayed step uses the kernels and shapes of a
step without graphs, so both give the same bits.
"""

import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from moetool.models.experts.moe_layers import MoeLayer
from moetool.models.stored_embedding import StoredEmbedding

_LOG = logging.getLogger(__name__)
MOST_PROGRAMS = 16
"""Most batch shapes with graphs at a time; the oldest is dropped. On an H100, eight layers of one shape take 4 MB."""
_MOST_REQUESTS = 32
"""Most requests of a step with graphs: above it the GPU has enough work per launch."""


class StepExperts(Protocol):
    """Computes the experts of a step (`moetool.runtime.experts.forward.ExpertRuntime`).

    Attributes:
        defers_events: whether experts may be computed before the residency receives their event.
        deferred_events: events of the step that it receives afterwards.
        recorded: graphs of experts usable in the step, by layer.
    """

    deferred_events: list[tuple[MoeLayer, torch.Tensor]]
    recorded: Mapping[int, "RecordedExperts"]

    @property
    def defers_events(self) -> bool: ...

    def computes_by_table(self, layer: MoeLayer, num_rows: int) -> bool:
        """Whether `compute_by_table` may be called for this number of choices."""

    def compute_by_table(
        self, layer: MoeLayer, hidden_TD: torch.Tensor, index_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> torch.Tensor:
        """Return the output [T, D] of a layer's experts, with slots from a table on the device."""


class RecordedExperts:
    """The products of a layer's experts as a graph, run once the host has all of them in slots.

    Args:
        pool: memory of the neighbouring graphs.
        compute: the function to record.
        hidden_TD, index_TK, weights_TK: its arguments, in memory of the previous graph.

    Attributes:
        output_TD: its result, in memory that the next graph reads.
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
        self._other: RecordedExperts | None = None  # for routes from another source
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
        """Return the output for the current input and routes, which a hook or a policy may have replaced."""
        if index_TK.data_ptr() == self._index_TK.data_ptr() and weights_TK.data_ptr() == self._weights_TK.data_ptr():
            self._graph.replay()
            return self.output_TD
        if self._other is None or self._other._index_TK.shape != index_TK.shape:
            # In separate memory: the neighbouring graphs use theirs now, and observers keep the router's choice.
            pool, routes = torch.cuda.graph_pool_handle(), (index_TK.clone(), weights_TK.clone())
            self._other = RecordedExperts(pool, self._compute, self._hidden_TD, *routes)
        self._other._index_TK.copy_(index_TK)
        self._other._weights_TK.copy_(weights_TK)
        self._other._graph.replay()
        return self._other.output_TD


class DecodeGraphs:
    """Runs a model's decode steps, and records each shape when it occurs for the second time.

    Args:
        model: a transformers model on a GPU.
        runtime: computes the experts.
        locate: adds values to the model's arguments that must be computed on the device, inside the graph.

    Effects: keeps graphs and their memory on the GPU. Call it on a stream other than the default one.
    """

    def __init__(
        self,
        model: Any,
        layers: Sequence[MoeLayer],
        runtime: StepExperts,
        locate: Callable[[dict[str, Any], int], dict[str, Any]],
    ) -> None:
        self._model = model
        self._runtime = runtime
        self._locate = locate
        self._layer_of = {layer.experts: layer for layer in layers}
        self._modules = [module for module in model.modules() if module is not model]
        self._embeddings = [module for module in self._modules if isinstance(module, StoredEmbedding)]
        self._pool = torch.cuda.graph_pool_handle()
        self._programs: OrderedDict[Any, _Program | None] = OrderedDict()  # None: seen once
        self._failed = False

    @property
    def num_recorded(self) -> int:
        """Number of batch shapes with graphs."""
        return sum(program is not None for program in self._programs.values())

    def __call__(self, kwargs: dict[str, Any], room: int) -> torch.Tensor:
        """Run a step; returns the logits, valid until the next step.

        Args:
            kwargs: the model's arguments.
            room: padded keys of each sequence.
        """
        program = self._program(kwargs, room)
        if program is None:
            return self._model(**self._locate(kwargs, room)).logits
        self._runtime.deferred_events, self._runtime.recorded = list(program.events), program.recorded
        try:
            return program.replay()
        finally:
            self._runtime.recorded = {}

    def _program(self, kwargs: dict[str, Any], room: int) -> "_Program | None":
        """Return the step's graphs, recorded when its shape occurs for the second time; None if it has none."""
        num_requests = kwargs["input_ids"].shape[1]
        if self._failed or num_requests > _MOST_REQUESTS:
            return None
        hooked = [module for module in self._modules if module._forward_pre_hooks or module._forward_hooks]
        apart = {*self._layer_of, *self._embeddings}
        if any(inner in apart for module in hooked for inner in list(module.modules())[1:]):
            return None  # a gap within a gap
        whole = self._runtime.defers_events and not hooked
        gaps = [] if whole else [*self._layer_of, *(module for module in hooked if module not in self._layer_of)]
        gaps += [module for module in self._embeddings if module not in gaps]
        key = (num_requests, room, whole, *map(id, hooked))
        if key not in self._programs:
            self._programs[key] = None
            return None
        program = self._programs[key]
        self._programs.move_to_end(key)
        if program is not None:
            return program
        try:
            program = self._programs[key] = self._record(kwargs, room, gaps)
        except Exception as error:  # a model's forward may do anything, and libraries fail in many ways
            self._failed = True
            self._programs.clear()
            _LOG.warning("decode steps run without CUDA graphs: %s", error)
            return None
        recorded = [key for key, found in self._programs.items() if found is not None]
        for oldest in recorded[: len(recorded) - MOST_PROGRAMS]:
            del self._programs[oldest]
        return program

    def _record(self, kwargs: dict[str, Any], room: int, gaps: list[Any]) -> "_Program":
        torch.cuda.synchronize(self._model.device)
        program = _Program(self._pool)
        try:
            with self._as_gaps(gaps, program), program.recording():
                program.logits = self._model(**self._locate(kwargs, room)).logits
            program.events = self._runtime.deferred_events
        finally:
            self._runtime.deferred_events = []
        return program

    @contextlib.contextmanager
    def _as_gaps(self, modules: list[Any], program: "_Program") -> Iterator[None]:
        """Record modules as gaps meanwhile, without their hooks."""
        kept = [(m, m._forward_pre_hooks, m._forward_hooks, m.__dict__.get("forward")) for m in modules]
        try:
            for module in modules:
                layer = self._layer_of.get(module)
                made = module.placeholder if isinstance(module, StoredEmbedding) else module.forward
                made = made if layer is None else partial(self._record_experts, program, layer)
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
        """Return an output of a layer's experts, with any values, and its graph if it can have one."""
        if len(routes) != 2 or not self._runtime.computes_by_table(layer, routes[0].numel()):
            return torch.zeros_like(hidden)
        compute = partial(self._runtime.compute_by_table, layer)
        compute(*map(torch.zeros_like, (hidden.reshape(-1, hidden.shape[-1]), *routes)))  # compiles kernels now
        found = RecordedExperts(self._pool, compute, hidden.reshape(-1, hidden.shape[-1]), *routes)
        program.recorded[layer.index] = found
        return found.output_TD.view(hidden.shape)


class _Program:
    """Graphs, and the modules called between them.

    Attributes:
        recorded: graphs of the products of experts, by layer.
        logits: the step's logits, in the memory of the last graph.
        events: layers and routes computed inside the graphs.
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
        """Record the calling thread's work on its stream."""
        self._begin()
        try:
            yield
        except BaseException:
            with contextlib.suppress(RuntimeError):
                self._graphs[-1].capture_end()
            raise
        self._graphs[-1].capture_end()

    def gap(self, module: Any, make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """End a graph at a module's call, and begin the next one with outputs of the shape of `make`'s.

        Raises:
            RuntimeError: the module's arguments or outputs include more than tensors at fixed positions.
        """
        if "kv_batch" in kwargs:
            raise RuntimeError(f"{type(module).__name__} has hooks and receives values that change from step to step")
        self._graphs[-1].capture_end()
        output = make(*args, **kwargs)
        self._gaps.append((module, args, kwargs, _tensors(output)))
        self._begin()
        return output

    def replay(self) -> torch.Tensor:
        """Run a step; returns the logits."""
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
