"""Every command and snippet of the guides, in the order in which guides are read; `NOT_RUN` lists the others."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moetool.cli.guide import topics
from tests.command_line import exit_code
from tests.documents import INSTEAD, blocks, cluster_of, commands
from tests.hourly_counts import write_day
from tests.routed_engine import NEW, engine
from tests.servers import serving

REMOTE = "http://HOST:8000"
SHORT = {
    '"Qwen/Qwen3-30B-A3B"': "reference",
    f"MODEL --server {REMOTE}": f"reference --server {REMOTE} --max-prompts 2 --max-new-tokens {NEW}",
    **INSTEAD,
}
SERVERS = ("clinic", "court", "lab")
ROOT = Path(__file__).resolve().parents[2]
URL = "http://127.0.0.1:8000"
NOT_RUN = {
    "README": {"python3 -m venv": "pip's environment", "pip install": "downloads torch"},
    "quickstart": {"pip install": "pip's environment; tests/cli/test_core.py runs without torch"},
    "clusters": {
        "moetool serve MODEL": "several server processes or hosts; tests/cluster runs it",
        "moetool capture MODEL": "minutes of a model; tests/e2e/test_parallel.py runs ranks with a predictor",
        "moetool train cascade": "the trace of that command",
        "moetool plan placement --trace trace --cluster two.toml": "the trace of that command",
        "umask 077": "test_rays_commands_are_those_of_ray runs it",
        "ray get-auth-token": "test_rays_commands_are_those_of_ray runs it",
        "export RAY_AUTH_MODE=token": "Ray on several hosts",
        "ray start": "Ray on several hosts; test_rays_commands_are_those_of_ray checks its options",
        "mkdir -p ~/.ray && scp -p ADDRESS": "a second host",
        "curl http://ADDRESS:8000": "an edge server; tests/cluster/test_hosts.py asks one",
        "moetool doctor --cluster": "Ray on several hosts; tests/cluster/test_hosts.py runs it",
        "PORTS=": "test_rays_commands_are_those_of_ray checks its options",
    },
    "serving": {
        "lm_eval": "lm-eval and a data set from the hub",
        "guidellm run": "guidellm",
        "moetool serve MODEL --set kv_tokens=65536": "a coding agent; tests/e2e/test_coding_agents.py runs two",
        "ANTHROPIC_BASE_URL=": "Claude Code",
        "codex": "Codex",
    },
    "predictors": {
        "moetool train fused --trace trace --out fused --set fit.checkpoint": "a minute; test_fitting.py resumes fits",
        "moetool train path_mlp": "Lightning's arguments; test_fit_trainer.py passes some",
    },
    "traces": {
        "moetool capture MODEL --data chat --out chats --cluster": "Ray on several hosts; test_hosts.py has two",
        "moetool trace import hf://": "the hub; test_remote_files.py imports from a local one",
        "moetool trace import rollout.jsonl": "rollouts of an engine; test_routed_experts_rows.py imports some",
        "moetool trace import trainer.jsonl": "routes of a trainer; test_routed_experts_rows.py imports some",
        "moetool trace diff rollout trainer": "both; test_routed_experts_rows.py compares them",
    },
    "speed": {
        "moetool bench rivals": "llama-server and a GGUF file",
        "make gpu": "a GPU, or published routes and minutes of a CPU",
    },
}
"""By page: the start of each command in a block of `console`, and what it needs."""


@contextmanager
def served(plan: Path | None) -> Iterator[str]:
    """The URL of a server of that plan, or of one with all experts in memory."""
    from moetool.caching.plan import CachePlan
    from moetool.models.checkpoint import Checkpoint
    from moetool.runtime.assembly import build_engine
    from moetool.runtime.serve_options import ServeOptions

    made = plan and CachePlan.load(plan)
    options = ServeOptions(dtype=made.dtype) if made else ServeOptions()  # as `serve --plan`
    engine = build_engine(Checkpoint.open("reference"), options=options, plan=made)
    engine.start()
    with serving(engine) as (url, _):
        yield url


def test_every_command_and_snippet_works(
    tmp_path: Path, reference: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, "."])
    cluster_of(tmp_path, SERVERS)
    write_day(Path("hours.csv"), np.random.default_rng(0).gamma(1.0, 1.0, (3, 4, 32)))
    Path("t.csv").write_text("l,e,t\n0,1,0\n0,2,0\n1,3,0\n1,0,0\n")
    done: set[str] = set()
    for topic, page in topics().items():
        namespace: dict[str, Any] = {"reference": str(reference)}
        server = None
        remote = None
        if topic == "traces":
            shutil.copytree("trace", "quantized-trace")
        if topic == "speed":
            command = ("trace", "export", "parts/chat", "--format", "topk_parquet", "--out", "law.parquet")
            assert exit_code(monkeypatch, *command) == 0
        for block in blocks(page, SHORT):
            text = block.text
            if URL in text and block.language in ("bash", "python"):
                if server is None:
                    server = served(None)
                    namespace["url"] = server.__enter__()
                text = text.replace(URL, namespace["url"])
            if REMOTE in text:
                remote = engine("vllm")
                text = text.replace(REMOTE, remote.__enter__())
            if block.file:
                (tmp_path / block.file).parent.mkdir(exist_ok=True)
                (tmp_path / block.file).write_text(text)
            elif block.language == "python":
                needed = [name for name in ("openai", "duckdb") if re.search(rf"^(import|from) {name}", text, re.M)]
                if all(importlib.util.find_spec(name) for name in needed):
                    exec(compile(text, f"{topic}.md", "exec"), namespace)
            elif block.language == "bash":
                for words in commands(block._replace(text=text)):
                    line = " ".join(words)
                    if words[:2] == ["moetool", "serve"]:
                        server = served(tmp_path / words[words.index("--plan") + 1])
                        namespace["url"] = server.__enter__()
                    elif words[0] == "moetool" and line not in done:
                        assert exit_code(monkeypatch, *words[1:]) == 0, f"{topic}: {line}\n{capsys.readouterr().err}"
                    elif words[0] == "curl" and shutil.which("curl"):
                        answer = subprocess.run([*words, "--silent", "--fail"], capture_output=True, timeout=60)
                        assert json.loads(answer.stdout)["choices"][0]["message"]["content"], answer.stderr
                    else:
                        assert words[0] in ("moetool", "curl", "export"), f"{topic}: {line}"
                    done.add(line)
        for stood_in in (server, remote):
            if stood_in is not None:
                stood_in.__exit__(None, None, None)
        capsys.readouterr()
    assert len(done) > 25


def test_what_is_not_run_is_listed() -> None:
    found: dict[str, set[str]] = {}
    for page, text in {"README": (ROOT / "README.md").read_text(), **topics()}.items():
        assert not re.search(r"^    \S", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M), re.M), f"{page}: indented"
        for block in blocks(text, {}):
            assert block.language in ("bash", "python", "console", "text", "toml"), f"{page}: {block.language}"
            for words in commands(block) if block.language == "console" else ():
                known = [start for start in NOT_RUN.get(page, {}) if " ".join(words).startswith(start)]
                assert known, f"{page}: {' '.join(words)}"
                found.setdefault(page, set()).update(known)
    assert found == {page: set(starts) for page, starts in NOT_RUN.items()}


def test_rays_commands_are_those_of_ray(tmp_path: Path) -> None:
    ray = shutil.which("ray")
    if ray is None:
        pytest.skip("Ray is not installed")
    lines = [
        words for block in blocks(topics()["clusters"]) if block.language == "console" for words in commands(block)
    ]
    used = {word.partition("=")[0] for words in lines if words[:2] == ["ray", "start"] for word in words}
    (ports,) = (words[0] for words in lines if words[0].startswith("PORTS="))
    used |= {word.partition("=")[0] for word in ports.removeprefix("PORTS=").split()}
    asked = subprocess.run([ray, "start", "--help"], capture_output=True, text=True, check=True).stdout
    known = set(re.findall(r"--[\w-]+", asked))
    options = {word for word in used if word.startswith("--")}
    assert len(options) > 10 and options <= known, options - known
    (token,) = (words for words in lines if words[:2] == ["ray", "get-auth-token"])
    (mask,) = (int(words[1], 8) for words in lines if words[0] == "umask")
    environment = {**os.environ, "HOME": str(tmp_path)}
    subprocess.run([ray, *token[1:]], capture_output=True, check=True, env=environment, umask=mask)
    made = tmp_path / ".ray" / "auth_token"
    assert made.read_text() and made.stat().st_mode & 0o777 == 0o600


def test_the_glossary_is_the_packages() -> None:
    import moetool

    assert moetool.__doc__ is not None
    terms = re.findall(r"^    (\S.*?)  +(\S.*)$", moetool.__doc__.partition("The glossary")[2], re.MULTILINE)
    assert len(terms) > 30
    assert topics()["glossary"].endswith("".join(f"| {term} | {meaning} |\n" for term, meaning in terms))
