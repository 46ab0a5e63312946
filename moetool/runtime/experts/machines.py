"""Machines of `moetool.caching.program` that compute an event's experts from a store's slots."""

from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from moetool.caching.residency import Step, StepKind
from moetool.models.experts.expert_form import Share
from moetool.models.experts.moe_layers import MoeLayer
from moetool.runtime.experts.device_stores import Store
from moetool.runtime.experts.grouping import ROWS_TOGETHER, RowsByExpert
from moetool.runtime.experts.host_compute import HostCompute, move_output
from moetool.runtime.experts.slot_tables import SlotTables

_WAITED_BYTES = 2**20
"""Largest expert for which a recorded step waits for all experts of an event before it computes any."""


@dataclass(frozen=True, slots=True)
class ExpertPool:
    """A model's experts as its machines see them.

    Attributes:
        store: loads them into slots.
        host: computes them in host memory.
        started: keys of loads of the current event that have started already.
    """

    store: Store
    host: HostCompute
    started: set[int] = field(default_factory=set)


class StoreMachine:
    """Loads by a store, and computes experts that have arrived before it waits for others.

    Args:
        layer: the event's layer.
        rows_of: rows of each needed expert.
    """

    in_waves = True
    _input: Callable[[int], torch.Tensor]  # returns an expert's rows of the input
    _put: Callable[[int, torch.Tensor], None]  # receives its rows of the output

    def __init__(self, pool: ExpertPool, layer: MoeLayer, rows_of: Mapping[int, Sized]) -> None:
        self._store, self._host, self._started = pool.store, pool.host, pool.started
        self._form, self._rows_of = layer.form, rows_of
        self._first_key = pool.store.files.spec.expert_key(layer.index, 0)
        self._pending: list[tuple[int, Callable[[], torch.Tensor]]] = []  # experts computed elsewhere

    def load(self, steps: Sequence[Step], idle: bool) -> None:
        """See `moetool.caching.program.Machine`, also for the methods below."""
        if not idle:  # otherwise `ready` is next and loads it on this thread, sooner than another could
            self._store.load_together([(s.key, s.slot) for s in steps if s.key not in self._started])

    def prefetch(self, step: Step) -> None:
        self._store.load(step.key, step.slot, prefetch=True)

    def wait(self, steps: Iterable[Step]) -> None:
        for step in steps:
            self._store.ready(step.key, step.slot)

    def compute_on_host(self, steps: Sequence[Step]) -> None:
        keys: list[int] = []
        for step in steps:
            if (expert := step.key - self._first_key) < self._form.num_experts:
                keys.append(step.key)
            else:
                self._put(expert, self._input(expert))
        if keys:
            experts = [key - self._first_key for key in keys]
            outputs = self._host.start(self._form, keys, [self._input(expert) for expert in experts])
            self._pending += zip(experts, outputs, strict=True)

    def compute(self, wave: Sequence[Step]) -> None:
        group: list[Step] = []
        num_rows = 0
        for step in wave:
            expert = step.key - self._first_key
            if expert >= self._form.num_experts:  # it returns its input
                self._put(expert, self._input(expert))
                continue
            rows = len(self._rows_of[expert])
            if group and (num_rows + rows > ROWS_TOGETHER or not self._store.holds(step.key, step.slot)):
                self._compute_group(group)
                group, num_rows = [], 0
            group.append(step)
            num_rows += rows
        if group:
            self._compute_group(group)

    def finish(self) -> None:
        """Wait for experts computed elsewhere."""
        for expert, finished in self._pending:
            self._put(expert, finished())

    def _compute_group(self, group: Sequence[Step]) -> None:
        """Compute experts of at most `ROWS_TOGETHER` rows, or one."""
        raise NotImplementedError


class ExpertMachine(StoreMachine):
    """One product per expert, for any family, number of rows and number of devices.

    Args:
        needed: the experts of the program.
        rows: their inputs, and perhaps those of others; receives their outputs.
    """

    def __init__(self, pool: ExpertPool, layer: MoeLayer, needed: Iterable[int], rows: RowsByExpert) -> None:
        super().__init__(pool, layer, rows.rows_of)
        self._needed, self._input, self._put = needed, rows.input, rows.put
        self._sent: dict[int, torch.Tensor] | None = {} if len(self._store.devices) == 1 else None

    def compute(self, wave: Sequence[Step]) -> None:
        if self._sent is None:
            self._sent = self._send()
        super().compute(wave)

    def _send(self) -> dict[int, torch.Tensor]:
        """Send inputs to the devices that compute them; returns them by expert.

        All are sent before any device computes: a copy between two devices waits for both, so a later copy would make
        the model's device wait for the other's computation.
        """
        sent: dict[int, torch.Tensor] = {}
        hosted = {expert for expert, _ in self._pending}
        for expert in self._needed:
            device = self._store.device_of(self._first_key + expert)
            if device and expert < self._form.num_experts and expert not in hosted:
                sent[expert] = self._input(expert).to(self._store.devices[device])
        return sent

    def _compute_group(self, group: Sequence[Step]) -> None:
        store, first, sent = self._store, self._first_key, self._sent
        assert sent is not None
        here = [step for step in group if step.key - first not in sent] if sent else group
        if here:
            xs = [self._input(step.key - first) for step in here]
            outputs = self._form.compute_each(xs, [store.ready(step.key, step.slot) for step in here])
            store.computed([step.slot for step in here])
            for step, output in zip(here, outputs, strict=True):
                self._put(step.key - first, output)
        for step in group if len(here) < len(group) else ():
            if (x := sent.pop(step.key - first, None)) is not None:
                output = replace(self._form, finish=None).compute(x, store.ready(step.key, step.slot))
                store.computed([step.slot])
                self._pending.append((step.key - first, partial(move_output, self._form, output, store.devices[0])))


class RowMachine(StoreMachine):
    """All experts of few rows that are there in two calls, on a CPU (`ExpertForm.compute_rows`).

    Args:
        rows_of: positions in [T * K] of each needed expert.
        hidden_TD: input of all.
        few: most rows of an expert that shares calls.
    """

    def __init__(
        self, pool: ExpertPool, layer: MoeLayer, rows_of: dict[int, list[int]], hidden_TD: torch.Tensor, few: int
    ) -> None:
        super().__init__(pool, layer, rows_of)
        self._all_few = max(map(len, rows_of.values())) <= few
        self._positions_of, self._hidden_TD = rows_of, hidden_TD
        self._num_rows = sum(map(len, rows_of.values()))
        self._top_k = self._num_rows // len(hidden_TD)
        self._outputs: list[tuple[list[int], torch.Tensor]] = []
        self._in_place = False  # whether all rows were computed in their positions

    def products(self) -> torch.Tensor:
        """Return the unweighted outputs [T * K, D]."""
        self.finish()
        if self._in_place and len(self._outputs) == 1:
            return self._outputs[0][1]
        first = self._outputs[0][1]
        products = first.new_empty(self._num_rows, first.shape[1])
        for places, output in self._outputs:
            products[places] = output
        return products

    def _compute_group(self, group: Sequence[Step]) -> None:
        store, top_k = self._store, self._top_k
        shares: list[Share] = []
        places: list[int] = []
        whole = self._all_few and len(group) == len(self._positions_of)
        for step in group:
            its = self._positions_of[step.key - self._first_key]
            targets = its if whole else range(len(places), len(places) + len(its))
            shares.append(Share(store.ready(step.key, step.slot), [place // top_k for place in its], targets))
            places += its
        self._outputs.append((places, self._form.compute_rows(self._hidden_TD, shares, len(places))))
        self._in_place = whole
        store.computed([step.slot for step in group])

    def _input(self, expert: int) -> torch.Tensor:
        return self._hidden_TD[[place // self._top_k for place in self._positions_of[expert]]]

    def _put(self, expert: int, output: torch.Tensor) -> None:
        self._outputs.append((self._positions_of[expert], output))


@dataclass(frozen=True, slots=True)
class StepEvent:
    """A layer's event in a recorded step.

    Attributes:
        hidden_TD, index_TK, weights_TK: input of the experts.
        products_RD: their outputs, before their weights.
        compute_located: computes the experts that are in the layer's table.
    """

    hidden_TD: torch.Tensor
    index_TK: torch.Tensor
    weights_TK: torch.Tensor
    products_RD: torch.Tensor
    compute_located: Callable[[], None]


def keeps_experts(steps: Sequence[Step]) -> bool:
    """Whether all experts that a program computes are still in their slots after it."""
    computed: set[int] = set()
    for step in steps:
        if step.kind is StepKind.COMPUTE:
            computed.add(step.slot)
        elif step.kind is not StepKind.HOST and step.slot in computed:
            return False
    return True


def prefetches_beside(steps: Sequence[Step]) -> list[Step] | None:
    """The prefetches of a program that loads nothing else and keeps the experts that it computes; None of any other."""
    computed: set[int] = set()
    prefetches: list[Step] = []
    for step in steps:
        if step.kind is StepKind.COMPUTE:
            computed.add(step.slot)
        elif step.kind is StepKind.PREFETCH and step.slot not in computed:
            prefetches.append(step)
        else:
            return None
    return prefetches


class ProgramMachine(StoreMachine):
    """Locates experts for the calls of a recorded step, which compute them (`moetool.runtime.steps`).

    Args:
        tables: receive the addresses.
        rows_of: positions in [T * K] of each needed expert.
        defers: whether experts may be computed after the program (`keeps_experts`).

    Attributes:
        computed: whether experts have been computed; if not, all are located.
    """

    def __init__(
        self,
        pool: ExpertPool,
        layer: MoeLayer,
        tables: SlotTables,
        rows_of: Mapping[int, list[int]],
        event: StepEvent,
        *,
        defers: bool,
    ) -> None:
        super().__init__(pool, layer, rows_of)
        self._layer, self._tables, self._positions_of, self._event = layer, tables, rows_of, event
        self._defers = defers
        self._together = self._store.files.slot_bytes <= _WAITED_BYTES
        self.computed = False

    def compute(self, wave: Sequence[Step]) -> None:
        if self._together:
            self._compute_group(wave)
        else:
            super().compute(wave)

    def _compute_group(self, group: Sequence[Step]) -> None:
        experts = [step.key - self._first_key for step in group]
        for step, expert in zip(group, experts, strict=True):
            self._store.ready(step.key, step.slot)
            self._tables.place(self._layer, expert, step.slot)
        if not self._defers or len(group) < len(self._positions_of):
            self.computed = True
            with self._tables.only(self._layer, experts):
                self._event.compute_located()
        self._store.computed([step.slot for step in group])

    def _input(self, expert: int) -> torch.Tensor:
        top_k = self._event.index_TK.shape[1]
        return self._event.hidden_TD[[place // top_k for place in self._positions_of[expert]]]

    def _put(self, expert: int, output: torch.Tensor) -> None:
        self.computed = True
        self._event.products_RD[self._positions_of[expert]] = output
