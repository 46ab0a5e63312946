"""`moetool bench paper`, as a user calls it, at its tiny sizes."""

import json
import re
from pathlib import Path

import pytest

from tests.command_line import Run

PROGRESS = re.compile(r"moetool: .+: ([\d,]+ of [\d,]+, )?\d+ s(, [\d,]+ s left)?")
"""A line of progress, on a machine so busy that the work takes ten seconds."""

COMMAND = ("bench", "paper")


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace of the embedded model with every column, small."""
    from moetool.bench.paper.workbench import KEEP
    from moetool.capture.run import CaptureOptions, capture
    from moetool.prompts import gather

    options = CaptureOptions(max_new_tokens=4, batch_size=8, keep=KEEP, dtype="float32")
    texts = list(gather.load(["encyclopedia", "arithmetic", "exam"], max_prompts=6))
    return capture("reference", texts, tmp_path_factory.mktemp("paper") / "trace", options).out


@pytest.mark.parametrize(
    ("paper", "only"),
    [
        ("prism", "Figure 6"),
        ("duoserve", "Figure 2"),
        ("finemoe", "Figure 9"),
        ("smoe", "Figure 4"),
    ],
)
def test_a_claim_of_each_paper(run: Run, captured: Path, tmp_path: Path, paper: str, only: str) -> None:
    given = (f"--trace={name}={captured}" for name in "abc")
    code, out, err = run(paper, "--quick", "--only", only, "--out", tmp_path / "out", *given)
    *told, files = err.splitlines()
    assert code == 0 and all(PROGRESS.fullmatch(line) for line in told), err
    assert "too small for meaningful verdicts" in out
    claim, *others = json.loads((tmp_path / "out" / "verdicts.json").read_text())["rows"]
    assert {claim["id"], *(other["id"] for other in others)} == {only}
    assert claim["verdict"] in ("agrees", "differs", "undecided"), claim["why"]
    assert len({len(values) for values in claim["values"].values()}) == 1
    experiments = ["curves" in each for each in (claim, *others)]
    drawn = sorted((tmp_path / "out").glob("*.svg"))
    assert experiments[0] and len(drawn) == sum(experiments) and all(str(one) in files for one in drawn)
    assert all(one.stat().st_size > 1000 for one in drawn)


def test_shares_of_a_tokens_experts_need_as_many_as_the_papers(run: Run, captured: Path, tmp_path: Path) -> None:
    given = (f"--trace={name}={captured}" for name in "abc")
    code, _, err = run("smoe", "--quick", "--only", "Table I", "--out", tmp_path / "out", *given)
    assert code == 0, err
    (row,) = json.loads((tmp_path / "out" / "verdicts.json").read_text())["rows"]
    assert row["verdict"] == "cannot be tested here" and "4 experts here and 8" in row["why"]


def test_a_claim_whose_tokens_are_missing_says_how_many(run: Run, captured: Path, tmp_path: Path) -> None:
    given = (f"--trace={name}={captured}" for name in "abc")
    code, _, err = run("director", "--quick", "--only", "Figure 8", "--out", tmp_path / "out", *given)
    assert code == 0, err
    for row in json.loads((tmp_path / "out" / "verdicts.json").read_text())["rows"]:
        assert row["verdict"] == "cannot be tested here"
        assert {"3", "64"} <= set(re.findall(r"\d+", row["why"]))


def test_claims_are_judged_again_with_other_links(run: Run, captured: Path, tmp_path: Path) -> None:
    given = (f"--trace={name}={captured}" for name in "abc")
    only = ("--only", "Figure 5", "--links", "0.5")
    code, out, _ = run("prism", "--quick", *only, "--out", tmp_path / "out", *given)
    assert code == 0 and "verdicts by the rate of all links" in out and "0.5 x" in out
    assert "not repeated: Figure 1, Figure 4: diagrams" in out
    found = json.loads((tmp_path / "out" / "verdicts.json").read_text())
    first, again = found["rows"]
    assert (first["links"], again["links"]) == (1.0, 0.5) and first["id"] == again["id"] == "Figure 5"
    assert again["values"]["100 % remote"] > first["values"]["100 % remote"]
    assert found["facts"]["papers"]["prism"]["left_out"][0]["ids"] == ["Figure 1", "Figure 4"]
    assert run("prism", "--links", "0")[0] == 2


def test_all_papers_share_a_folder_that_later_runs_reuse(run: Run, captured: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    assert run("prism", "--quick", "--only", "Figure 5", "--work", work)[0] == 0
    kept = sorted(path.name for path in work.iterdir())
    assert any(name.startswith("trace-") for name in kept) and not any("scratch" in name for name in kept)
    assert run("prism", "--quick", "--only", "Figure 5", "--work", work)[0] == 0
    assert sorted(path.name for path in work.iterdir()) == kept
    code, _, err = run("all", "--only", "Figure 5")
    assert code == 2 and "name the paper" in err


def test_wrong_names_are_answered_with_similar_ones(run: Run, tmp_path: Path) -> None:
    for given, message in (
        ((), "one of: director, "),
        (("prsm",), "did you mean 'prism'"),
        (("none.toml",), "cannot read the recipe none.toml"),
        (("prism", "--only", "Figure 80"), "unknown claim 'Figure 80'"),
        (("prism", "--trace", "here"), "write --trace SERVER=DIR"),
        (("prism", "--work", Path(__file__).parent), "is not empty"),
    ):
        code, _, err = run(*given)
        assert code == 2 and message in err and err.count("\n") == 1, err
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "verdicts.json").touch()
    assert run("prism", "--out", tmp_path / "out")[0] == 2
