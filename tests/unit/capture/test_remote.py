"""Capturing from a running engine: a stand-in answers as vLLM and SGLang do, with routes that are known."""

from pathlib import Path

import pytest

from moetool.base import assets
from moetool.base.errors import MoetoolError, UsageError
from moetool.capture.remote import RemoteServer, capture_remote
from moetool.models.checkpoint import Checkpoint
from moetool.prompts.gather import Prompt
from moetool.trace.reader import Trace
from tests.refusals import refused
from tests.routed_engine import LAYERS, NEW, TOP_K, engine, routes

FOLDER = assets.path("data", "reference-moe")
PROMPTS = [
    Prompt(dataset="d", task="t", prompt_id=str(i), text=text) for i, text in enumerate(("Hello there", "2 + 2 ="))
]


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_routes_of_a_running_engine_become_a_trace(tmp_path: Path, kind: str) -> None:
    checkpoint = Checkpoint.open(FOLDER, weights=False)
    with engine(kind) as url:
        made = capture_remote(
            RemoteServer(url=url, concurrency=2), checkpoint, PROMPTS, tmp_path / "t", max_new_tokens=NEW
        )
    assert made.format == f"{kind}_routed_experts" and any("no weights" in note for note in made.notes)
    trace = Trace(tmp_path / "t")
    trace.verify()
    assert trace.requests["new_tokens"].to_pylist() == [NEW] * 2 and trace.spec.num_layers == LAYERS
    for prompt, rows in zip(PROMPTS, trace.whole_requests(), strict=True):
        ids = checkpoint.tokenizer(prompt.text)["input_ids"]
        assert (rows.experts_TS.reshape(-1, LAYERS, TOP_K) == routes(ids)).all()
        assert rows.phase_T.tolist() == [0] * len(ids) + [1] * (NEW - 1)
        if kind == "vllm":
            assert rows.token_id_T[: len(ids)].tolist() == ids


def test_servers_that_cannot_are_refused(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(FOLDER, weights=False)
    for kind in ("vllm", "sglang"):
        with engine(kind, routed=False) as url, pytest.raises(UsageError, match=f"start {kind} with --enable-return"):
            capture_remote(RemoteServer(url=url), checkpoint, PROMPTS, tmp_path / "t", max_new_tokens=NEW)
    with refused(MoetoolError, "server", "running"):
        capture_remote(RemoteServer(url="http://127.0.0.1:9"), checkpoint, PROMPTS, tmp_path / "t", max_new_tokens=NEW)
    with refused(UsageError, "address"):
        RemoteServer(url="localhost:8000")
    assert not (tmp_path / "t").exists()


def test_a_proxy_is_not_asked_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.delenv("no_proxy", raising=False)
    with engine("sglang") as url:
        assert RemoteServer(url=url).engine() == "sglang"
