"""A tokenizer with more tokens than the model embeds: its further tokens are refused before any forward."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from moetool.base.errors import MismatchError
from moetool.bench.serving_setup import ServingBenchOptions, prompts_of
from moetool.models.checkpoint import Checkpoint
from moetool.runtime.assembly import build_engine
from moetool.runtime.serve_options import ServeOptions
from tests.command_line import exit_code
from tests.servers import post, serving

EMBEDDED = 4096
REASON = "token 4096 is not in the vocabulary of 4096 tokens"


@pytest.fixture(scope="module")
def model(reference: Path, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model, whose tokenizer has one token more."""
    from transformers import AutoTokenizer

    folder = Path(shutil.copytree(reference, tmp_path_factory.mktemp("beyond") / "m"))
    longer = AutoTokenizer.from_pretrained(folder)
    assert longer.add_tokens(["<|image|>"]) == 1 and len(longer) == EMBEDDED + 1
    longer.save_pretrained(folder)
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Prompts of which the second, in line 3, has the further token."""
    rows = [{"prompt": "The king said"}, {"prompt": "Look at <|image|> " + "and the sea " * 60, "id": "picture"}]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n\n".join(map(json.dumps, rows)) + "\n")
    return file


@pytest.mark.parametrize(
    "command",
    [
        ("capture", "{model}", "--max-new-tokens", "1"),
        (
            "plan",
            "alpha",
            "{model}",
            "--device-memory",
            "22MB",
            "--target-tpot",
            "10s",
            "--set",
            "tokens=8",
            "--set",
            "known=2",
        ),
        ("train", "awq_replica", "{model}"),
    ],
    ids=["capture", "plan alpha", "train awq_replica"],
)
def test_a_prompt_with_it_is_named_before_the_forward(
    command: tuple[str, ...],
    model: Path,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = [word.format(model=model) for word in command]
    assert exit_code(monkeypatch, *given, "--data", data, "--out", tmp_path / "out") == 3
    said = capsys.readouterr().err.splitlines()
    assert REASON in said[-1] and ("2 of the data" in said[-1] or f"{data}:3" in said[-1]), said
    assert any("tokenizer" in line and "<|image|>" in line for line in said[:-1]), "no warning at opening"
    assert (tmp_path / "out").exists() == (command[0] == "capture")  # of the other prompts


def test_a_benchmark_refuses_it(model: Path, data: Path) -> None:
    with Checkpoint.open(model) as checkpoint, pytest.raises(MismatchError, match=f"picture of prompts .*{REASON}"):
        prompts_of(checkpoint, (str(data),), set(), ServingBenchOptions(requests=2))


def test_a_server_refuses_it_in_texts_tokens_and_chats(model: Path) -> None:
    options = ServeOptions(kv_tokens=512)
    engine = build_engine(Checkpoint.open(model), options=options, policy="lru", device_memory_bytes=20_000_000)
    engine.model_name = "m"
    engine.start()
    with serving(engine) as (url, _):
        for prompt in ("Look at <|image|>", [5, EMBEDDED]):
            status, answer = post(url, "/v1/completions", {"model": "m", "prompt": prompt, "max_tokens": 1})
            assert status == 400 and REASON in answer["error"]["message"], answer
        chat = {"model": "m", "messages": [{"role": "user", "content": "<|image|>"}], "max_tokens": 1}
        status, answer = post(url, "/v1/chat/completions", chat)
        assert (status, answer["error"]["param"]) == (400, "messages") and REASON in answer["error"]["message"], answer
        assert post(url, "/v1/completions", {"model": "m", "prompt": "Look at", "max_tokens": 1})[0] == 200


def test_a_tokenizer_with_fewer_tokens_gives_no_warning(reference: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert Checkpoint.open(reference).tokenizer is not None
    assert not caplog.records
