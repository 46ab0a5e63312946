"""A compiled split decides as Python does, event by event."""

from typing import Any

import numpy as np

from moetool.base.types import ForwardInfo, GateEvent, Phase
from moetool.caching import split_kernels
from moetool.caching.compiled_split import CompiledSplit
from moetool.caching.machine_split import MODES, MachineSplit, SplitCosts
from moetool.caching.residency import Step, StepKind
from tests.synthetic import make_spec

SPEC = make_spec(layers=3, experts=16, top_k=4)


def _decisions(split: Any, seed: int) -> list[Any]:
    """Choices of a split over random events, with prefetches after them."""
    rng, made = np.random.default_rng(seed), list[Any]()
    for number in range(60):
        tokens = int(rng.integers(1, 4))
        info = ForwardInfo(
            forward_id=number, request_T=(0,) * tokens, phase_T=(Phase.PREFILL,) * tokens, position_T=range(tokens)
        )
        layer = number % SPEC.num_layers
        experts_TK = tuple(tuple(rng.choice(16, 4, replace=False).tolist()) for _ in range(tokens))
        event = GateEvent(forward=info, layer=layer, experts_TK=experts_TK)
        keys = [layer * 16 + expert for expert in event.needed]
        hits = [key for key in keys if rng.random() < 0.3]
        misses = [key for key in keys if key not in hits]
        made.append(split.choose(event, hits, misses, [float(rng.choice([0.0, 0.5])) for _ in misses]))
        made.append((split.admits(free=False), split.admits(free=True)))
        ahead = rng.choice(16 * SPEC.num_layers, int(rng.integers(0, 3)), replace=False).tolist()
        split.note([Step(StepKind.LOAD, 0, 1), *(Step(StepKind.PREFETCH, key, 0, (key + 7) % 48) for key in ahead)])
    return made


def test_every_choice_is_that_of_python() -> None:
    sizes = set[int]()
    for seed in range(20):
        rng = np.random.default_rng(seed)
        costs = SplitCosts(
            load_s=float(rng.uniform(0.2, 2)),
            host_s=float(rng.uniform(0.2, 2)),
            device_s=float(rng.uniform(0, 0.4)),
            host_knots=((2.0, 2.5), (4.0, 3.0)) if seed % 2 else (),
            start_s=0.1 * (seed % 3),
            link_share=float(rng.uniform(0.5, 1)),
            host_share=float(rng.uniform(0.5, 1)),
            disk_s=float(rng.uniform(0, 2)),
        )
        held, mode = {0: None, 1: 0}.get(seed % 4, 20), MODES[seed % 5 > 0]
        made = _decisions(CompiledSplit(MachineSplit(SPEC, costs, mode, held)), seed)
        assert made == _decisions(MachineSplit(SPEC, costs, mode, held), seed), seed
        sizes |= {len(choice) for choice in made[::2]}
    assert len(sizes) > 4


def test_a_split_says_whether_it_is_active_and_reads_its_costs_late() -> None:
    split = MachineSplit(SPEC)
    compiled = CompiledSplit(split)
    split.begin(SplitCosts(load_s=1.0, host_s=1e-6), None)
    event = GateEvent(
        forward=ForwardInfo(forward_id=0, request_T=(0,), phase_T=(Phase.DECODE,), position_T=(0,)),
        layer=0,
        experts_TK=((0, 1, 2, 3),),
    )
    assert compiled.choose(event, [], [0, 1, 2, 3], [0.0] * 4) == {0, 1, 2, 3}
    assert compiled.table[split_kernels.STAMP], "changes of what numba inlines would not count"
    assert compiled.active
    split.active = False
    assert not compiled.active and not compiled.begin_event()
