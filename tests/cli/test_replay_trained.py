"""`moetool replay --predictor` says which rows come from requests that the predictor was trained on."""

import json
import shutil
from pathlib import Path

import pytest

from moetool.trace import edit
from moetool.trace.reader import Trace
from moetool.training.training import train
from tests.command_line import Run, exit_code

COMMAND = ("replay",)
MARK = "(trained on"


@pytest.fixture(scope="module")
def predictor(trace: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "affinity"
    train("affinity", trace, folder, seed=0)
    return folder


def test_rows_on_requests_of_the_training_are_marked(run: Run, trace: Path, predictor: Path) -> None:
    card = json.loads((predictor / "card.json").read_text())
    seen = len(card["requests"]["train"]) + len(card["requests"]["validation"])
    given = ("--trace", trace, "--policy", "lru,duoserve", "--budget", "25%", "--predictor", predictor)
    code, out, err = run(*given, "--json")
    assert {row["trained_on"] for row in json.loads(out)} == {0} and f"of {len(Trace(trace).requests)} requests" in err
    needed = json.loads(out)[0]["needed"]
    given = (*given, "--requests", "all")
    code, out, _ = run(*given, "--json")
    assert json.loads(out)[0]["needed"] > needed
    assert code == 0
    assert {row["policy"]: row["trained_on"] for row in json.loads(out)} == {"lru": 0, "duoserve": seen}
    _, out, _ = run(*given)
    assert f"duoserve {MARK} {seen})" in out and f"lru {MARK}" not in out and "on new ones it hits less" in out


def test_copies_of_them_in_another_trace_are_known_and_new_ones_are_not(
    run: Run,
    trace: Path,
    predictor: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A prompt is known by its tokens, under any file name."""
    card = json.loads((predictor / "card.json").read_text())
    copied = edit.split(Trace(trace), tmp_path / "parts", by="request", shares=[0.5])["0"]
    whole = Trace(trace)
    names = {(r["dataset"], r["prompt_id"]): r["request"] for r in whole.requests.to_pylist()}
    known = {*card["requests"]["train"], *card["requests"]["validation"]}
    expected = sum(names[r["dataset"], r["prompt_id"]] in known for r in copied.requests.to_pylist())
    assert expected > 0
    given = ("--policy", "duoserve", "--budget", "25%", "--predictor", predictor, "--requests", "all", "--json")
    _, out, _ = run("--trace", copied.path, *given)
    assert json.loads(out)[0]["trained_on"] == expected
    # Nothing is marked where the predictor was trained on other prompts.
    other = Path(shutil.copytree(predictor, tmp_path / "other"))
    card |= {"trace": {**card["trace"], "sha256": "0" * 64}, "seen_prompts": ["tokens:" + "0" * 24]}
    (other / "card.json").write_text(json.dumps(card))
    given = ("--policy", "duoserve", "--budget", "25%", "--predictor", other, "--json")
    _, out, _ = run("--trace", trace, *given)
    assert json.loads(out)[0]["trained_on"] == 0
    _, out, _ = run("--trace", trace, *given[:-1])
    assert "duoserve" in out and MARK not in out
    # Neither is known where the training had no marked prompts: they may be the same.
    card |= {"seen_prompts": ["sequence:tokens:" + "0" * 24]}
    (other / "card.json").write_text(json.dumps(card))
    plan = ("plan", "cache", "--device-memory", "20MB", "--frontier", 0, "--pool", "one", "--out", tmp_path / "p.json")
    for command in (("replay", *given), (*plan, "--predictor", other)):
        capsys.readouterr()
        assert exit_code(monkeypatch, *command, "--trace", trace) == 0
        assert f"{len(whole.requests)} requests of {trace} may repeat" in " ".join(capsys.readouterr().err.split())
