"""Compute experts in host memory instead of copying them to the device."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch

from moetool.models.experts.expert_form import ExpertForm
from moetool.runtime.experts.device_stores import Store


class HostCompute:
    """Computes experts out of the host tier of a store.

    On a CPU the calling thread computes it, bit-identical to an expert in a slot. Beside a GPU another thread computes
    it while the GPU computes other experts; the GPU runs the family's last operation on the output (`finish`, which may
    have weights).

    Args:
        store: made with `hosts`; one or several.

    Effects: `close` ends the thread.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._thread = ThreadPoolExecutor(1, "expert-host") if store.copies.staged else None

    def start(self, form: ExpertForm, key: int, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start to compute an expert for its tokens `x`; returns a function that waits for the output.

        Raises:
            MoetoolError: the expert could not be read. The returned function raises it too.
        """
        if self._thread is None:
            output = self._compute(form, key, x)
            return lambda: output
        # Waits for the device once: x must arrive before the thread can begin.
        future = self._thread.submit(self._compute, replace(form, finish=None), key, x.cpu())
        return lambda: move_output(form, future.result(), x.device)

    def close(self) -> None:
        """Finish pending computations."""
        if self._thread is not None:
            self._thread.shutdown()

    def _compute(self, form: ExpertForm, key: int, x: torch.Tensor) -> torch.Tensor:
        began = time.perf_counter()
        with torch.inference_mode(), self._store.host(key) as weights:
            output = form.compute(x, weights)
        if self._store.meter is not None:
            self._store.meter.hosted(time.perf_counter() - began)
        return output


def move_output(form: ExpertForm, output: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Move an expert's output to this device, and apply the family's last operation with local weights."""
    output = output.to(device)
    return output if form.finish is None else form.finish(output)
