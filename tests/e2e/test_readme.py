"""The README's commands, run on the embedded model, and the demo."""

import json
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from moetool.base import assets
from moetool.base.errors import UsageError
from moetool.cli import demo
from tests.command_line import child_environment, exit_code
from tests.documents import blocks, cluster_of, commands
from tests.refusals import refused

ROOT = Path(__file__).resolve().parents[2]


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 80


def test_what_the_readme_links_to_is_there() -> None:
    page = (ROOT / "README.md").read_text()
    for path in (*re.findall(r"!\[[^]]*\]\(([^)]+)\)", page), "moetool/guide", "data/README.md"):
        assert (ROOT / path).exists(), path


def test_every_command_of_the_readme_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    cluster_of(tmp_path, ("clinic", "court"))

    def run(*words: str) -> str:
        assert exit_code(monkeypatch, *words) == 0, f"{words}: {capsys.readouterr().err}"
        return capsys.readouterr().out

    run("capture", "reference", "--data", "chat,code", "--max-prompts", "3", "--max-new-tokens", "8", "--out", "both")
    run("trace", "export", "both", "--format", "route_csv", "--out", "routes.csv")
    run("trace", "split", "both", "--by", "task", "--out", "parts")
    for name, part in zip("AB", sorted(folder for folder in Path("parts").iterdir() if folder.is_dir()), strict=True):
        part.rename(name)
    paths = [commands(block) for block in blocks((ROOT / "README.md").read_text()) if block.language == "bash"]
    assert [len(path) for path in paths] == [3, 3, 3, 3]
    for path in paths:
        for words in path:
            if words[1] == "serve":
                _serve(words, *(others for others in path if others[1] == "chat"))
            elif words[1] != "chat":
                run(*words[1:])


def _serve(words: list[str], *chats: list[str]) -> None:
    """Serve as the line says, ask once and by each chat, stop by Ctrl-C."""
    command = [sys.executable, "-m", "moetool.cli.main", *words[1:], "--port", "0"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=child_environment())
    assert server.stderr is not None
    try:
        serving = next(line for line in server.stderr if "serving on" in line)
        url = serving.split()[-1]
        assert url.startswith("http://127.0.0.1:"), serving
        body = json.dumps({"model": "reference", "prompt": "12 + 7 =", "max_tokens": 4}).encode()
        request = urllib.request.Request(f"{url}/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as response:
            assert json.load(response)["usage"]["completion_tokens"] >= 1
        for chat in chats:
            asking = [sys.executable, "-m", "moetool.cli.main", "chat", url.removesuffix("/v1"), *chat[2:]]
            said = subprocess.run(
                asking,
                input="What is the weather in London?\n",
                capture_output=True,
                text=True,
                env=child_environment(),
            )
            assert "temperature" in said.stdout and "User:" not in said.stdout, said.stderr
    finally:
        server.send_signal(signal.SIGINT)  # Ctrl-C
        _, rest = server.communicate(timeout=60)
    assert server.returncode == 0, rest


@pytest.mark.follows("moetool.cli.demo run")
def test_the_demo_serves_the_plain_models_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole pipeline on fewer prompts, shorter answers and one memory size."""
    recipe = ("recipes", "reference", "capture.toml")
    path, text = assets.path, assets.path(*recipe).read_text()
    smaller = text.replace("max_prompts = 20", "max_prompts = 4").replace("max_new_tokens = 32", "max_new_tokens = 8")
    assert len(smaller) == len(text) - 2
    (tmp_path / recipe[-1]).write_text(smaller)
    monkeypatch.setattr(assets, "path", lambda *parts: tmp_path / recipe[-1] if parts == recipe else path(*parts))
    monkeypatch.setattr(demo, "NEW_TOKENS", 8)
    monkeypatch.setattr(demo, "SHARES", (0.25,))
    (tmp_path / "file").touch()
    with refused(UsageError, "another --out"):
        demo.run(tmp_path / "file")
    demo.run(tmp_path / "demo")
    out = capsys.readouterr().out
    table = out[out.index("6 questions of 8 tokens") :]
    assert table.count("identical") == 3
    assert "Done in" in table
    for name in ("trace/manifest.json", "predictor/card.json", "plan.json", "memory.svg"):
        assert (tmp_path / "demo" / name).is_file()
