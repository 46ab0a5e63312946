"""Experts on the host: together as far as host memory holds them, with the bits of each alone."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from moetool.models.experts.expert_form import ExpertForm, Part
from moetool.runtime.experts.host_compute import HostCompute

WIDTH = 64
FORM = ExpertForm(
    num_experts=8,
    parts=(Part(parameters=("up",), share=(WIDTH, WIDTH)), Part(parameters=("down",), share=(WIDTH, WIDTH))),
    gate=torch.nn.functional.silu,
)


class _Tier:
    """A store whose host memory holds some experts; it counts how many are held at once."""

    meter = None

    def __init__(self, present: set[int], staged: bool) -> None:
        torch.manual_seed(0)
        self.weights = [tuple(torch.randn(2, WIDTH, WIDTH)) for _ in range(8)]
        self.present, self.staged = present, staged
        self.copies = self
        self.stores = (self,)
        self.held, self.seconds = 0, 0.0
        self.groups: list[list[int]] = []

    @contextlib.contextmanager
    def host(self, key: int) -> Iterator[Any]:
        assert not self.held  # a second one might find no buffer
        self.groups.append([])
        with self._hold(key) as weights:
            yield weights

    def note_hosted(self, seconds: float) -> None:
        self.seconds += seconds

    def host_copy(self, key: int) -> Any:
        return self._hold(key) if key in self.present else None

    @contextlib.contextmanager
    def _hold(self, key: int) -> Iterator[Any]:
        self.held += 1
        self.groups[-1].append(key)
        try:
            yield self.weights[key]
        finally:
            self.held -= 1


@pytest.mark.parametrize("staged", [False, True])
def test_experts_in_host_memory_are_computed_together(staged: bool) -> None:
    tier = _Tier({1, 2, 5}, staged)
    xs = [torch.randn(rows, WIDTH) for rows in (1, 3, 1, 2)]
    host = HostCompute(tier)  # type: ignore[arg-type]
    outputs = [finished() for finished in host.start(FORM, [1, 2, 4, 5], xs)]
    assert tier.groups == [[1, 2], [4, 5]] and not tier.held and tier.seconds > 0
    for key, x, output in zip((1, 2, 4, 5), xs, outputs, strict=True):
        assert torch.equal(output, FORM.compute(x, tier.weights[key]))
    host.close()


def test_a_failed_read_is_raised_for_each_expert() -> None:
    tier = _Tier({1}, True)
    tier.weights = tier.weights[:1]
    host = HostCompute(tier)  # type: ignore[arg-type]
    for finished in host.start(FORM, [0, 1], [torch.randn(1, WIDTH)] * 2):
        with pytest.raises(IndexError):
            finished()
    host.close()
