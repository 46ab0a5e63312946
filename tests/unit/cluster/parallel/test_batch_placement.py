"""Placement decisions in expert parallelism, by hand: the view of each mode, and both sides of a decision."""

import queue
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from moetool.base.errors import CapacityError, MismatchError, UsageError
from moetool.base.types import Cluster
from moetool.cluster.parallel.batch_placement import (
    BatchCosts,
    BatchReplacement,
    RoutingPredictor,
    Waiting,
    measured_latency,
)
from moetool.cluster.parallel.batch_records import BatchRecord
from moetool.cluster.parallel.placement_state import PlacementState
from moetool.cluster.parallel.rank_costs import Costs
from moetool.cluster.parallel.startup import ParallelOptions, open_predictors, read_settings, uniform, with_buffer
from moetool.placement.decide import Decision
from moetool.placement.latency import layers_s
from tests.clusters import make_cluster
from tests.live_page import missing_fields
from tests.refusals import refused
from tests.servers import PATIENCE_S
from tests.synthetic import make_spec

SPEC = make_spec(1, 4)
CLUSTER = make_cluster([[3, 3]], slot_bytes=SPEC.slot_bytes)
FACTS = BatchCosts(row_s=1e-3, byte_s_GG=1e-9, move_bytes_s=1e6)
BATCH = [Waiting(prompt=[1, 2], new_tokens=1, gpu=0), Waiting(prompt=[3], new_tokens=1, gpu=1)]


def placed(*gpus: Sequence[int]) -> np.ndarray:
    """The experts of each GPU."""
    placed_GLE = np.zeros((len(gpus), 1, 4), bool)
    for g, experts in enumerate(gpus):
        placed_GLE[g, 0, list(experts)] = True
    return placed_GLE


def wanting(*experts: int, tokens: int = 100) -> RoutingPredictor:
    """Predicts that every request needs these."""

    def predict(prompt: Sequence[int], new_tokens: int) -> np.ndarray:
        load_LE = np.zeros((1, 4))
        load_LE[0, list(experts)] = tokens
        return load_LE

    return RoutingPredictor("cascade", predict)


@pytest.mark.follows("moetool.cluster.parallel.batch_placement BatchReplacement.__init__")
def test_proactive_placement_needs_a_predictor() -> None:
    with refused(UsageError, "moetool train cascade", "--predictor"):
        BatchReplacement("proactive", SPEC, CLUSTER)
    BatchReplacement("proactive", SPEC, CLUSTER, predictors=[wanting(0)])


def decide(control: BatchReplacement, costs: BatchCosts = FACTS, before: np.ndarray | None = None) -> Decision | None:
    """From a placement that has 0 and 1 together."""
    return control.decide(BATCH, placed([0, 1], [2, 3]) if before is None else before, costs)


def test_vanilla_and_offline_stay_as_they_are() -> None:
    for name in ("vanilla", "offline"):
        control = BatchReplacement(name, SPEC, CLUSTER)
        control.saw(np.ones((2, 1, 4)))
        assert not control.decides and decide(control) is None


def test_reactive_places_for_the_last_batch_and_proactive_for_the_next() -> None:
    reactive = BatchReplacement("reactive", SPEC, CLUSTER)
    assert decide(reactive) is None  # it has seen nothing
    reactive.saw(np.array([[[50, 50, 0, 0]], [[50, 50, 0, 0]]]))
    found = decide(reactive)
    assert found is not None and found.saw == "batch" and found.made
    assert sorted(found.placed_GLE[:, 0, :2].sum(axis=1)) == [1, 1] or found.placed_GLE[:, 0, :2].all()
    proactive = BatchReplacement("proactive", SPEC, CLUSTER, predictors=[wanting(2, 3)])
    proactive.saw(np.array([[[50, 50, 0, 0]], [[50, 50, 0, 0]]]))
    found = decide(proactive)
    assert found is not None and found.saw == "cascade" and found.made
    after = found.placed_GLE[:, 0, 2:]
    assert after.all() or sorted(after.sum(axis=1)) == [1, 1]


def test_both_sides_of_a_decision() -> None:
    control = BatchReplacement("proactive", SPEC, CLUSTER, predictors=[wanting(0, 1)])
    found = decide(control)
    assert found is not None
    # 200 tokens of 0 and 200 of 1, all on GPU 0: 400 ms. Apart, or with copies: 200 ms.
    assert found.gain_s == pytest.approx(0.2, rel=0.01)
    gets_G = (found.placed_GLE & ~placed([0, 1], [2, 3])).sum(axis=(1, 2)) * SPEC.slot_bytes
    assert found.cost_s == pytest.approx(gets_G.max() / 1e6)
    assert found.migration.bytes == gets_G.sum()
    dear = BatchCosts(row_s=1e-3, byte_s_GG=1e-9, move_bytes_s=gets_G.max() / 0.3)
    refused = decide(control, dear)
    assert refused is not None and refused.cost_s == pytest.approx(0.3) and not refused.made
    hidden = decide(control, BatchCosts(row_s=1e-3, byte_s_GG=1e-9, move_bytes_s=gets_G.max() / 30, free_s=29.95))
    assert hidden is not None and hidden.made == (hidden.cost_s < hidden.gain_s)
    spent_s = hidden.predict_s + refused.plan_s  # while it is decided, as long as it took the last time, less is left
    assert hidden.cost_s == pytest.approx(0.05 + spent_s) and spent_s > 0
    free = replace(FACTS, move_bytes_s=1e12, added_byte_s=0.3 / gets_G.sum())  # and all the same batches waited
    slow = decide(control, free)
    assert slow is not None and slow.cost_s == pytest.approx(0.3) and not slow.made
    always = BatchReplacement("proactive", SPEC, CLUSTER, predictors=[wanting(0, 1)], always=True)
    found = decide(always, dear)
    assert found is not None and found.made


def test_nothing_moves_for_nothing() -> None:
    control = BatchReplacement("proactive", SPEC, CLUSTER, predictors=[wanting(0, 1)], always=True)
    first = decide(control)
    assert first is not None
    again = decide(control, before=first.placed_GLE)
    assert again is not None and not again.made and again.copies == 0


def test_the_better_predictor_is_asked_where_it_costs_less_than_the_gain() -> None:
    replica = wanting(2, 3)
    replica.name = "replica"
    control = BatchReplacement("proactive", SPEC, CLUSTER, predictors=[wanting(0, 1), replica])
    found = decide(control)
    assert found is not None and found.saw == "replica"  # once, to measure it
    replica.token_s = 1.0  # three tokens: 3 s
    found = decide(control)
    assert found is not None and found.saw == "cascade"
    replica.token_s = 0.01
    found = decide(control)
    assert found is not None and found.saw == "replica"


def test_the_better_predictor_is_not_asked_for_what_would_come_too_late() -> None:
    replica = wanting(2, 3)
    replica.name, replica.token_s = "replica", 0.01  # three tokens: 30 ms, for a gain of 200
    control = BatchReplacement("proactive", SPEC, CLUSTER, predictors=[wanting(0, 1), replica])
    for within_s, saw in ((0.02, "cascade"), (60.0, "replica")):
        found = decide(control, replace(FACTS, within_s=within_s))
        assert found is not None and found.saw == saw
        replica.token_s = 0.01


def test_a_predictor_that_was_found_too_dear_is_measured_again() -> None:
    replica = wanting(2, 3)
    replica.name, replica.token_s = "replica", 10.0  # as it was when something else kept the machine busy
    control = BatchReplacement("proactive", SPEC, CLUSTER, predictors=[wanting(0, 1), replica])
    saw = []
    for _ in range(40):
        found = decide(control)
        assert found is not None
        saw.append(found.saw)
    assert saw == ["cascade"] * 32 + ["replica"] * 8 and replica.token_s < 1.0


def test_layers_cost_what_the_system_model_says() -> None:
    tokens_GLE = np.zeros((2, 1, 4))
    tokens_GLE[0, 0] = [10, 0, 4, 0]
    costs = BatchCosts(row_s=2.0, byte_s_GG=0.25 / SPEC.hidden_size, move_bytes_s=1.0)
    latency = measured_latency(CLUSTER, SPEC, tokens_GLE, costs)
    # 10 rows at home, 4 away: computing 2 s a row on the fuller GPU, a second for each row that is sent, both ways.
    assert layers_s(latency, CLUSTER, tokens_GLE, placed([0, 1], [2, 3])) == pytest.approx(20 + 2 * 4)


def test_a_cluster_without_room_for_a_buffer_is_refused() -> None:
    assert with_buffer(CLUSTER, SPEC).slots_G(SPEC.slot_bytes) == (2, 2)
    with pytest.raises(CapacityError, match="short"):
        with_buffer(make_cluster([[2, 2]], slot_bytes=SPEC.slot_bytes), SPEC)


def test_uniform_is_even() -> None:
    cluster: Cluster = make_cluster([[3, 3]], slot_bytes=SPEC.slot_bytes)
    assert uniform(SPEC, cluster).sum(axis=(1, 2)).tolist() == [2, 2]


def test_settings_are_sorted_and_strange_ones_refused(tmp_path: object) -> None:
    options, ranks = read_settings({"placement": "reactive", "seats": 2, "planner_options": {"kicks": 1}})
    assert options.placement == "reactive" and ranks.seats == 2 and options.planner_options == {"kicks": 1}
    with refused(UsageError, "placement"):
        read_settings({"placment": "reactive"})
    with refused(UsageError, "reactive"):
        read_settings({"placement": "reactiv"})
    with refused(UsageError, "--predictor"):
        BatchReplacement("proactive", SPEC, CLUSTER)
    with pytest.raises((UsageError, MismatchError)):
        open_predictors([str(tmp_path)], SPEC)
    assert ParallelOptions().placement == "offline"


def test_a_decision_is_carried_out_once_or_dropped_when_it_is_late() -> None:
    said: queue.Queue[tuple[str, tuple[int, int, object]]] = queue.Queue()
    control = BatchReplacement("proactive", SPEC, CLUSTER, predictors=[wanting(0, 1)], always=True)
    before = placed([0, 1], [2, 3])

    lines: list[str] = []

    def open_placing(migrate: str) -> PlacementState:
        return PlacementState(
            SPEC,
            CLUSTER,
            control,
            before,
            migrate,
            costs=Costs(SPEC, CLUSTER),
            patience_s=1.0,
            post=lambda kind, value: said.put((kind, value)),
        )

    placing = open_placing("overlap")
    placing.narrate = lines.append
    assert placing.order([0, 1])["version"] == 1
    placing.ask(5, BATCH, 0.0)
    assert placing.asked_for(5) and placing.deciding is not None
    kind, answer = said.get(timeout=PATIENCE_S)
    assert kind == "decided"
    stages = placing.decided(*answer, 4)  # type: ignore[arg-type]
    assert [stage["version"] for stage in stages] == list(range(2, placing.version + 1)) != []
    assert placing.stages() == [] and len(placing.decisions) == 1
    assert (placing.placed_GLE == placing.decisions[0].placed_GLE).all()
    (entry,) = placing.history
    shown = missing_fields("ranksView", {"engine": {"decisions": [entry]}})
    assert not [field for field in shown if field.startswith("row")]
    moved = sum(len(stage["copies"]) for stage in stages)
    assert (entry["batch"], entry["saw"], entry["copies"], entry["taken_s"]) == (5, "cascade", moved, 0.0)
    link_bytes_s = CLUSTER.link(0, 0)[0]
    assert SPEC.slot_bytes / link_bytes_s <= entry["expected_s"] <= moved * SPEC.slot_bytes / link_bytes_s
    values = dict.fromkeys(BatchRecord.__dataclass_fields__, 0)
    values |= {"sent_GG": np.zeros((2, 2)), "moved_s": 0.5, "tokens_GLE": placed([0], [1])}
    values["moved_experts"] = moved // 2
    for number, version in ((4, 1), (5, placing.version)):
        placing.note(BatchRecord(**{**values, "version": version}), 0.5, 2)
        assert (entry["taken_s"], len(lines)) == ((0.5, 0) if number == 4 else (1.0, 1))
    assert all(fact in lines[0] for fact in ("batch 5", f"{moved} expert", "1 s", "cascade"))
    busy = open_placing("overlap")
    busy.order([0, 1])
    epoch, _, found = answer
    assert isinstance(found, Decision)
    sent, part = [], 7 / (found.copies + 1)
    for batch in range(5, 9):  # each is decided before the batch ahead of it has ended
        goal_GLE = found.placed_GLE if batch % 2 else before
        sent.append(busy.decided(epoch, batch, replace(found, placed_GLE=goal_GLE), batch - 1)[-1]["version"])
        if batch > 5:
            came = found.copies + (batch == 7) - (batch == 8)
            arrived = {"version": sent[-2], "moved_s": batch, "moved_experts": came}
            busy.note(BatchRecord(**{**values, **arrived}), batch, 2)
    busy.note(BatchRecord(**{**values, "version": sent[-1], "moved_s": 9, "moved_experts": found.copies}), 9, 2)
    assert [entry["taken_s"] for entry in busy.history] == pytest.approx([6, 7 - part, part + 8, 9])
    late = open_placing("overlap")
    late.order([0, 1])
    assert late.decided(*answer, 5) == [] and late.late == 1  # type: ignore[arg-type]
    assert (late.placed_GLE == before).all()
    stop = open_placing("stop")
    stop.order([0, 1])
    assert stop.decided(*answer, 4) == []  # type: ignore[arg-type]
    assert len(stop.stages()) == len(stages)  # when the batch has ended
    lost = open_placing("overlap")
    lost.order([0, 1])
    lost.order([1])  # a rank is gone meanwhile
    assert lost.decided(*answer, 4) == [] and lost.late == 0  # type: ignore[arg-type]
    assert lost.placed_GLE[1, 0].all()  # the one that is left has all


def test_a_control_that_fails_does_not_end_serving() -> None:
    said: queue.Queue[tuple[str, tuple[int, int, object]]] = queue.Queue()

    def broken(prompt: Sequence[int], new_tokens: int) -> np.ndarray:
        raise MismatchError("no such token")

    control = BatchReplacement("proactive", SPEC, CLUSTER, predictors=[RoutingPredictor("cascade", broken)])
    placing = PlacementState(
        SPEC,
        CLUSTER,
        control,
        placed([0, 1], [2, 3]),
        "overlap",
        costs=Costs(SPEC, CLUSTER),
        patience_s=1.0,
        post=lambda kind, value: said.put((kind, value)),
    )
    placing.order([0, 1])
    placing.ask(0, BATCH, None)
    assert placing.decided(*said.get(timeout=PATIENCE_S)[1], -1) == []  # type: ignore[arg-type]
    assert placing.error == "no such token" and placing.deciding is None
