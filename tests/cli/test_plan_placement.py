"""`moetool plan placement`, `score`, `compare`, `migrate` and `export`, as a user calls them."""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from moetool.base import durable
from moetool.placement.plan import PlacementPlan
from moetool.placement.planners.director import Options
from moetool.trace.expert_counts import Counted, ExpertCounts, write_counts
from tests.command_line import Run
from tests.synthetic import make_spec, write_trace

COMMAND = ("plan",)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Traces of two servers, and their cluster."""
    folder = tmp_path_factory.mktemp("placement")
    for seed, name in enumerate(("a", "b", "unseen")):
        write_trace(folder / name, make_spec(), num_requests=8, seed=seed)
    servers = "".join(f'[[servers]]\nname = "{n}"\n[[servers.gpus]]\nmemory_bytes = "15kB"\n' for n in ("a", "b"))
    (folder / "cluster.toml").write_text(servers)
    return folder


def _inputs(folder: Path) -> list[str]:
    return [f"--trace=a={folder / 'a'}", f"--trace=b={folder / 'b'}", f"--cluster={folder / 'cluster.toml'}"]


def test_from_traces_to_plans_scores_and_migrations(run: Run, folder: Path, tmp_path: Path) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    code, out, err = run("placement", *_inputs(folder), "--planner", "uniform", "--out", old, "--split", "0.5")
    assert (code, err) == (0, "")
    assert out.splitlines()[3].split()[:4] == ["planner", "requests", "a", "b"]
    assert "held out" in out and "c_max as memory allows; tokens start round_robin; sides both" in out
    code, out, _ = run(
        *("placement", *_inputs(folder), "--planner", "director", "--out", new, "--c-max", 5, "--json"),
        *("--set", "kicks=1", "--set", "seed=3", "--set", "sides=send"),
    )
    assert code == 0
    made = json.loads(new.read_text())
    assert (made["options"], made["seed"]) == (asdict(Options(kicks=1, c_max=5)), 3)
    assert "unit costs" in made["costs"] and "send" in made["costs"]
    assert json.loads(out)["scores"][0]["latency_gap"] >= 0
    code, out, _ = run("score", new, *_inputs(folder)[:2], "--json")
    assert code == 0 and json.loads(out)["balancedness"].keys() == {"sglang", "vllm", "tensorrt_llm"}
    code, out, _ = run("score", old, *_inputs(folder)[:2])
    assert code == 0 and "a -> b" in out
    code, out, _ = run(
        "migrate",
        old,
        new,
        *_inputs(folder)[:2],
        "--horizon-tokens",
        1e6,
        "--window-ms",
        5,
        "--out",
        tmp_path / "m.json",
    )
    assert (
        code == 0
        and "worth it" in out
        and "(Eq. 3) and" in out
        and "s of all moves" in out
        and "compute phases of 5 ms" in out
    )


def test_planners_side_by_side(run: Run, folder: Path) -> None:
    code, out, _ = run(
        "compare", *_inputs(folder), "--planner", "prism,prism_exact", "--unseen-task", folder / "unseen"
    )
    assert code == 0 and "unseen task" in out and "c_max as memory allows" in out
    assert "\nunseen task: prism" in out and "above the bound; prism" in out
    code, out, _ = run("compare", *_inputs(folder), "--planner", "uniform,annealing", "--c-max", 5)
    assert code == 0 and "c_max 5 for annealing; " in out
    code, out, _ = run("compare", *_inputs(folder), "--planner", "uniform", "--json")
    found = json.loads(out)
    assert [row["requests"] for row in found["scores"]] == ["planned on", "held out"]
    assert (found["plan"], found["best"], found["slot_choices"], found["migration"]) == (None, "uniform", [], None)


def test_a_plan_is_scored_as_it_was_made(run: Run, folder: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    run("placement", *_inputs(folder), "--planner", "uniform", "--out", plan, "--set", "starts=first")
    code, out, _ = run("score", plan, *_inputs(folder)[:2])
    assert code == 0 and "tokens start first" in out and "planned on" in out


def test_exports(run: Run, folder: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    run("placement", *_inputs(folder), "--planner", "uniform", "--out", plan)
    code, out, _ = run("export", plan, "--format", "sglang", "--out", tmp_path / "s.json", "--num-hidden-layers", 5)
    assert code == 0 and "--init-expert-location" in out
    assert len(json.loads((tmp_path / "s.json").read_text())["physical_to_logical_map"]) == 5


def test_counts_become_a_verdict_and_a_file_for_an_engine(run: Run, tmp_path: Path) -> None:
    spec, rng = make_spec(2, 8), np.random.default_rng(0)
    with durable.staged_directory(tmp_path / "counts") as folder:
        write_counts(folder, Counted(spec=spec, counts_WLE=rng.integers(1, 1000, (4, 2, 8)) ** 2), {})
    nodes = "".join(f'[[servers]]\nname = "{n}"\n[[servers.gpus]]\nmemory_bytes = "1MB"\ncount = 2\n' for n in "ab")
    (tmp_path / "nodes.toml").write_text(nodes)
    best, map = tmp_path / "best.json", tmp_path / "best.sglang.json"
    inputs = [f"--trace={tmp_path / 'counts'}", f"--cluster={tmp_path / 'nodes.toml'}", "--for", "sglang"]
    code, out, err = run("compare", *inputs, "--machine", "h100-node", "--out", best)
    assert code == 0, err
    assert (
        "no recipe has" in out and "slots per GPU" in out and "held out: " in out and "left out: redundant puts" in out
    )
    assert "it pays after" in out and "windows" in out and "SGLang" in out and "TensorRT" not in out
    code, out, err = run("export", best, "--format", "sglang", "--out", tmp_path / "best.sglang")
    assert code == 2 and ".json" in err and not (tmp_path / "best.sglang").exists()
    code, out, _ = run("export", best, "--format", "sglang", "--out", map)
    slots = len(PlacementPlan.load(best).experts_LG[0][0])
    assert code == 0 and f"--ep-num-redundant-experts {4 * slots - 8}" in out
    assert [len(row) for row in json.loads(map.read_text())["physical_to_logical_map"]] == [4 * slots] * 2
    code, out, _ = run("migrate", best, best, inputs[0], "--machine", "h100-node")
    assert code == 0 and "nothing moves" in out and "worth it" not in out
    made = ("placement", *inputs, "--planner", "uniform", "--slots-per-gpu", slots, "--out", tmp_path / "even.json")
    assert run(*made)[0] == 0
    tokens = ExpertCounts(tmp_path / "counts").num_tokens
    code, out, _ = run("migrate", tmp_path / "even.json", best, inputs[0], "--machine", "h100-node")
    assert code == 0 and f"over {tokens:,.0f} tokens" in out and not list(tmp_path.glob("moves*"))
    code, _, err = run("placement", *inputs, "--planner", "eplb", "--redundant", 3, "--out", tmp_path / "x.json")
    assert code == 2 and "--redundant is 3" in err


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["--planner", "unifrm"], 2, "did you mean 'uniform'"),
        (["--planner", "uniform", "--set", "starts=last"], 2, "unknown --set starts 'last'"),
        (["--planner", "uniform", "--c-max", "3"], 2, "unknown option 'c_max' of planner uniform"),
        (["--planner", "director", "--c-max", "2"], 4, "raise c_max"),
        (["--planner", "uniform", "--set", "seed=-1"], 2, "--set seed is -1, expected at least 0"),
        (["--planner", "uniform", "--set", "value_bytes=0"], 2, "--set value_bytes is 0, expected at least 1"),
        (["--planner", ".x"], 2, "planner '.x' is not a module name"),
        (["--planner", "os.path"], 2, "os.path is not a planner"),
        (["--planner", "uniform", "--split", "2"], 2, "expected a share above 0"),
        (["--planner", "uniform", "--profile", "none.json"], 2, "no profile at none.json"),
        (["--planner", "uniform", "--trace", "c=x"], 2, "no trace at x"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    run: Run, folder: Path, tmp_path: Path, args: list[str], code: int, message: str
) -> None:
    found, out, err = run("placement", *_inputs(folder), "--out", tmp_path / "p.json", *args)
    assert (found, out) == (code, ""), err
    assert message in err and len(err.strip().splitlines()) == 1
    assert not (tmp_path / "p.json").exists()


def test_what_cannot_be_exported_or_compared_is_said_in_one_line(run: Run, folder: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    run("placement", *_inputs(folder), "--planner", "prism_exact", "--out", plan)
    for args, message in (
        (["export", plan, "--format", "sglan", "--out", tmp_path / "x"], "did you mean 'sglang'"),
        (["export", plan, "--format", "route_csv", "--out", tmp_path / "x"], "unknown format of plans"),
        (["compare", *_inputs(folder), "--set", "prizm.fill=true"], "write PLANNER.OPTION=VALUE"),
        (["compare", *_inputs(folder), "--set", "director=3", "--c-max", "2"], "write PLANNER.OPTION=VALUE"),
        (["compare", *_inputs(folder), "--planner", ","], "no planner to compare, expected some of annealing"),
        (["compare", *_inputs(folder), "--unseen-task", folder / "a"], "is the trace of server a, expected"),
        (["score", plan, *_inputs(folder)[:2], "--set", "kicks=1"], "'kicks' is unknown here"),
    ):
        code, out, err = run(*args)
        assert (code, out) == (2, ""), err
        assert message in err and len(err.strip().splitlines()) == 1
