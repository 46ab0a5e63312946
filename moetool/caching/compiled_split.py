"""A split of misses that compiled code decides (`moetool.caching.split_kernels`), with the decisions of Python."""

from collections.abc import Collection, Iterable, Sequence

import numpy as np

from moetool.base.types import GateEvent
from moetool.caching.host_split import tokens_of
from moetool.caching.machine_split import PREFETCH, MachineSplit


class CompiledSplit:
    """Takes the decisions of a split in its place, for compiled events and for those that Python runs.

    In Python trying every split of an event with reads takes milliseconds.

    Args:
        split: its costs are read at the first event; its own model of the machine is not used.

    Attributes:
        table: sizes, state and addresses, for compiled code.
    """

    def __init__(self, split: MachineSplit) -> None:
        from moetool.caching import event_kernels, split_kernels  # numba takes half a second to import

        self._split, self._kernels, self._places = split, event_kernels, split_kernels
        self.table = np.zeros(split_kernels.TABLE_SIZE, np.int64)
        self._arrays: list[np.ndarray] = []

    def compile(self) -> None:
        """Compile what Python calls, so that no request waits for it."""
        self._kernels.compile_split()

    @property
    def active(self) -> bool:
        """Whether misses are split now."""
        return self._split.active

    def begin_event(self) -> bool:
        """Read the costs before the first event; returns `active`."""
        if not self._arrays:
            self._fill(self._split)
        return self.active

    def choose(
        self, event: GateEvent, hits: Collection[int], misses: Sequence[int], worth: Sequence[float]
    ) -> set[int]:
        """`MachineSplit.choose`."""
        self.begin_event()
        single = len(event.experts_TK) == 1
        tokens_E = np.array([] if single else tokens_of(event, self._split.spec), np.int64)
        keys = [np.array(list(keys), np.int64) for keys in (hits, misses, misses)]
        hosted = self._kernels.choose(self.table, single, tokens_E, *keys[:2], np.array(worth, float), keys[2])
        return set(keys[2][:hosted].tolist())

    def note(self, steps: Iterable[tuple[int, int, int, int]]) -> None:
        """`MachineSplit.note`."""
        for kind, key, _, evicted in steps:
            if kind == PREFETCH:
                self._kernels.note(self.table, key, evicted)

    def admits(self, free: bool) -> bool:
        """`MachineSplit.admits`."""
        return free or bool(self.table[self._places.QUEUED] <= self._places.MOST_QUEUED)

    def _fill(self, split: MachineSplit) -> None:
        k, costs, stride = self._places, split.costs, split.spec.num_experts
        num = split.spec.num_layers * stride
        in_memory_2A = np.full((2, num + 1), -1, np.int32)
        in_memory_2A[:, num] = num
        cost_8 = [costs.load_s, costs.host_s, costs.device_s, costs.layer_s]
        cost_8 += [costs.start_s, costs.link_share, costs.host_share, costs.disk_s]
        for at, value in {
            k.BOTH: split.mode == "both",
            k.IN_MEMORY: -1 if split.host_experts is None else split.host_experts,
            k.HOST_KNOTS: len(costs.host_knots),
            k.DEVICE_KNOTS: len(costs.device_knots),
            k.KEYS: num,
            k.EXPERTS: stride,
            k.COST_8: np.array(cost_8),
            k.HOST_K2: np.array(costs.host_knots, float),
            k.DEVICE_K2: np.array(costs.device_knots, float),
            k.KEY_Q: np.zeros(num + 1, np.int64),
            k.LEFT_Q: np.zeros(num + 1),
            k.QUEUED_A: np.zeros(num, np.uint8),
            k.NEXT_A: in_memory_2A[0],
            k.LAST_A: in_memory_2A[1],
            k.WORK_3: np.zeros(3),
            k.FLOAT_3N: np.zeros((3, stride)),
            k.INT_4N: np.zeros((4, stride), np.int64),
            k.MARK_3N: np.zeros((3, stride), np.uint8),
            k.SIDE_22N: np.zeros((2, 2, stride + 1)),
        }.items():
            if isinstance(value, np.ndarray):
                self._arrays.append(value)
                value = value.ctypes.data
            self.table[at] = value
