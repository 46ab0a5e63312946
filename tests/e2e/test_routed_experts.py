"""Routed experts with each answer, read back by the importers and by `capture --server`."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moetool.capture.remote import RemoteServer, capture_remote
from moetool.capture.run import CaptureOptions, capture
from moetool.models.checkpoint import Checkpoint
from moetool.models.shape import shape_of
from moetool.prompts.gather import Prompt
from moetool.runtime.assembly import build_engine
from moetool.runtime.serve_options import ServeOptions
from moetool.trace.foreign.importing import import_trace
from moetool.trace.reader import Trace
from tests.servers import post, serving

TEXTS = ("Question: What is 12 + 7? Answer:", "def add(a, b):", "The king said that " * 12)
NEW = 6


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    # A chunk smaller than the longest prompt, so that its rows come from several forwards.
    options = ServeOptions(kv_tokens=1024, prefill_chunk=32)
    engine = build_engine(Checkpoint.open("reference"), options=options, policy="lru", device_memory_bytes=20_000_000)
    engine.start()
    with serving(engine) as (url, _):
        yield url


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    return [Prompt(dataset="d", task="t", prompt_id=str(i), text=text) for i, text in enumerate(TEXTS)]


@pytest.fixture(scope="module")
def captured(prompts: list[Prompt], tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """The capture of the same prompts."""
    out = tmp_path_factory.mktemp("routed") / "captured"
    return Trace(
        capture("reference", prompts, out, CaptureOptions(max_new_tokens=NEW, batch_size=1, dtype="float32")).out
    )


def _experts(trace: Trace) -> list[np.ndarray]:
    return [rows.experts_TS for rows in trace.whole_requests()]


def _ask(url: str, prompt: Any, **fields: Any) -> tuple[int, dict[str, Any]]:
    body = {"model": "reference", "prompt": prompt, "max_tokens": NEW, "temperature": 0, "return_routed_experts": True}
    return post(url, "/v1/completions", body | fields)


def test_capture_from_our_own_server_is_capture(
    url: str, prompts: list[Prompt], captured: Trace, tmp_path: Path
) -> None:
    server = RemoteServer(url=url, concurrency=3)
    checkpoint = Checkpoint.open("reference", weights=False)
    made = capture_remote(server, checkpoint, prompts, tmp_path / "t", max_new_tokens=NEW)
    assert made.format == "vllm_routed_experts"
    trace = Trace(tmp_path / "t")
    trace.verify()
    assert trace.requests["prompt_tokens"].to_pylist() == captured.requests["prompt_tokens"].to_pylist()
    for rows, expected in zip(trace.whole_requests(), captured.whole_requests(), strict=True):
        assert (rows.experts_TS == expected.experts_TS).all()
        assert (rows.token_id_T == expected.token_id_T).all() and (rows.phase_T == expected.phase_T).all()


def test_answers_are_read_as_sglangs_too(url: str, captured: Trace, tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    file.write_text("\n".join(json.dumps(_ask(url, text)[1]) for text in TEXTS))
    import_trace([file], "sglang_routed_experts", tmp_path / "t", settings={"model": "reference"}, find_model=shape_of)
    for ours, expected in zip(_experts(Trace(tmp_path / "t")), _experts(captured), strict=True):
        assert (ours == expected).all()


def test_several_choices_and_stop_strings(url: str, captured: Trace, tmp_path: Path) -> None:
    code, answer = _ask(url, list(TEXTS[:2]), n=2, return_token_ids=True)
    assert code == 200 and len(answer["choices"]) == 4
    file = tmp_path / "many.json"
    file.write_text(json.dumps(answer))
    import_trace([file], "vllm_routed_experts", tmp_path / "t", settings={"model": "reference"}, find_model=shape_of)
    for i, ours in enumerate(_experts(Trace(tmp_path / "t"))):
        assert (ours == _experts(captured)[i // 2]).all()
    code, whole = _ask(url, TEXTS[2], return_token_ids=True)
    text = whole["choices"][0]["text"]
    code, cut = _ask(url, TEXTS[2], return_token_ids=True, stop=text[1:3])
    assert code == 200 and cut["choices"][0]["text"] == text[:1]
    file.write_text(json.dumps(cut))
    import_trace([file], "vllm_routed_experts", tmp_path / "cut", settings={"model": "reference"}, find_model=shape_of)
    (ours,) = _experts(Trace(tmp_path / "cut"))
    assert len(ours) < len(_experts(captured)[2]) and (ours == _experts(captured)[2][: len(ours)]).all()


def test_only_where_asked_for_and_not_with_stream(url: str) -> None:
    code, answer = _ask(url, TEXTS[0], return_routed_experts=False)
    assert code == 200 and "sglext" not in answer and "routed_experts" not in answer["choices"][0]
    code, answer = _ask(url, TEXTS[0], stream=True)
    assert code == 400 and "return_routed_experts" in answer["error"]["message"]
