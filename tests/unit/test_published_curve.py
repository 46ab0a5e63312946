"""A published replay of a real model's routes, as an oracle from outside.

The curve's authors gave their pool in bytes, and the model has experts of two sizes. Ours counts slots, so their
rate must lie between ours for the slots that a budget holds of the larger experts and of the smaller ones. (For LFU,
whose hits need not grow with the pool, that is an observation and not a theorem.)
"""

import csv
import os
import re
from itertools import groupby
from pathlib import Path

import pytest

from moetool.policy import build_policy
from moetool.residency import Residency
from moetool.types import ForwardInfo, GateEvent, Phase
from tests.synthetic import make_spec

SHARED = Path(os.environ.get("MOETOOL_SHARED", Path(__file__).parents[2].parent / "shared"))
ROUTES = SHARED / "data" / "routes" / "bigmoeonedge"

pytestmark = pytest.mark.skipif(not ROUTES.is_dir(), reason="shared/data/routes is not here")


@pytest.fixture(scope="module")
def stream() -> list[tuple[ForwardInfo, list[GateEvent]]]:
    """The prompt as one forward, then a forward for each new token."""
    with (ROUTES / "qwen3_30b_a3b.route.csv").open() as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    forwards = []
    prompt = [row for row in rows if row["phase"] == "0"]
    for _, group in groupby(rows[len(prompt) :], key=lambda row: row["step"]):
        forwards.append(list(group))
    stream = []
    for number, members in enumerate([prompt, *forwards]):
        experts: list[set[int]] = [set() for _ in range(48)]
        for row in members:
            experts[int(row["layer"])].add(int(row["expert"]))
        phase = Phase.DECODE if number else Phase.PREFILL
        info = ForwardInfo(forward_id=number, request_T=(0,), phase_T=(phase,), position_T=(number,))
        events = [
            GateEvent(forward=info, layer=layer, experts_TK=(tuple(needed),)) for layer, needed in enumerate(experts)
        ]
        stream.append((info, events))
    assert sum(len(events) for _, events in stream) == 6192
    return stream


@pytest.mark.parametrize("name", ["lru", "lfu", "belady"])
@pytest.mark.parametrize("budget_mib", [500, 1000, 2000, 4000])
def test_the_published_hit_rate_is_between_ours(
    stream: list[tuple[ForwardInfo, list[GateEvent]]], name: str, budget_mib: int
) -> None:
    head = (ROUTES / "qwen3_30b_a3b.route.csv").read_text().split("turn,", 1)[0]
    sizes = {int(size) for size in re.findall(r"expert_bytes=(\d+)", head)}
    with (ROUTES / "qwen3_30b_a3b.curve.csv").open() as file:
        (published,) = (
            row for row in csv.DictReader(file) if (row["policy"], int(row["budget_mib"])) == (name, budget_mib)
        )
    spec = make_spec(layers=48, experts=128, top_k=6)
    future = [[spec.expert_key(e.layer, x) for x in e.needed] for _, events in stream for e in events]

    def rates(num_slots: int) -> tuple[float, float]:
        residency = Residency(build_policy(name, spec, {}, num_slots, future=future))
        for info, events in stream:
            residency.begin_forward(info)
            for event in events:
                residency.event(event)
            residency.end_forward(info)
        return 100 * residency.counts.hit_rate, 100 * residency.decode.hit_rate

    budget_bytes = budget_mib << 20
    low, high = rates(budget_bytes // max(sizes)), rates(-(-budget_bytes // min(sizes)))
    for ours_low, theirs, ours_high in zip(
        low, (published["hit_pct_cum"], published["hit_pct_decode"]), high, strict=True
    ):
        assert ours_low - 0.02 <= float(theirs) <= ours_high + 0.02
