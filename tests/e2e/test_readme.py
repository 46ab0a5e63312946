"""The README's commands, run as they stand, and the demo."""

import json
import re
import shlex
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from moetool.cli import demo
from moetool.cli import main as cli

ROOT = Path(__file__).resolve().parents[2]


def _commands() -> list[list[str]]:
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line]


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_every_command_of_the_readme_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    *steps, serve, curl = _commands()
    assert [step[1] for step in steps] == ["capture", "trace", "train", "evaluate", "plan", "replay"]
    for step in steps:
        monkeypatch.setattr(sys, "argv", step)
        with pytest.raises(SystemExit) as exit:
            cli.main()
        captured = capsys.readouterr()
        assert exit.value.code == 0, captured.err
        assert captured.out
    assert "belady" in captured.out

    assert serve[:2] == ["moetool", "serve"]
    command = [sys.executable, "-m", "moetool.cli.main", *serve[1:], "--port", "0", "--log", "log"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=_environment())
    assert server.stderr is not None
    try:
        serving = next(line for line in server.stderr if "serving on" in line)
        url = serving.split()[-1]
        assert url.startswith("http://127.0.0.1:"), serving
        assert curl[0] == "curl" and curl[1] == "localhost:8000/v1/completions"
        body = curl[curl.index("-d") + 1].encode()
        request = urllib.request.Request(f"{url}/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as response:
            answer = json.load(response)
        assert answer["usage"]["completion_tokens"] >= 1
    finally:
        server.send_signal(signal.SIGINT)  # Ctrl-C
        _, rest = server.communicate(timeout=60)
    assert server.returncode == 0, rest
    monkeypatch.setattr(sys, "argv", ["moetool", "replay", "--trace", "log", "--policy", "lru", "--budget", "50%"])
    with pytest.raises(SystemExit) as exit:
        cli.main()
    assert exit.value.code == 0


def test_the_demo_serves_the_plain_models_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demo.run(tmp_path / "demo")
    out = capsys.readouterr().out
    table = out[out.index("policy x budget") :]
    assert table.count("identical") == 6
    assert "Done in" in table
    for name in ("trace/manifest.json", "predictor/card.json", "plan.json"):
        assert (tmp_path / "demo" / name).is_file()


def _environment() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
