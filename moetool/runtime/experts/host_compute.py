"""Compute experts in host memory instead of copying them to the device."""

import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial

import torch

from moetool.models.experts.expert_form import ExpertForm
from moetool.runtime.experts.device_stores import Store


class HostCompute:
    """Computes experts out of the host tier of a store, all of an event that are there in one call per product.

    On a CPU the calling thread computes them, bit-identical to experts in slots. Beside a GPU another thread computes
    them on the cores that torch uses, while the GPU computes other experts. Their rows come and go in one copy each;
    the GPU runs the family's last operation on the output (`finish`, which may have weights).

    Args:
        store: made with `hosts`; one or several.

    Effects: `close` ends the thread.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._thread = ThreadPoolExecutor(1, "expert-host") if store.copies.staged else None

    def start(
        self, form: ExpertForm, keys: Sequence[int], xs: Sequence[torch.Tensor]
    ) -> list[Callable[[], torch.Tensor]]:
        """Start to compute experts for their tokens; returns functions that wait for the output of each.

        Raises:
            MoetoolError: an expert could not be read. The returned functions raise it too.
        """
        if self._thread is None:
            return [partial(_same, output) for output in self._compute(form, keys, xs)]
        counts = [len(x) for x in xs]
        # Waits for the device once: rows must arrive before the thread can begin.
        rows = torch.cat(tuple(xs)).cpu().split_with_sizes(counts)
        future = self._thread.submit(self._compute, replace(form, finish=None), keys, rows)
        device = xs[0].device
        outputs = cache(lambda: torch.cat(future.result()).to(device).split_with_sizes(counts))
        return [partial(_finished, form, outputs, i, device) for i in range(len(keys))]

    def close(self) -> None:
        """Finish pending computations."""
        if self._thread is not None:
            self._thread.shutdown()

    def _compute(self, form: ExpertForm, keys: Sequence[int], xs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        outputs: list[torch.Tensor] = []
        while len(outputs) < len(keys):
            began, first = time.perf_counter(), len(outputs)
            with torch.inference_mode(), contextlib.ExitStack() as held:
                weights = [held.enter_context(self._store.host(keys[first]))]
                for key in keys[first + 1 :]:  # only one is read: buffers for more need not be free
                    if (copy := self._store.host_copy(key)) is None:
                        break
                    weights.append(held.enter_context(copy))
                outputs += form.compute_each(xs[first : first + len(weights)], weights)
            seconds = time.perf_counter() - began
            self._store.stores[0].note_hosted(seconds)
            if self._store.meter is not None:
                for _ in weights:
                    self._store.meter.hosted(seconds / len(weights))
        return outputs


def _finished(
    form: ExpertForm, outputs: Callable[[], Sequence[torch.Tensor]], number: int, device: torch.device
) -> torch.Tensor:
    return move_output(form, outputs()[number], device)


def _same(output: torch.Tensor) -> torch.Tensor:
    return output


def move_output(form: ExpertForm, output: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Move an expert's output to this device, and apply the family's last operation with local weights."""
    output = output.to(device)
    return output if form.finish is None else form.finish(output)
