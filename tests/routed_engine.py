"""A stand-in for vLLM's and SGLang's servers that returns routed experts, drawn from the prompt's tokens."""

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

from tests.foreign import npy

LAYERS, EXPERTS, TOP_K, NEW = 8, 32, 4, 3


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
                    choice["routed_experts"] = npy(routes(ids))
                usage = {"prompt_tokens": len(ids), "completion_tokens": NEW}
                self._send(200, {"id": "cmpl-x", "choices": [choice], "usage": usage})
                return
            assert self.path == "/generate" and body["return_routed_experts"] is True
            ids = body["input_ids"]
            meta: dict[str, Any] = {"id": "x", "prompt_tokens": len(ids), "completion_tokens": NEW}
            if routed:
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
