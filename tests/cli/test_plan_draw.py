"""`moetool plan cache --draw`: the frontier as a picture."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from moetool.base.tables import unbroken
from moetool.caching.plan import CachePlan
from moetool.report.figures.frontier import draw_frontier
from moetool.trace.reader import Trace
from tests.command_line import exit_code
from tests.plans import choose_cache


def _run(monkeypatch: pytest.MonkeyPatch, *args: object) -> int:
    return exit_code(monkeypatch, "plan", "cache", "--device-memory", "31MB", *args)


def test_the_frontier_is_drawn(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, svg, png = (tmp_path / name for name in ("plan.json", "frontier.svg", "frontier.png"))
    planning = ("--trace", trace, "--out", out, "--frontier", "2", "--draw")
    assert _run(monkeypatch, *planning, svg) == 0
    plan = CachePlan.load(out)
    draw_frontier(png, plan)
    assert png.read_bytes().startswith(b"\x89PNG")
    words = {text.text for text in ElementTree.parse(svg).iter("{http://www.w3.org/2000/svg}text")}
    assert {point["policy"] for point in plan.frontier} <= words
    assert {"device memory, MB", "MB/decode token", "held out", "the plan"} <= words
    first = svg.read_bytes()
    draw_frontier(svg, plan)
    assert svg.read_bytes() == first
    page = tmp_path / "page.html"
    assert exit_code(monkeypatch, "report", out, "--out", page) == 0
    text = page.read_text()
    assert all(point["policy"] in text for point in plan.frontier)
    evidence = {row["policy"]: row for row in plan.evidence}
    assert f"<td>{evidence['belady']['hit_rate_decode']:.3f}</td>" in text and unbroken(plan.reason) in text
    hosted = choose_cache(Trace(trace), 5_000_000, policies=["static_split"])
    hosted.save(tmp_path / "hosted.json")
    assert exit_code(monkeypatch, "report", tmp_path / "hosted.json", "--out", page, "--overwrite") == 0
    (on_host,) = [row["host_bytes_per_decode_token"] for row in hosted.evidence if row["policy"] == "static_split"]
    assert on_host > 0 and f"<td>{on_host / 1e6:,.3f}</td>" in page.read_text()
    capsys.readouterr()
    planning = ("--overwrite", *planning)
    assert _run(monkeypatch, *planning, tmp_path / "frontier.gif") == 2
    assert "use .svg, .png, .pdf" in capsys.readouterr().err
    assert _run(monkeypatch, *planning, svg, "--frontier", 0) == 2
    assert "--draw draws the frontier" in capsys.readouterr().err
