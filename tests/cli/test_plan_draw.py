"""`moetool plan cache --draw`: the frontier as a picture."""

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from moetool import cli
from moetool.plan import CachePlan


def _run(monkeypatch: pytest.MonkeyPatch, *args: object) -> int:
    monkeypatch.setattr(sys, "argv", ["moetool", "plan", "cache", "--device-memory", "31MB", *map(str, args)])
    try:
        cli.main()
    except SystemExit as exit:
        return exit.code if isinstance(exit.code, int) else 1
    return 0


def test_the_frontier_is_drawn(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, svg, png = (tmp_path / name for name in ("plan.json", "frontier.svg", "frontier.png"))
    planning = ("--trace", trace, "--out", out, "--frontier", "3", "--draw")
    assert _run(monkeypatch, *planning, svg) == 0 and _run(monkeypatch, *planning, png) == 0
    assert png.read_bytes().startswith(b"\x89PNG")
    plan = CachePlan.load(out)
    words = {text.text for text in ElementTree.parse(svg).iter("{http://www.w3.org/2000/svg}text")}
    assert {point["policy"] for point in plan.frontier} <= words
    assert {"device memory, MB", "MB moved a decoded token", "held out", "the plan"} <= words
    first = svg.read_bytes()
    assert _run(monkeypatch, *planning, svg) == 0 and svg.read_bytes() == first
    capsys.readouterr()
    assert _run(monkeypatch, *planning, tmp_path / "frontier.gif") == 2
    assert "end its name in .svg, .png, .pdf" in capsys.readouterr().err
    assert _run(monkeypatch, *planning, svg, "--frontier", 0) == 2
    assert "--draw draws the frontier" in capsys.readouterr().err
