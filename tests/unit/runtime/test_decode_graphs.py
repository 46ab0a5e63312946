"""Segments of a decode step on a GPU, counted without one: what `torch.cuda.CUDAGraph` records and replays."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from moetool.models.experts.moe_layers import MoeLayer, moe_layers
from moetool.runtime.decode_graphs import DecodeGraphs, RecordedExperts
from tests import families

_LAYERS = 3


class _Experts:
    """Every expert has a slot on the device; the policy receives events after a step, or decides in it."""

    def __init__(self, defers_events: bool) -> None:
        self.defers_events = defers_events
        self.deferred_events: list[tuple[MoeLayer, torch.Tensor]] = []
        self.recorded: Mapping[int, RecordedExperts] = {}

    def computes_by_table(self, layer: MoeLayer, num_rows: int) -> bool:
        return True

    def compute_by_table(
        self, layer: MoeLayer, hidden_TD: torch.Tensor, index_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> torch.Tensor:
        return hidden_TD * weights_TK.sum(dim=1, keepdim=True)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Calls of graphs; what they record runs at once on the CPU."""
    made: Counter[str] = Counter()

    class Graph:
        def capture_begin(self, **options: Any) -> None:
            assert made["begun"] == made["ended"], "a graph within a graph"
            made["begun"] += 1

        def capture_end(self) -> None:
            made["ended"] += 1

        def replay(self) -> None:
            made["replayed"] += 1

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return made


def _model() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(families.config("qwen3_moe", num_hidden_layers=_LAYERS)).eval()


def _segments(graphs: DecodeGraphs, calls: Counter[str]) -> tuple[int, int]:
    """Graphs recorded and replayed by two steps of a new shape; the first one runs module by module."""
    calls.clear()
    ids = torch.ones(1, 1, dtype=torch.int64)
    with torch.no_grad():
        expected = graphs({"input_ids": ids}, 16)
        assert not calls
        assert graphs({"input_ids": ids}, 16).shape == expected.shape
    assert calls["begun"] == calls["ended"]
    return calls["begun"], calls["replayed"]


def _graphs(model: Any, runtime: _Experts) -> DecodeGraphs:
    return DecodeGraphs(model, moe_layers(model), runtime, lambda kwargs, room: {**kwargs, "use_cache": False})


@pytest.mark.parametrize(
    ("defers_events", "expected"),
    [
        (True, (1, 1)),  # nothing to decide
        (False, (2 * _LAYERS + 1, _LAYERS + 1)),  # a layer's experts have a graph, run once their slots are known
    ],
)
def test_a_step_is_one_graph_unless_a_policy_decides(
    calls: Counter[str], defers_events: bool, expected: tuple[int, int]
) -> None:
    assert _segments(_graphs(_model(), _Experts(defers_events)), calls) == expected


def test_a_hook_ends_graphs_at_its_module_and_at_experts(calls: Counter[str]) -> None:
    model, seen = _model(), []
    graphs = _graphs(model, _Experts(defers_events=True))
    handle = moe_layers(model)[1].router.register_forward_hook(lambda *given: seen.append(given))
    recorded, replayed = _segments(graphs, calls)
    assert (recorded, replayed) == (2 * _LAYERS + 2, _LAYERS + 2)
    assert len(seen) == 2
    handle.remove()
    assert _segments(graphs, calls) == (1, 1)
