"""Pages of placements, cache plans and simulated runs, as a user asks for them."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from moetool.base import tables
from tests.command_line import Run
from tests.synthetic_routes import make_spec, write_trace


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Traces of two servers, and their cluster."""
    folder = tmp_path_factory.mktemp("pages")
    traces = [
        f"--trace={name}={write_trace(folder / name, make_spec(2), num_requests=8, seed=s)}"
        for s, name in enumerate("ab")
    ]
    servers = "".join(f'[[servers]]\nname = "{n}"\n[[servers.gpus]]\nmemory_bytes = "9kB"\n' for n in "ab")
    (folder / "cluster.toml").write_text('link_bytes_s = "1kB"\n' + servers)
    return {"traces": traces, "cluster": f"--cluster={folder / 'cluster.toml'}", "folder": folder}


def _needs_nothing_else(page: str) -> bool:
    return not re.search(r'(?:src|href)="(?!#|data:)', page)


def test_a_placement_beside_the_one_before_it(run: Run, inputs: dict[str, Any], tmp_path: Path) -> None:
    plans = {name: tmp_path / f"{name}.json" for name in ("uniform", "prism_exact")}
    for name, file in plans.items():
        assert run("plan", "placement", *inputs["traces"], inputs["cluster"], "--planner", name, "--out", file)[0] == 0
    out = tmp_path / "page.html"
    given = ("report", plans["prism_exact"], "--before", plans["uniform"], "--out", out)
    code, said, err = run(*given, *inputs["traces"])
    assert (code, err) == (0, "")
    page = out.read_text()
    assert _needs_nothing_else(page)
    for text in ("Expert placement: before: uniform", "Expert placement: after: prism_exact"):
        assert text in page
    code, printed, _ = run(*given, *inputs["traces"], "--json", "--overwrite")
    before, after = json.loads(printed)
    assert code == 0 and after["local"] > before["local"]
    for found in (before, after):  # the page shows what plan score prints
        name = found["planner"]
        scored = json.loads(run("plan", "score", plans[name], *inputs["traces"], "--json")[1])
        assert scored["local"] == found["local"] and scored["link_bytes"] == found["link_bytes"]
        local = tables.percent(found["local"])
        assert f"{local} of the calls local" in said and f"<td>{local}</td>".replace(" ", "\xa0") in page
    a_to_b = [sent for a, b, sent in after["link_bytes"] if (a, b) == ("a", "b")]
    assert f"{a_to_b[0] / 1e6:,.1f}" in page  # in the map of traffic
    assert run("report", plans["uniform"], "--out", tmp_path / "alone.html")[0] == 0
    alone = (tmp_path / "alone.html").read_text()
    assert "Traffic between servers" not in alone and "Give --trace SERVER=DIR" in alone


def test_a_simulation_as_a_page_and_a_folder_of_figures(run: Run, inputs: dict[str, Any], tmp_path: Path) -> None:
    page, folder = tmp_path / "page.html", tmp_path / "figures"
    modes = ("--planner", "uniform,eplb-proactive", "--set", "mode=ep", "--set", "admission=rounds")
    sweeps = ("--sweep", "bandwidth=1kB,4kB", "--sweep", "seed=0,1", "--set", "uniform.shuffle=true")
    common = (*inputs["traces"], inputs["cluster"], "--requests", 8, "--arrivals", "every:1s")
    code, out, err = run("simulate", *common, *modes, *sweeps, "--report", page, "--figure", folder)
    assert (code, err) == (0, "")
    text = page.read_text()
    assert _needs_nothing_else(text)
    figures = {"swept": "8", "by-planner": "7, 10 and 11", "relative": "9", "by-round": "8"}
    for key, number in figures.items():
        assert f"Figure {number})" in text or f"Figures {number})" in text
        assert (folder / f"{key}.png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (folder / f"{key}.svg").read_text() and f"drawn in {folder}" in out
    assert "eplb-proactive" in text and "±" in text


def test_what_a_page_cannot_be_made_of_is_refused(run: Run, inputs: dict[str, Any], tmp_path: Path) -> None:
    other, plan, out = tmp_path / "other.json", tmp_path / "plan.json", tmp_path / "page.html"
    other.write_text('{"kind": "migration_plan"}')
    cluster = tmp_path / "cluster.toml"
    cluster.write_text('[[servers]]\nname = "a"\n[[servers.gpus]]\nmemory_bytes = "20kB"\n')
    assert run("plan", "placement", *inputs["traces"], inputs["cluster"], "--planner", "uniform", "--out", plan)[0] == 0
    single = tmp_path / "single.json"
    alone = ("plan", "placement", inputs["traces"][0], f"--cluster={cluster}", "--planner", "uniform", "--out", single)
    assert run(*alone)[0] == 0
    for args, code, said in (
        ((other,), 2, "holds migration_plan"),
        ((cluster,), 2, "holds something else"),
        ((plan, "--before", single), 3, "another cluster"),
        ((plan, "--before", other), 3, "expected a placement_plan"),
        ((plan, "--trace", "c=x"), 2, "no trace at"),
        ((plan, "--policy", "lru"), 2, "apply to traces only"),
        ((inputs["folder"] / "a", "--before", plan), 2, "for the page of a placement plan"),
        ((tmp_path / "none.json",), 2, "no plan at"),
    ):
        found, printed, err = run("report", *args, "--out", out)
        assert (found, printed, err.count("\n")) == (code, "", 1), err
        assert said in err
    assert not out.exists()
    code, _, err = run(
        *("simulate", *inputs["traces"], inputs["cluster"], "--planner", "uniform", "--set", "director.kicks=0")
    )
    assert code == 2 and "fits none of uniform" in err
