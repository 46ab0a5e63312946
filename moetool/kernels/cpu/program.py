"""Lists of calls of compiled functions, run by one call from Python."""

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from moetool.kernels.cpu.threads import thread_pool

_HEAD = 3
"""Numbers of a call before its job: numbers to the next call, function, whether it may use several threads."""


class Program:
    """Calls of compiled functions with their jobs, in order.

    Jobs are appended first; `close` then fixes their addresses. A job may hold the address of an entry of another one
    (`refer`), and functions may write into jobs of later calls.

    Effects: keeps `kept`, whose memory its jobs refer to, alive.
    """

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._references: list[tuple[int, int]] = []
        self._array: np.ndarray | None = None
        self._header = np.array([0, 0, _start_address(), 1, 0], np.int64)
        self._call = _runner()
        self.kept: list[Any] = []

    @property
    def header(self) -> int:
        """Address of the numbers that its calls may read (`moetool.kernels.cpu.step_operations.run`)."""
        return self._header.ctypes.data

    def __len__(self) -> int:
        """Position of the next call."""
        return len(self._numbers) if self._array is None else len(self._array)

    def add(self, function: int, job: Sequence[int], *, parallel: bool = False) -> int:
        """Append a call.

        Args:
            function: address of a function of a job.
            job: its numbers; the first one is 0 at each call.
            parallel: whether all threads call it.

        Returns:
            The position of the job.
        """
        self._numbers += (_HEAD + len(job), function, int(parallel), *job)
        return len(self._numbers) - len(job)

    def refer(self, position: int, target: int) -> None:
        """Write the address of the number at `target` to `position`."""
        self._references.append((position, target))

    def close(self) -> None:
        """Fix all addresses."""
        self._array = np.array(self._numbers, np.int64)
        base = self._array.ctypes.data
        for position, target in self._references:
            self._array[position] = base + 8 * target
        self._base, self._at, self._numbers = base, self.header, []

    def run(self, first: int, end: int, threads: int, *, complete: bool = False) -> int:
        """Run the calls from one position to another.

        Args:
            complete: stop before experts of which one is missing; otherwise those are left out.

        Returns:
            The position reached: `end`, or that of a call of `route` that stopped.
        """
        header = self._header
        header[0], header[1], header[3] = self._base + 8 * first, self._base + 8 * end, threads
        header[4] = complete
        self._call(self._at)
        return (int(header[0]) - self._base) // 8


def _runner() -> Any:
    from moetool.kernels.cpu.step_operations import run

    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(run.address)


def _start_address() -> int:
    """Address of the function that starts torch's threads; 0 if there is none."""
    start = thread_pool()
    return 0 if start is None else ctypes.cast(start, ctypes.c_void_p).value or 0
