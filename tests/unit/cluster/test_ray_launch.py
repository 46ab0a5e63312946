"""Machines of a Ray head without Ray: where a worker starts, and where it does not."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from moetool.base.errors import CapacityError
from moetool.cluster import ray_launch
from moetool.cluster.ray_launch import RayMachines
from moetool.cluster.worker_process import ProcessOrder, ProcessRecord
from tests.refusals import refused

ORDER = ProcessOrder(mark="m", authority="a")
RECORD = ProcessRecord(host="h", port=1, pid=2, mark="m", started=3, certificate="c")


class Ray:
    """The parts of `ray` that start processes; machines join and leave as a test says."""

    exceptions = SimpleNamespace(RayTaskError=ZeroDivisionError, RayError=ZeroDivisionError)

    def __init__(self) -> None:
        self.there: dict[str, dict[str, Any]] = {}

    def is_initialized(self) -> bool:
        return True

    def nodes(self) -> list[dict[str, Any]]:
        return list(self.there.values())

    def join(self, number: str, address: str, *names: str) -> None:
        resources = {f"moetool:{name}": 1 for name in names}
        node = {"NodeID": number, "NodeManagerAddress": address, "Alive": True, "Resources": resources}
        self.there[number] = node

    def leave(self, number: str) -> None:
        self.there[number]["Alive"] = False

    def remote(self, work: Any) -> Any:
        task = SimpleNamespace(remote=lambda *args: RECORD)
        return SimpleNamespace(options=lambda **options: task)

    def get(self, answer: ProcessRecord, timeout: float) -> ProcessRecord:
        return answer


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Ray:
    made, strategies = Ray(), ModuleType("ray.util.scheduling_strategies")
    monkeypatch.setattr(strategies, "NodeAffinitySchedulingStrategy", lambda *args, **options: args, raising=False)
    for name in ("ray", "ray.util"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "ray.util.scheduling_strategies", strategies)
    monkeypatch.setattr(ray_launch, "require_ray", lambda: made)
    made.join("head", "10.0.0.1")
    made.there["head"]["Resources"]["node:__internal_head__"] = 1
    return made


@pytest.mark.parametrize("is_named", [True, False])
def test_a_drained_worker_returns_on_its_own_machine_once_that_has_joined_again(ray: Ray, is_named: bool) -> None:
    name = ["s0"] if is_named else []
    ray.join("one", "10.0.0.2", *name)
    machines = RayMachines("10.0.0.1:6379", ["s0"], 0)
    if not is_named:
        ray.leave("head")
    assert machines.start(0, ORDER).machine == "one"
    machines.release(0)
    machines.release(0)
    ray.there["head"]["Alive"] = True
    ray.join("two", "10.0.0.3")  # free, as the head's own machine is
    with refused(CapacityError, "s0", "drained", "ray start"):
        machines.start(0, ORDER)
    ray.leave("one")
    with refused(CapacityError, "s0", "drained", "ray start"):
        machines.start(0, ORDER)
    ray.join("again", "10.0.0.2", *name)
    for _ in range(2):  # a later end is restarted as any other
        assert machines.start(0, ORDER).machine == "again"


def test_a_worker_that_is_drained_while_ray_is_gone_returns_on_a_machine_that_joins(
    ray: Ray, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray.join("one", "10.0.0.2", "s0")
    machines = RayMachines("10.0.0.1:6379", ["s0"], 0)
    machines.start(0, ORDER)
    nodes = ray.nodes

    def gone() -> list[dict[str, Any]]:
        raise ConnectionError("Ray's head is gone")

    monkeypatch.setattr(ray, "nodes", gone)
    machines.release(0)
    monkeypatch.setattr(ray, "nodes", nodes)
    ray.there.clear()
    ray.join("again", "10.0.0.2", "s0")
    assert machines.start(0, ORDER).machine == "again"
