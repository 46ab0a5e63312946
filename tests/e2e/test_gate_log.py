"""`moetool serve --log` with a server that is killed and a disk that is full."""

import contextlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moetool.trace.reader import Trace
from moetool.tuning.replay import replay
from tests.command_line import exit_code
from tests.server_process import ServerProcess, loads_arrow, quarter_of_experts, served
from tests.servers import eventually, get, post

ASK: dict[str, Any] = {"model": "reference", "prompt": "The king said", "temperature": 0}
SEGMENT_S = 0.2


def serve_with(log: Path) -> list[str]:
    return [*quarter_of_experts(), "--log", str(log), "--set", f"log_segment_s={SEGMENT_S}"]


def ask(process: ServerProcess, max_tokens: int = 40) -> str:
    status, answer = post(process.url, "/v1/completions", {**ASK, "max_tokens": max_tokens})
    assert status == 200, answer
    return str(answer["choices"][0]["text"])


def metric(process: ServerProcess, name: str) -> float:
    lines = get(process.url, "/metrics")[2].splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(f"moetool_gate_log_{name}"))


def decides_again(trace: Trace) -> None:
    """Require that a replay of the log so far takes the server's decisions."""
    facts = trace.manifest["provenance"]
    (row,) = replay(trace, ["lru"], [facts["slots"] * trace.spec.slot_bytes])
    assert row.digest == facts["decisions"] and row.counts.needed > 100


def test_a_killed_server_leaves_its_log_and_the_next_one_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"

    def moetool(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = exit_code(monkeypatch, *arguments)
        return code, *capsys.readouterr()

    with served(*serve_with(log)) as process:
        assert loads_arrow(process)
        texts = [ask(process) for _ in range(3)]
        eventually(lambda: metric(process, "rows_waiting") == 0)
        rows = metric(process, "rows_written_total")
        code, out, err = moetool("trace", "info", str(log))
        assert code == 0 and "still being written" in out, err
        process.kill()
    trace = Trace(log)
    trace.verify()
    assert not trace.closed and trace.num_tokens == rows >= 3 * 40
    decides_again(trace)
    code, out, err = moetool("replay", "--trace", str(log), "--policy", "lru", "--budget", "25%", "--json")
    assert code == 0 and json.loads(out) and "its server was killed" in err, err
    assert "its server was killed" in moetool("trace", "info", str(log))[1]
    assert moetool("trace", "head", str(log), "--out", str(tmp_path / "head"), "--requests", "2")[0] == 0
    assert Trace(tmp_path / "head").closed

    with served(*serve_with(log)) as again:
        assert f"of a killed server to {log}.1" in again.narration
        assert ask(again) == texts[0]
        assert again.stop() == 0
    assert Trace(tmp_path / "log.1").sha256 == trace.sha256
    closed = Trace(log)
    assert closed.closed
    decides_again(closed)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["head", "log", "log.1"]
    code, _, err = moetool("serve", *serve_with(log), "--port", "0")
    assert code == 2 and "exists already" in err


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A small file system in memory."""
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("needs root, to mount a small file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_ends_neither_the_server_nor_the_log_before_it(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "1M") as disk, served(*serve_with(disk / "log")) as process:
        text = ask(process)
        eventually(lambda: metric(process, "rows_waiting") == 0)
        before = Trace(disk / "log")
        filler = disk / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        assert ask(process) == text
        eventually(lambda: metric(process, "failing") == 1)
        health = json.loads(get(process.url, "/health")[2])
        assert health["status"] == "ok"
        assert health["problems"] and "No space left on device" in health["problems"][0], health
        stats = json.loads(get(process.url, "/stats")[2])["engine"]["gate_log"]
        assert stats["waiting"] >= 40 and "No space left" in stats["error"] and not stats["lost"]
        assert process.narration.count("cannot write the gate log") == 1
        assert Trace(disk / "log").num_tokens == before.num_tokens
        decides_again(Trace(disk / "log"))

        filler.unlink()  # room again
        eventually(lambda: metric(process, "failing") == 0)
        assert "problems" not in json.loads(get(process.url, "/health")[2])
        whole = Trace(disk / "log")
        assert whole.num_tokens > before.num_tokens
        decides_again(whole)

        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        assert ask(process) == text
        assert process.stop() == 1
        assert "rows: the rest could not be written (No space left on device" in process.narration.replace("\n", " ")
        assert Trace(disk / "log").num_tokens >= whole.num_tokens
        decides_again(Trace(disk / "log"))
