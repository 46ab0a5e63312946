"""Which experts a layer's table of addresses holds, whatever slots they pass through."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moetool.caching.residency import Step, StepKind
from moetool.kernels.cpu.compiled import find_kernel
from moetool.kernels.cpu.kinds import BFLOAT16
from moetool.models.experts.expert_form import ExpertForm, Part
from moetool.runtime.experts.slot_tables import SlotTables

pytestmark = pytest.mark.skipif(find_kernel(BFLOAT16) is None, reason="numba compiles no kernel here")
WIDTH = 64
FORM = ExpertForm(
    num_experts=4,
    parts=(Part(parameters=("up",), share=(2 * WIDTH, WIDTH)), Part(parameters=("down",), share=(WIDTH, WIDTH))),
    gate=lambda x: torch.nn.functional.silu(x[..., :WIDTH]) * x[..., WIDTH:],
)
LAYER: Any = SimpleNamespace(index=0, form=FORM)


class _Store:
    """Slots of one layout; `on_replaced` is set by the tables."""

    on_replaced: Callable[[int], None]

    def __init__(self) -> None:
        spec = SimpleNamespace(expert_key=lambda layer, expert: layer * 4 + expert)
        self.files = SimpleNamespace(spec=spec, layout_of=lambda key: 0)
        self.slots = [
            (torch.empty(2 * WIDTH, WIDTH, dtype=torch.bfloat16), torch.empty(WIDTH, WIDTH, dtype=torch.bfloat16))
            for _ in range(3)
        ]

    def views_of(self, layout: int, slot: int) -> tuple[torch.Tensor, ...]:
        return self.slots[slot]


def _computed(**slots: int) -> list[Step]:
    return [Step(StepKind.COMPUTE, int(expert[1:]), slot) for expert, slot in slots.items()]


def test_an_expert_stays_while_its_last_slot_holds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy may give an expert up and load it again into another slot, before the first one is filled again."""
    monkeypatch.setattr("moetool.runtime.experts.slot_tables.is_silu_gate", lambda gate: gate is FORM.gate)
    store: Any = _Store()
    tables = SlotTables(SimpleNamespace(layers=[LAYER]), store)  # type: ignore[arg-type]
    weights = tables.weights(LAYER)
    assert weights is not None and not weights.table_E6.any()
    tables.place(LAYER, 1, 0)
    tables.place(LAYER, 2, 1)
    assert tables.hold(LAYER, _computed(e1=0, e2=1)) and not tables.hold(LAYER, _computed(e1=0, e3=1))
    assert not tables.hold(LAYER, _computed(e1=2))  # its first slot may be filled again at any time
    tables.place(LAYER, 1, 2)
    store.on_replaced(0)
    assert tables.hold(LAYER, _computed(e1=2, e2=1)) and weights.table_E6[1, 0] == store.slots[2][0].data_ptr()
    tables.place(LAYER, 3, 2)
    assert not tables.hold(LAYER, _computed(e1=2)) and not weights.table_E6[1].any()
    assert weights.table_E6[3, 2] == store.slots[2][1].data_ptr()
