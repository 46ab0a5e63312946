"""Coding agents as their users start them, without a terminal, where they are installed: `npm install -g NAME`."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moetool.runtime.request import SamplingParams, Sink
from moetool.serving.server_options import ServerOptions
from tests.scripted_engine import ScriptedEngine
from tests.servers import serving

from .test_tools import TEMPLATE

SECRET = "the treasure is under the oak"


class _Agent(ScriptedEngine):
    """Calls a tool until the prompt has what it returns, then answers."""

    call: str = ""
    prompts: list[str]

    def submit(self, prompt: list[int], params: SamplingParams, sink: Sink) -> int:
        text = self.tokenizer.decode(prompt)
        self.prompts.append(text)
        called = "<|tool|>" in text
        self.reply = "It is under the oak." if called else f"Let me look.<tool_call>{self.call}</tool_call>"
        return super().submit(prompt, replace(params, temperature=0.0), sink)


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[tuple[_Agent, str, Callable[..., list[dict[str, Any]]]]]:
    """(Engine, its URL, function that runs a command with no settings but the given ones and returns its events)."""
    engine = _Agent(max_context=65536, room=65536)
    engine.prompts = []
    engine.tokenizer.chat_template = TEMPLATE
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "notes.txt").write_text(SECRET)

    def run(*command: str, **settings: str) -> list[dict[str, Any]]:
        environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "TERM": "dumb", **settings}
        ran = subprocess.run(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]

    with serving(engine, options=ServerOptions()) as (url, _):
        yield engine, url, run


@pytest.mark.skipif(shutil.which("claude") is None, reason="needs @anthropic-ai/claude-code")
def test_claude_code(agent: Any, tmp_path: Path) -> None:
    engine, url, run = agent
    engine.call = json.dumps({"name": "Read", "arguments": {"file_path": str(tmp_path / "work" / "notes.txt")}})
    events = run(
        *("claude", "-p", "Where is the treasure?", "--output-format", "stream-json", "--verbose"),
        ANTHROPIC_BASE_URL=url,
        ANTHROPIC_AUTH_TOKEN="none",
        ANTHROPIC_MODEL="reference",
        ANTHROPIC_DEFAULT_HAIKU_MODEL="reference",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        IS_SANDBOX="1",
    )
    result = events[-1]
    assert (result["result"], result["is_error"], result["num_turns"]) == ("It is under the oak.", False, 2)
    first, second = engine.prompts
    assert SECRET in second and SECRET not in first
    _same_beginning(first, second)


@pytest.mark.skipif(shutil.which("codex") is None, reason="needs @openai/codex")
def test_codex(agent: Any) -> None:
    engine, url, run = agent
    engine.call = json.dumps({"name": "exec_command", "arguments": {"cmd": "cat notes.txt"}})
    provider = f'{{name="moetool", base_url="{url}/v1", wire_api="responses"}}'
    events = run(
        *("codex", "exec", "--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"),
        *("-c", 'model="reference"', "-c", 'model_provider="moetool"', "-c", f"model_providers.moetool={provider}"),
        "Where is the treasure?",
    )
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    assert [item["text"] for item in items if item["type"] == "agent_message"][-1] == "It is under the oak."
    assert any(SECRET in item.get("aggregated_output", "") for item in items)
    assert events[-1]["type"] == "turn.completed" and events[-1]["usage"]["input_tokens"] > 1000
    first, second = engine.prompts
    assert SECRET in second and SECRET not in first
    _same_beginning(first, second)


def _same_beginning(first: str, second: str) -> None:
    """Each prompt goes on from the one before, so that its prefix is found in the KV cache."""
    assert second.startswith(first)
