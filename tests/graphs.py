"""A replacement for CUDA graphs on a CPU: it runs operations when they are recorded, and again on replay."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten


class _Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.made.append((func, args, kwargs or {}, found))
        return found


class StandInGraph:
    """Like `torch.cuda.CUDAGraph`: replays use the same memory as the recording."""

    number = 0

    def __init__(self) -> None:
        self._operations = _Operations()
        type(self).number += 1

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "") -> None:
        self._operations.__enter__()

    def capture_end(self) -> None:
        self._operations.__exit__(None, None, None)

    def replay(self) -> None:
        for func, args, kwargs, output in self._operations.made:
            found = func(*args, **kwargs)
            for old, new in zip(tree_flatten(output)[0], tree_flatten(found)[0], strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the CPU record decode steps as a GPU does."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", StandInGraph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
