"""Run a residency's program: what each step means, on any machine.

A machine is anything with slots: a CPU, a GPU, several devices, or simulated time. It starts loads without waiting, and
waits for an expert only where it computes it.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

from moetool.caching.residency import Step, StepKind

_COMPUTE, _LOAD, _HOST = StepKind.COMPUTE, StepKind.LOAD, StepKind.HOST


class Machine(Protocol):
    """Runs the steps of one event.

    Attributes:
        in_waves: whether it computes experts together. A wave ends where a load reuses the slot of one of its experts.
            Otherwise each expert is computed before the next step.
    """

    in_waves: bool

    def load(self, steps: Sequence[Step], idle: bool) -> None:
        """Start on-demand loads. Args: idle: whether there is nothing to compute before the only one of them."""

    def prefetch(self, step: Step) -> None:
        """Start a load that goes behind all on-demand loads."""

    def wait(self, steps: Iterable[Step]) -> None:
        """Let later computation wait for these loads, whose experts the event does not need."""

    def compute_on_host(self, steps: Sequence[Step]) -> None:
        """Start to compute experts in host memory."""

    def compute(self, wave: Sequence[Step]) -> None:
        """Compute experts in their slots, each once it is there; then the slots may be reused."""


def run(steps: Sequence[Step], machine: Machine) -> None:
    """Run a program (`moetool.caching.residency.Residency.event`).

    Loads start in order. The host begins once the loads before the first computed expert have started. The rest of a
    whole layer, which is loaded on demand although the event does not need it, delays the event's next expert.
    """
    in_waves = machine.in_waves
    wave: dict[int, Step] = {}  # by slot
    loads: list[Step] = []  # not started
    hosted: list[Step] = []
    unneeded: list[Step] = []
    needed: set[int] | None = None
    for step in steps:
        kind = step.kind
        if kind is _COMPUTE:
            if loads:
                idle = not wave and not hosted and len(loads) == 1 and loads[0].key == step.key
                machine.load(loads, idle)
                loads = []
            if hosted:
                machine.compute_on_host(hosted)
                hosted = []
            if unneeded:
                machine.wait(unneeded)
                unneeded = []
            if in_waves:
                wave[step.slot] = step
            else:
                machine.compute((step,))
        elif kind is _HOST:
            hosted.append(step)
        else:
            if step.slot in wave or (loads and kind is not _LOAD):
                if loads:
                    machine.load(loads, False)
                    loads = []
                if step.slot in wave:
                    machine.compute(tuple(wave.values()))
                    wave.clear()
            if kind is _LOAD:
                if needed is None:
                    needed = {other.key for other in steps if other.kind is _COMPUTE}
                loads.append(step)
                if step.key not in needed:
                    unneeded.append(step)
            else:
                machine.prefetch(step)
    if loads:
        machine.load(loads, False)
    if hosted:
        machine.compute_on_host(hosted)
    if wave:
        machine.compute(tuple(wave.values()))
