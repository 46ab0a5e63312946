"""Speculative decoding priced by replay, against values known by hand."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from moetool.bench.bench_result import read_result, show
from moetool.bench.draft_pricing import DraftOptions, ngram, price_drafts
from moetool.errors import UsageError
from moetool.trace.reader import Trace
from tests.command_line import exit_code
from tests.synthetic_routes import make_spec, write_trace


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    folder = tmp_path_factory.mktemp("drafts") / "trace"
    return Trace(write_trace(folder, make_spec(4, 16, 2), num_requests=5))


def test_drafts_follow_the_longest_match_and_the_latest() -> None:
    assert ngram([1, 2, 3, 9, 2, 3, 7, 2, 3], 2, 3) == [7, 2]  # of the two places after 2 3 the later one
    assert ngram([5, 1, 2, 6, 1, 2, 8, 5, 1, 2], 3, 3) == [6, 1, 2]  # 5 1 2 is longer than 1 2
    assert ngram([1, 2, 3], 4, 3) == [] and ngram([4], 4, 3) == []


def test_a_perfect_drafter_loads_the_union_of_its_tokens_once(trace: Trace) -> None:
    options = DraftOptions(policy="on_demand", share=0.25, length=3, accepted=(1.0, 0.0), compute=0.0)
    rows = {row["drafter"]: SimpleNamespace(**row) for row in price_drafts([trace], options).rows}
    none, perfect, never = rows["none"], rows["1"], rows["0"]
    assert none.loads_per_token == 4 * 2 and none.tokens_per_forward == 1.0  # four layers, two experts, nothing kept
    assert perfect.right == 1.0 and 1.0 < perfect.tokens_per_forward <= 4.0
    assert perfect.loads_per_token < none.loads_per_token and perfect.speedup_loads > 1.0
    assert perfect.speedup_loads == pytest.approx(none.loads_per_token / perfect.loads_per_token)
    assert perfect.speedup == perfect.speedup_loads  # computing is free here
    assert (never.right, never.tokens_per_forward) == (0.0, 1.0) and never.speedup_loads < 1.0


def test_verification_compute_lowers_the_speedup(trace: Trace) -> None:
    rows = {
        verify: SimpleNamespace(
            **price_drafts([trace], DraftOptions(verify=verify, compute=1.0, accepted=(0.0,))).rows[-1]
        )
        for verify in (1.0, 3.0)
    }
    assert rows[1.0].loads_per_token == rows[3.0].loads_per_token
    assert rows[1.0].speedup > rows[3.0].speedup


def test_a_killed_run_keeps_its_rows(trace: Trace, tmp_path: Path) -> None:
    file, broken = tmp_path / "drafts.json", SimpleNamespace()  # not a trace
    with pytest.raises(AttributeError):
        price_drafts([trace, broken], DraftOptions(accepted=(), tokens=40), file)  # type: ignore[list-item]
    assert {row["trace"] for row in read_result(file).rows} == {"trace"}
    show(read_result(file))


def test_refusals_and_the_command(
    trace: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for wrong in ({"length": 0}, {"share": 0.0}, {"accepted": (2.0,)}, {"verify": -1.0}):
        with pytest.raises(UsageError, match="expected"):
            DraftOptions(**wrong)  # type: ignore[arg-type]
    given = ("bench", "drafts", "--trace", trace.path, "--set", "accepted=[0.5]", "--set", "tokens=40")
    assert exit_code(monkeypatch, *given, "--out", tmp_path) == 0
    printed = capsys.readouterr().out
    assert "loads/token" in printed and "0.5" in printed and (tmp_path / "drafts.json").is_file()
