"""Replays of a server's log: its changes, slots and predictor; damaged logs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moetool.base.errors import MismatchError, UsageError
from moetool.caching.machine_split import MachineSplit, SplitCosts
from moetool.trace.reader import Trace
from moetool.tuning.replay import ReplaySetup, replay, replay_served
from tests.refusals import refused
from tests.synthetic import make_spec, write_trace

SPLIT = MachineSplit(make_spec(), SplitCosts(load_s=1.0, host_s=1.5)).to_json()


def _log(folder: Path, **about: Any) -> Trace:
    """A server's log of 28 forwards, 7 of each request, with these facts in its manifest."""
    spec = make_spec(layers=3, experts=8, top_k=2)
    trace = write_trace(folder, spec, num_requests=4, new_tokens=6, composition="log")
    facts = {"policy": "lru", "options": {}, "devices": 1, "layer_slots": []}
    trace.manifest["provenance"].update({**facts, **about})
    return trace


def test_a_split_holds_until_the_forward_that_the_server_counted(tmp_path: Path) -> None:
    split = _log(tmp_path / "log", host_compute=SPLIT, splits=[[14, 0]])
    late, early = (ReplaySetup(requests=frozenset(requests)) for requests in ((2, 3), (0, 1)))
    both = replace(early, misses="both", split=SplitCosts(**SPLIT["costs"]))
    assert replay(split, ["served"], [9000], late)[0].digest == _digest(split, "lru", late, "one")
    assert replay(split, ["served"], [9000], early)[0].digest == _digest(split, "lru", both, "one")
    assert _digest(split, "lru", both, "one") != _digest(split, "lru", early, "one")


def _digest(trace: Trace, policy: str, setup: ReplaySetup, pool: str) -> str:
    return replay(trace, [policy], [9000], replace(setup, pool=pool))[0].digest


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("layer_slots", [1, 1], r"layer_slots: layers: found 2, expected 3"),
        ("layer_slots", [1, 1, "a"], r"layer_slots\.2: found a, expected a whole number"),
        ("layer_slots", [1, 1, 9], r"layer_slots\.2: found 9, expected at most 8"),
        ("layer_slots", [1, 1, 0], r"layer_slots\.2: found 0"),
        ("changes", [[3, "lru", "one"]], r"the policy changed while its server ran"),
        ("pinned", [3], r"its server pinned experts"),
        ("lent", [[3]], r"lent\.0: .*a forward and a number of slots"),
        ("lent", [[3, -1]], r"lent\.0\.1: found -1"),
        ("lent", [[4, 1], [3, 0]], r"lent\.1\.0: found 3, expected 4 or more"),
        ("splits", [[3, 1]], r"splits: .*none without host_compute"),
        ("host_compute", {"costs": {}}, r"host_compute: .*costs, digest and host_experts"),
        ("host_compute", {**SPLIT, "digest": "other"}, r"host_compute\.digest: found other"),
        ("host_compute", {**SPLIT, "host_experts": 0}, r"host_compute\.host_experts: found 0"),
        ("ends", [[3, 0.5]], r"ends\.0: .*a forward and a request"),
        ("ends", [[3, -1]], r"ends\.0\.1: found -1"),
    ],
)
def test_a_damaged_log_is_refused(tmp_path: Path, field: str, value: Any, said: str) -> None:
    with pytest.raises(MismatchError, match=said):
        replay(_log(tmp_path / "log", **{field: value}), ["served"], [9000])


def _equal(folder: Path, **about: Any) -> Trace:
    """A log whose server decided as a replay does."""
    trace = _log(folder, slots=9, lent=[[14, 2]])
    decided = replay(trace, ["served"], [9000])[0].digest
    trace.manifest["provenance"].update({"decisions": decided, "predictor": None, "state": None, **about})
    return trace


@pytest.mark.follows("moetool.tuning.replay _as_served")
def test_a_log_is_repeated_in_the_order_of_its_server(tmp_path: Path) -> None:
    log = _equal(tmp_path / "log")
    with refused(UsageError, "leave out --order sequential"):
        replay_served(log, ReplaySetup(sequential=True))
    assert replay_served(log, ReplaySetup()).slots == 9


def test_a_log_is_repeated_with_its_slots_or_refused(tmp_path: Path) -> None:
    row = replay_served(_equal(tmp_path / "log"))
    assert (row.policy, row.slots) == ("served", 9)
    for number, (about, fact) in enumerate(
        [
            ({"slots": 7}, "decided"),
            ({"slots": None}, "slots"),
            ({"decisions": "0" * 16}, "0" * 16),
            ({"decisions": "0" * 16, "failed_forwards": 3}, "3 failed forwards"),
            ({"predictor": "abcdef" * 9}, "abcdefabcdef"),
            ({"state": "f00d" * 9}, "f00d"),
        ]
    ):
        with pytest.raises(MismatchError, match=fact):
            replay_served(_equal(tmp_path / f"other{number}", **about))
    with refused(UsageError, "requests"):
        replay_served(_equal(tmp_path / "part"), ReplaySetup(requests=frozenset([1])))
