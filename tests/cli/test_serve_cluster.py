"""`moetool serve --cluster`: what is refused, in one line, before anything is started."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moetool.base.errors import UsageError
from moetool.cli import main as cli
from moetool.cli.watch import SchedulerWithPage
from moetool.cluster.cluster_options import ClusterOptions
from moetool.cluster.edge import server_settings
from moetool.cluster.edge.scheduler import SchedulerOptions
from moetool.cluster.launch import ClusterAddress, parse_where
from moetool.placement.plan import PlacementPlan
from moetool.runtime.serve_options import ServeOptions
from tests.edge_process import write_plan

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run `moetool serve` in this process; it must end with this code and one line, which is given."""

    def call(code: int, *args: Any) -> str:
        monkeypatch.setattr(sys, "argv", ["moetool", "serve", *map(str, args), "--port", "0"])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        assert (ended.value.code, captured.out) == (code, "")
        (line,) = captured.err.strip().splitlines()
        return line

    return call


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_plan(tmp_path_factory.mktemp("plan") / "placement.json")


def test_a_plan_of_the_wrong_kind(refused: Callable[..., str], plan: Path, tmp_path: Path) -> None:
    line = refused(2, "reference", "--plan", plan)
    assert "is a placement plan" in line and "--cluster local:3" in line
    cache = tmp_path / "cache.json"
    cache.write_text('{"kind": "cache_plan", "schema_version": 1}')
    line = refused(3, "reference", "--plan", cache, "--cluster", "local:3")
    assert "holds cache_plan" in line and "expected a placement_plan" in line and "moetool plan placement" in line
    assert "needs a placement plan" in refused(2, "reference", "--cluster", "local:3")
    assert "no plan at" in refused(2, "reference", "--plan", tmp_path / "none", "--cluster", "local:3")


def test_a_cluster_that_cannot_be(refused: Callable[..., str], plan: Path) -> None:
    line = refused(2, "reference", "--plan", plan, "--cluster", "local:2")
    assert "starts 2 servers, and the plan is for 3: s0, s1, s2; write local:3" in line
    assert "unknown --mode 'edgy': did you mean 'edge'?" in refused(
        2, "reference", "--plan", plan, "--cluster", "local:3", "--mode", "edgy"
    )
    assert "needs --cluster" in refused(2, "reference", "--plan", plan, "--mode", "edge")
    for where in ("local:", "local:0", "here", "host:name"):
        assert f"--cluster '{where}'" in refused(2, "reference", "--plan", plan, "--cluster", where)


def test_options_of_one_machine(refused: Callable[..., str], plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = ("reference", "--plan", plan, "--cluster", "local:3")
    for option, value in (("--policy", "lru"), ("--device-memory", "64MB"), ("--log", "x"), ("--predictor", "x")):
        assert f"{option} has no effect with --cluster" in refused(2, *cluster, option, value)
    assert "did you mean 'hang_s'?" in refused(2, *cluster, "--set", "cluster.hangs=1")
    assert "cluster.name is '../x', expected letters" in refused(2, *cluster, "--set", "cluster.name=../x")
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    assert "--set cluster" in refused(2, *cluster, "--set", "cluster=3")
    assert "cluster.ping_s is 0" in refused(2, *cluster, "--set", "cluster.ping_s=0")


def test_servers_compute_in_the_checkpoints_data_type(
    refused: Callable[..., str], plan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def stop(*args: Any, options: ServeOptions, **given: Any) -> None:
        seen.append(options.dtype)
        raise UsageError("enough")

    monkeypatch.setattr(server_settings, "worker_settings", stop)
    for more in ((), ("--set", "dtype=float32")):
        refused(2, "reference", "--plan", plan, "--cluster", "local:3", "--set", "cluster.name=a", *more)
    assert seen == ["bfloat16", "float32"]


def test_servers_do_not_poll_where_each_has_no_core_of_its_own(
    refused: Callable[..., str], plan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def stop(*args: Any, cluster: ClusterOptions, **given: Any) -> None:
        seen.append(cluster.poll_s)
        raise UsageError("enough")

    monkeypatch.setattr(server_settings, "worker_settings", stop)
    for cores, more in ((3, ()), (4, ()), (3, ("--set", "cluster.poll_s=0.001"))):
        monkeypatch.setattr("os.cpu_count", lambda cores=cores: cores)
        refused(2, "reference", "--plan", plan, "--cluster", "local:3", "--set", "cluster.name=b", *more)
    assert seen == [0.0, ClusterOptions().poll_s, 0.001]


def test_the_scheduler_keeps_to_whole_layers(plan: Path, tmp_path: Path) -> None:
    made = PlacementPlan.load(plan)
    for name, given, expected in (
        ("whole_layers", {}, "whole_layers"),
        ("whole_layers", {"planner": "prism"}, "prism"),
        ("uniform", {}, SchedulerOptions().planner),
    ):
        watch = SchedulerWithPage({"scheduler": given}, replace(made, planner=name), print, tmp_path / "state.json")
        assert watch.scheduler.options.planner == expected
    made = replace(made, planner="whole_layers", options={"call_s": 1e-3, "forward_tokens": 2})
    given = {"options": {"forward_tokens": 8}}
    watch = SchedulerWithPage({"scheduler": given}, made, print, tmp_path / "state.json")
    assert watch.scheduler.options.options == {"call_s": 1e-3, "forward_tokens": 8}
    with pytest.raises(UsageError, match="options holds settings by name"):
        SchedulerWithPage({"scheduler": {"options": 3}}, made, print, tmp_path / "state.json")
    SchedulerWithPage(
        {}, replace(made, planner="lab.planner", options={"x": 1}), print, tmp_path / "state.json"
    )  # is not imported


@pytest.mark.follows("moetool.cli.cluster _require_any_machine")
def test_servers_on_several_machines_listen_at_every_address(
    refused: Callable[..., str], plan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moetool.cluster.ray_launch.head_address", lambda address: "10.0.0.7")
    cluster = ("reference", "--plan", plan, "--cluster", "10.0.0.7:6379", "--set", "state=learned")
    assert "give --host 0.0.0.0" in refused(2, *cluster, "--host", "10.0.0.8")
    assert "state is for policies that learn" in refused(2, *cluster, "--host", "0.0.0.0")  # a later check


def test_without_ray(refused: Callable[..., str], plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    line = refused(2, "reference", "--plan", plan, "--cluster", "10.0.0.7:6379")
    assert "pip install 'moetool[cluster]'" in line


def test_where() -> None:
    assert parse_where("local:3") == ClusterAddress(count=3)
    assert parse_where("10.0.0.7:6379") == ClusterAddress(address="10.0.0.7:6379")
    with pytest.raises(UsageError, match="neither local:N nor the host:port"):
        parse_where("10.0.0.7")
