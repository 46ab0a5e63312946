"""`moetool simulate`, as a user calls it."""

import json
from pathlib import Path

import pytest

from tests.command_line import Run
from tests.synthetic_routes import make_spec, write_trace

COMMAND = ("simulate",)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Traces of two servers, and their cluster."""
    folder = tmp_path_factory.mktemp("simulate")
    for seed, name in enumerate(("a", "b")):
        write_trace(folder / name, make_spec(2), num_requests=8, seed=seed)
    servers = "".join(f'[[servers]]\nname = "{n}"\n[[servers.gpus]]\nmemory_bytes = "9kB"\n' for n in ("a", "b"))
    (folder / "cluster.toml").write_text('link_bytes_s = "1kB"\n' + servers)
    return [f"--trace=a={folder / 'a'}", f"--trace=b={folder / 'b'}", f"--cluster={folder / 'cluster.toml'}"]


def test_one_run_says_who_waited_where_bytes_went_and_what_eq_4_said(run: Run, inputs: list[str]) -> None:
    given = (*inputs, "--planner", "prism", "--arrivals", "every:5s", "--requests", "16", "--set", "replan_s=10")
    code, out, err = run(*given)
    assert (code, err) == (0, "")
    for text in ("mean latency by server: ", "computed locally until", "a -> b", "Eq. 4", "assumed costs"):
        assert text in out
    code, out, _ = run(*given, "--json")
    found = json.loads(out)
    assert code == 0 and found["options"]["replan_s"] == 10
    (only,) = found["runs"]
    assert only["requests"] == len(only["served"]["finished_s"]) == 16
    assert only["latency_s"]["mean"] >= only["mean_first_token_s"] > 0
    assert {"saved_s", "cost_s", "worth_it"} <= only["migrations"][0].keys()
    assert run(*given, "--json")[1] == out


def test_modes_and_grids_side_by_side_are_drawn(run: Run, inputs: list[str], tmp_path: Path) -> None:
    svg, png = tmp_path / "over_time.svg", tmp_path / "grid.png"
    code, out, err = run(*inputs, "--planner", "uniform,redundant", "--requests", 8, "--figure", svg)
    assert (code, err) == (0, "")
    assert out.index("uniform") < out.index("redundant") and f"drawn in {svg}" in out
    assert "redundant" in svg.read_text() and "latency per request" in svg.read_text()
    sweeps = ("--sweep", "gpus=2,4", "--sweep", "seed=0,1")
    code, out, err = run(*inputs, "--planner", "redundant", "--requests", 4, *sweeps, "--figure", png, "--json")
    assert (code, err) == (0, "")
    runs = json.loads(out)["runs"]
    assert [one["at"] for one in runs] == [{"gpus": g, "seed": s, "planner": "redundant"} for g in "24" for s in "01"]
    assert [one["requests"] for one in runs] == [4, 4, 8, 8]
    assert png.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("planners", "links"),
    [
        ("prism", "links by server;"),
        ("director-offline", "links per GPU;"),
        ("director-offline,prism", "server or per GPU"),
    ],
)
def test_links_are_those_of_the_mode(run: Run, inputs: list[str], planners: str, links: str) -> None:
    code, out, err = run(*inputs, "--planner", planners, "--requests", 2, "--set", "links=server")
    assert (code, err) == (0, "") and links in " ".join(out.split())


def test_what_is_wrong_is_said_in_one_line(run: Run, inputs: list[str], tmp_path: Path) -> None:
    for args, code, said in (
        (["--planner", "prsm"], 2, "unknown --planner 'prsm': did you mean 'prism'"),
        (["--planner", "director-offlin"], 2, "did you mean 'director-offline'"),
        (
            ["--planner", "mine"],
            2,
            "known: PLANNER-offline, PLANNER-proactive, PLANNER-reactive, annealing, director, ",
        ),
        (["--planner", "prism", "--arrivals", "often"], 2, "write poisson:10s"),
        (["--planner", "prism", "--sweep", "gpu=2"], 2, "did you mean 'gpus'"),
        (["--planner", "prism", "--sweep", "bandwidth=x"], 2, "a rate such as 500Mbps"),
        (["--planner", "prism", inputs[0].replace("=a=", "=other=")], 2, "unknown server 'other'"),
        (["--planner", "prism", "--figure", tmp_path / "drawn.txt"], 2, "not a supported figure format"),
        (["--planner", "prism", "--set", "seats=0"], 2, "expected at least 1"),
        (["--planner", ","], 2, "names no planner"),
        (["--planner", "prism", "--plan", "p.json", "--sweep", "gpus=2"], 2, "leave one of them out"),
    ):
        found, out, err = run(*inputs, *args)
        assert (found, out, err.count("\n")) == (code, "", 1)
        assert said in err
