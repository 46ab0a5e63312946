"""`moetool bench rivals` on the embedded model: cells are measured, or give a reason."""

import json
from pathlib import Path

import pytest

from moetool.base.errors import CapacityError
from moetool.bench import plain_generation
from moetool.bench.bench_result import read_result, show
from moetool.bench.memory_limits import limited_group
from moetool.bench.rivals import ENGINES, RivalOptions, bench_rivals
from moetool.models.checkpoint import Checkpoint
from tests.command_line import exit_code
from tests.refusals import refused

SMALL = ["--set", "prompt_tokens=16", "--set", "new_tokens=4", "--set", "rounds=1", "--set", "threads=1"]


def _run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    return exit_code(monkeypatch, "bench", "rivals", "reference", *arguments)


def test_cells_are_measured_or_say_why_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    done = _run(
        monkeypatch,
        *SMALL,
        "--set",
        "shares=[0]",
        "--set",
        "dtype=float32",
        "--set",
        "alternate=true",
        "--json",
        "--out",
        str(tmp_path),
    )
    printed, said = capsys.readouterr()
    assert done == 0, said
    made = json.loads(printed)
    cells, facts = {row["engine"]: row for row in made["rows"]}, made["facts"]
    assert tuple(cells) == ENGINES
    assert cells["llama.cpp"]["why"] == "no llama-server on the PATH; give --llama-server"
    assert "decode_tokens_s" not in cells["llama.cpp"]
    for engine in ("moetool", "transformers"):
        assert "why" not in cells[engine]
        assert cells[engine]["prefill_tokens_s"] > 0
        assert cells[engine]["decode_tokens_s"] > 0
    assert facts["token_bytes"] < facts["model_bytes"]
    assert facts["bound_tokens_s"] == pytest.approx(facts["memory_bytes_s"] / facts["token_bytes"])
    assert json.loads((tmp_path / "rivals.json").read_text()) == made
    for row in (cells["moetool"], cells["transformers"]):  # whatever a busy machine's memory gave
        row["decode_tokens_s"] = facts["bound_tokens_s"] / 2
    (tmp_path / "rivals.json").write_text(json.dumps(made))
    assert exit_code(monkeypatch, "bench", "show", str(tmp_path / "rivals.json")) == 0
    shown = capsys.readouterr().out
    assert "ERROR" not in shown
    made["rows"][0]["decode_tokens_s"] = 2 * facts["bound_tokens_s"]
    (tmp_path / "rivals.json").write_text(json.dumps(made))
    assert exit_code(monkeypatch, "bench", "show", str(tmp_path / "rivals.json")) == 0
    assert "ERROR: moetool decoded faster than the bound" in capsys.readouterr().out
    made["facts"] |= {"bound_tokens_s": 10.0, "disk_bytes_s": 1e6}
    made["rows"][0] |= {"decode_tokens_s": 1.0, "read_token_bytes": 4e5}
    (tmp_path / "rivals.json").write_text(json.dumps(made))
    assert exit_code(monkeypatch, "bench", "show", str(tmp_path / "rivals.json")) == 0
    assert "2.50" in capsys.readouterr().out  # reading 0.4 s of a second
    assert "transformers" in shown and "not measured: llama.cpp, memory all: no llama-server" in shown


@pytest.mark.follows("moetool.bench.rivals _served")
def test_it_fails_if_no_engine_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("moetool.bench.rivals.memory_bandwidth", lambda threads: 1e9)
    server = tmp_path / "llama-server"
    server.write_text("#!/bin/sh\nexit 3\n")
    server.chmod(0o700)
    arguments = ["--engine", "llama.cpp", "--set", "shares=[0]", "--out", str(tmp_path)]
    for number, (more, said) in enumerate(
        [
            ([], "no llama-server on the PATH; give --llama-server"),
            (["--llama-server", server], "no file of the same weights for llama-server; give --gguf"),
            (["--gguf", server], "llama.cpp ended with status 3"),
        ]
    ):
        arguments += map(str, more)
        assert _run(monkeypatch, *SMALL, *arguments, *(["--overwrite"] if number else [])) == 1
        assert f"not measured: llama.cpp, memory all: {said}" in " ".join(capsys.readouterr().out.split())
        (row,) = read_result(tmp_path / "rivals.json").rows
        assert said in row["why"]


@pytest.mark.parametrize("limit", [1, 15_000_000], ids=["everything", "a part"])
def test_transformers_offloads_what_exceeds_its_memory(limit: int, caplog: pytest.LogCaptureFixture) -> None:
    settings = {"threads": 1, "dtype": "float32", "new_tokens": 2, "prompts": [[5, 6, 7]], "offload_bytes": limit}
    ((prefill_s, decode_s),) = plain_generation.main(str(Checkpoint.open("reference").path), settings)
    assert prefill_s > 0 and decode_s > 0 and "offloaded" in caplog.text


def test_a_file_killed_after_one_row_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def killed_later(said: str) -> None:
        if "transformers" in said:
            raise KeyboardInterrupt

    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("moetool.bench.rivals.narrate", killed_later)
    file = tmp_path / "rivals.json"
    with pytest.raises(KeyboardInterrupt):
        bench_rivals(
            "reference",
            gguf=None,
            llama_server=None,
            engines=("llama.cpp", "transformers"),
            options=RivalOptions(threads=1),
            file=file,
        )
    (row,) = read_result(file).rows
    assert row["engine"] == "llama.cpp"
    show(read_result(file))
    assert "bound" in capsys.readouterr().out


def test_a_wrong_engine_or_share_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for given, said in (
        (("--engine", "lama.cpp"), "unknown engine 'lama.cpp': did you mean 'llama.cpp'?"),
        (("--set", "shares=[2]"), "shares of the model"),
    ):
        assert _run(monkeypatch, *given) == 2 and said in capsys.readouterr().err


def test_without_a_control_group_the_limit_is_refused(tmp_path: Path) -> None:
    with refused(CapacityError, "limit", "memory"), limited_group(2**20, tmp_path / "absent"):
        raise AssertionError
