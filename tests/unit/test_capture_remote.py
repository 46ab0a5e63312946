"""Capturing from a running engine: a stand-in answers as vLLM and SGLang do, with routes that are known."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moetool import assets
from moetool.capture.remote import RemoteServer, capture_remote
from moetool.errors import MoetoolError, UsageError
from moetool.models.checkpoint import Checkpoint
from moetool.prompts.gather import Prompt
from moetool.trace.reader import Trace
from tests import foreign

FOLDER = assets.path("data", "reference-moe")
LAYERS, EXPERTS, TOP_K, NEW = 8, 32, 4, 3
PROMPTS = [
    Prompt(dataset="d", task="t", prompt_id=str(i), text=text) for i, text in enumerate(("Hello there", "2 + 2 ="))
]


def routes(ids: list[int]) -> np.ndarray:
    """[T, L, K], by the tokens of the prompt."""
    draw = np.random.default_rng(ids)
    return np.argsort(draw.random((len(ids) + NEW - 1, LAYERS, EXPERTS)), axis=2)[..., :TOP_K].astype(np.uint8)


@contextmanager
def engine(kind: str, *, routed: bool = True) -> Iterator[str]:
    """A server whose answers have the shape of the engine's."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            pass

        def _send(self, code: int, value: Any) -> None:
            data = json.dumps(value).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            known = {
                "vllm": {"/v1/models": {"data": [{"id": "served"}]}},
                "sglang": {"/model_info": {"model_path": "m"}},
            }
            answer = known[kind].get(self.path)
            self._send(200 if answer else 404, answer or {"error": "no such route"})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if kind == "vllm":
                assert self.path == "/v1/completions" and body["model"] == "served" and body["max_tokens"] == NEW
                ids = body["prompt"]
                choice = {"index": 0, "text": "…", "token_ids": [5] * NEW, "prompt_token_ids": ids}
                if routed:
                    choice["routed_experts"] = foreign.npy(routes(ids))
                usage = {"prompt_tokens": len(ids), "completion_tokens": NEW}
                self._send(200, {"id": "cmpl-x", "choices": [choice], "usage": usage})
                return
            assert self.path == "/generate" and body["return_routed_experts"] is True
            ids = body["input_ids"]
            meta: dict[str, Any] = {"id": "x", "prompt_tokens": len(ids), "completion_tokens": NEW}
            if routed:
                import base64

                meta["routed_experts"] = base64.b64encode(routes(ids).astype("<i4").tobytes()).decode()
            self._send(200, {"text": "…", "meta_info": meta})

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_routes_of_a_running_engine_become_a_trace(tmp_path: Path, kind: str) -> None:
    tokenizer = Checkpoint.open(FOLDER, weights=False).tokenizer
    with engine(kind) as url:
        made = capture_remote(
            RemoteServer(url=url, concurrency=2), str(FOLDER), PROMPTS, tokenizer, tmp_path / "t", max_new_tokens=NEW
        )
    assert made.format == f"{kind}_routed_experts" and any("no weights" in note for note in made.notes)
    trace = Trace(tmp_path / "t")
    trace.verify()
    assert trace.requests["new_tokens"].to_pylist() == [NEW] * 2 and trace.spec.num_layers == LAYERS
    for prompt, rows in zip(PROMPTS, trace.whole_requests(), strict=True):
        ids = tokenizer(prompt.text)["input_ids"]
        assert (rows.experts_TS.reshape(-1, LAYERS, TOP_K) == routes(ids)).all()
        assert rows.phase_T.tolist() == [0] * len(ids) + [1] * (NEW - 1)
        if kind == "vllm":
            assert rows.token_id_T[: len(ids)].tolist() == ids


def test_servers_that_cannot_are_refused(tmp_path: Path) -> None:
    tokenizer = Checkpoint.open(FOLDER, weights=False).tokenizer
    for kind in ("vllm", "sglang"):
        with engine(kind, routed=False) as url, pytest.raises(UsageError, match=f"start {kind} with --enable-return"):
            capture_remote(RemoteServer(url=url), str(FOLDER), PROMPTS, tokenizer, tmp_path / "t", max_new_tokens=NEW)
    with pytest.raises(MoetoolError, match="is the server running"):
        capture_remote(
            RemoteServer(url="http://127.0.0.1:9"), str(FOLDER), PROMPTS, tokenizer, tmp_path / "t", max_new_tokens=NEW
        )
    with pytest.raises(UsageError, match="expected an address"):
        RemoteServer(url="localhost:8000")
    assert not (tmp_path / "t").exists()
