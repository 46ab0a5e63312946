"""Injected faults at every write operation of moetool."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.torch

PLACES: tuple[tuple[Any, str], ...] = (
    (Path, "mkdir"),
    (Path, "write_text"),
    (Path, "write_bytes"),
    (Path, "rename"),
    (Path, "replace"),
    (os, "fsync"),
    (pq, "write_table"),
    (pq.ParquetWriter, "write_table"),
    (pq.ParquetWriter, "close"),
    (pa.ipc.RecordBatchStreamWriter, "write_batch"),
    (pa.ipc.RecordBatchStreamWriter, "close"),
    (safetensors.torch, "save_file"),
)


class Fault(OSError):
    """The injected fault."""


def disk_full() -> None:
    raise Fault(28, "No space left on device")


@contextmanager
def fault_at(
    number: int, monkeypatch: pytest.MonkeyPatch, strike: Callable[[], None] = disk_full
) -> Iterator[Callable[[], bool]]:
    """Make the `number`-th write operation fail; yields whether it was reached.

    Args:
        number: counted over all kinds of write operations.
        strike: called instead of the operation.
    """
    state = {"left": number}

    def failing(real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if state["left"] == 0:
                state["left"] = -1
                strike()
            if state["left"] > 0:
                state["left"] -= 1
            return real(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        for owner, name in PLACES:
            patch.setattr(owner, name, failing(getattr(owner, name)))
        yield lambda: state["left"] < 0


def every_fault(run: Callable[[], Any], check: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> int:
    """Run once for each write operation, with that operation failing, and check the result; returns their number."""
    number = 0
    while True:
        with fault_at(number, monkeypatch) as struck:
            try:
                run()
            except Exception as error:
                assert struck(), error
        if not struck():
            return number
        check()
        number += 1
        assert number < 500
