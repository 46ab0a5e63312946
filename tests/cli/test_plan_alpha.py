"""`moetool plan alpha`: what it measures, chooses and refuses."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from moetool.base.types import ModelSpec
from moetool.caching.plan import CachePlan
from moetool.caching.policy import Policy, build_policy
from moetool.measuring import alpha
from tests.command_line import exit_code


def _run(monkeypatch: pytest.MonkeyPatch, out: Path, *args: object, **flags: Any) -> int:
    given = {"data": "encyclopedia", "device-memory": "12MB", "target-tpot": "10s", "out": out, **flags}
    line: list[object] = ["plan", "alpha", "reference"]
    for name, value in given.items():
        line += [f"--{name}", value]
    for setting in ("alphas=[0,0.4,0.8]", "tokens=24", "texts=3", "rounds=1"):
        line += ["--set", setting]
    return exit_code(monkeypatch, *line, *args)  # the last one given wins


def test_the_least_alpha_that_is_fast_enough_becomes_a_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.json"
    assert _run(monkeypatch, out) == 0
    printed = capsys.readouterr().out
    assert "alpha 0.000 is the smallest" in printed and "+0.0000" in printed  # anything is faster than ten seconds
    plan = CachePlan.load(out)
    assert (plan.policy, plan.options["alpha"]) == ("smoe", 0.0) and 64 < plan.slots < 256
    assert plan.dtype == "bfloat16"  # the checkpoint's, as in `serve`
    none, some, most = plan.evidence
    assert none["same"] == 1.0 and min(point["tpot_s"] for point in plan.evidence) > 0
    # Substitution keeps what is resident in use, and says something else now and then.
    assert most["bytes_per_token"] < none["bytes_per_token"] and most["hit_rate"] > none["hit_rate"]
    assert most["same"] < 1.0 and most["nats"] != none["nats"] and some["nats"] != most["nats"]
    assert _run(monkeypatch, out, "--json", "--overwrite") == 0
    again = json.loads(capsys.readouterr().out)
    assert [point["nats"] for point in again["evidence"]] == [point["nats"] for point in plan.evidence]


def test_host_memory_and_the_partial_forward_are_measured_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = ("--host-memory", "20MB", "--set", "serve.policy.predict_from=resident", "--set", "serve.policy.live=true")
    assert _run(monkeypatch, tmp_path / "plan.json", *given) == 0
    plan = CachePlan.load(tmp_path / "plan.json")
    assert plan.options["predict_from"] == "resident" and plan.options["live"]
    assert [point["alpha"] for point in plan.evidence] == [0.0, 0.4, 0.8]


def test_a_pass_warms_up_and_each_round_begins_with_another_alpha(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fed: list[float] = []

    def build(name: str, spec: ModelSpec, options: Mapping[str, Any], slots: int) -> Policy:
        fed.append(options["alpha"])
        return build_policy(name, spec, options, slots)

    monkeypatch.setattr(alpha, "build_policy", build)
    assert _run(monkeypatch, tmp_path / "plan.json", "--set", "rounds=2", "--set", "texts=1") == 0
    assert fed[:7] == [0.0, 0.0, 0.4, 0.8, 0.4, 0.8, 0.0]  # then the plan's


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.json"
    assert _run(monkeypatch, out, **{"target-tpot": "1us"}) == 2
    told = capsys.readouterr()
    assert "no alpha from 0.0 to 0.8 reaches 1e-06 s per token; the fastest is" in told.err
    assert "ms / token" in told.out and "+0.0000" in told.out  # what was measured, to choose another target by
    assert _run(monkeypatch, out, "--set", "tokens=4000") == 2
    assert "texts has 4000 tokens" in capsys.readouterr().err
    assert _run(monkeypatch, out, **{"device-memory": "1MB"}) == 4
    assert "--device-memory 1.0 MB is too small" in capsys.readouterr().err
    assert _run(monkeypatch, out, "--set", "serve.devices=2") == 2
    assert "alpha is measured on one" in capsys.readouterr().err
    assert _run(monkeypatch, out, "--host-memory", "1", "--set", "serve.policy.live=true") == 4
    assert "--host-memory 1 holds 0 experts" in capsys.readouterr().err
    for wrong in ("alphas=[0.5]", "alphas=[2,3]", "rounds=0"):
        assert _run(monkeypatch, out, "--set", wrong) == 2
    assert not out.exists()
