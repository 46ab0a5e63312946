"""Output on a terminal: no cell is split at any width."""

import re
import sys
import time

import pytest

from moetool.base import tables
from tests.servers import eventually

COLUMNS = [
    "planner",
    "requests",
    "clinic",
    "court",
    "in all",
    "remote calls",
    "sent",
    "seconds to plan",
    "TensorRT-LLM",
]
ROWS = [
    ["prism_exact", "planned on", "87.1 %", "81.4 %", "87.6 %", "16,892", "13.0 MB", "0.54", "0.446"],
    ["uniform", "unseen task", "25.5 %", "23.2 %", "33.3 %", "1,355,040", "142.3 MB", "0.01", "0.540"],
]


class _Terminal:
    """Standard output that says it is a terminal, and passes what is written on."""

    def __init__(self, out: object) -> None:
        self._out = out

    def isatty(self) -> bool:
        return True

    def __getattr__(self, name: str) -> object:
        return getattr(self._out, name)


def _seen(capsys: pytest.CaptureFixture[str]) -> str:
    """The printed text, without the codes for bold type."""
    return re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)


def _on_terminal(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setattr(sys, "stdout", _Terminal(sys.stdout))
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_no_number_is_broken_on_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], width: int
) -> None:
    _on_terminal(monkeypatch, width)
    tables.print_table("placements side by side", COLUMNS, ROWS, num_text=2)
    out = _seen(capsys)
    assert max(map(len, out.splitlines())) <= width
    for row in ROWS:
        for cell in row[2:]:
            assert out.count(cell) >= 1, cell
    for word in " ".join(COLUMNS[2:]).split():
        assert word in out
    assert len(re.findall(r"─ *$", out, re.M)) == {40: 6, 60: 3, 80: 2, 120: 1}[width]


def test_a_file_gets_one_table_without_escape_codes(capsys: pytest.CaptureFixture[str]) -> None:
    tables.print_table("placements", COLUMNS, ROWS, num_text=2)
    out = _seen(capsys)
    assert "\x1b" not in out and "(part" not in out
    assert len([line for line in out.splitlines() if line.strip()]) == 5  # title, two of headings' height, rows


def test_texts_alone_are_folded(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    _on_terminal(monkeypatch, 40)
    tables.print_table("", ["family", "remarks"], [["afmoe", "a sentence " * 8]], num_text=2)
    assert max(map(len, _seen(capsys).splitlines())) <= 40


@pytest.mark.parametrize("width", [80, 100])
def test_words_of_texts_stay_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], width: int
) -> None:
    _on_terminal(monkeypatch, width)
    row = ["compressed-tensors", "packed, unpacked for each product", "packed_linear.safetensors", "12,345"]
    tables.print_table("", ["format", "in memory", "file", "bytes"], [row], num_text=3)
    out = _seen(capsys)
    assert max(map(len, out.splitlines())) <= width
    for word in " ".join(row).split():
        assert word in out


def test_a_unit_stays_with_its_number(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    _on_terminal(monkeypatch, 40)
    tables.print_paragraph("hit rate of the last forwards in decode 42 % or 120 ms of 12.5 MB/s")
    assert [line.split()[-1] for line in _seen(capsys).splitlines()] == ["decode", "MB/s"]


def test_narration_and_errors_wrap_between_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "moetool demo: a small Mixture-of-Experts model, from its gate logits to a server"
    tables.narrate(line)
    assert capsys.readouterr().err == f"{line}\n"
    monkeypatch.setattr(sys, "stderr", _Terminal(sys.stderr))
    monkeypatch.setenv("COLUMNS", "60")
    for show in (tables.narrate, tables.complain):
        show(line)
        assert capsys.readouterr().err == line.replace(" gate", "\n  gate") + "\n"


def test_names_stay_whole_and_what_tells_rows_apart_is_in_every_part(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _on_terminal(monkeypatch, 60)
    tables.print_table("", ["name", "licence"], [["livecodebench", "a sentence " * 9]], num_text=2)
    assert "livecodebench" in _seen(capsys)
    columns = ["policy", "budget", *(f"measure {i}" for i in range(9))]
    tables.print_table("", columns, [["lru", f"{b}.0 MB", *["0.12345"] * 9] for b in (2, 4)], num_keys=2)
    out = _seen(capsys)
    assert out.count("lru") == 2 * out.count("2.0 MB") == 2 * out.count("4.0 MB") > 2


@pytest.mark.parametrize("width", [50, 80])
def test_lines_are_wrapped_between_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], width: int
) -> None:
    rows = [("memory", "21.9 GB free", "weights, cache and slots share what is free: see --device-memory for the rest")]
    tables.print_lines(rows)
    assert _seen(capsys) == f"memory  21.9 GB free  {rows[0][2]}\n"
    _on_terminal(monkeypatch, width)
    tables.print_lines(rows)
    out = _seen(capsys)
    assert max(map(len, out.splitlines())) <= width
    assert out.split() == " ".join(rows[0]).split()
    assert len(out.splitlines()) > 1


def test_lines_of_one_list_wrap_alike(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    _on_terminal(monkeypatch, 80)
    tables.print_lines([("disk", "3.0 GB/s", "as given"), ("misses", "x" * 60, "published routes")])
    lines = [line.strip() for line in _seen(capsys).splitlines()]
    assert lines == ["disk    3.0 GB/s", "as given", f"misses  {'x' * 60}", "published routes"]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_amount_of_a_progress_line_stays_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], width: int
) -> None:
    monkeypatch.setattr(sys, "stderr", _Terminal(sys.stderr))
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    with tables.stages() as report:
        for done in (1_373, 2_746):
            report("capturing a model of a long name", done, 7_799, "301 tokens/s, 0.15 experts/token, 15.5 MB read")
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", capsys.readouterr().err).rstrip()
    line = shown[shown.rindex("capturing") :]
    assert re.search(r" 2,746 of 7,799(, \d+ s left)?$", line), line
    assert len(line) <= width and ("━" in line) == (width == 120)


def test_numbers_for_people() -> None:
    assert [tables.significant(n) for n in (142_840.6, 1000, 948.84, 0.41434, 0)] == [
        *("142,841", "1,000", "948.8", "0.4143", "0")
    ]
    assert [tables.numbered(n, "prompt") for n in (0, 1, 1200)] == ["0 prompts", "1 prompt", "1,200 prompts"]


@pytest.mark.parametrize("says", [True, False])
def test_a_slow_start_is_said_once_and_only_if_nothing_else_was(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], says: bool
) -> None:
    monkeypatch.setattr(tables, "LINE_S", 0.5 if says else 0.05)
    narrated = ""

    def narrates() -> bool:
        nonlocal narrated
        narrated += capsys.readouterr().err
        return bool(narrated)

    with tables.start_line():
        if says:
            tables.narrate("moetool: at work")
            time.sleep(0.6)
        eventually(narrates)
    time.sleep(0.1)
    narrates()
    assert narrated == ("moetool: at work\n" if says else "moetool: starting\n")
