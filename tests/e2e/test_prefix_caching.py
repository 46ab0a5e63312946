"""Prefix caching changes how much is forwarded, and nothing else."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moetool.base.errors import MoetoolError
from moetool.models.checkpoint import Checkpoint
from moetool.runtime.assembly import build_engine
from moetool.runtime.budget import divide_with_slots
from moetool.runtime.decoding import PAGE_TOKENS
from moetool.runtime.kv import ledger
from moetool.runtime.loop.engine import Engine
from moetool.runtime.memory_share import MemoryShare
from moetool.runtime.request import Output, SamplingParams
from moetool.runtime.serve_options import ServeOptions
from moetool.trace.reader import Trace
from moetool.tuning.replay import replay
from tests.refusals import refused
from tests.servers import client_of, get, post, serving

SYSTEM = "User: You answer questions about the numbers of a farm, and you keep to the point. "
TURNS = ["How many cows are there?", "And how many horses?", "What is 12 + 7?"]


def _open(
    kv_tokens: int, *, caching: bool, log: Path | None = None, chunk: int = 48, state: Path | None = None, **parts: Any
) -> Engine:
    checkpoint = Checkpoint.open("reference")
    options = ServeOptions(prefill_chunk=chunk, kv_tokens=kv_tokens, prefix_caching=caching)
    if state is not None:
        options = replace(options, state=str(state), keep_prefixes=True)
    budget = replace(divide_with_slots(checkpoint, options, 64), **parts)
    made = build_engine(checkpoint, options=options, policy="lru", device_memory_bytes=budget, log=log)
    made.state = "ready"
    return made


class Talk:
    """Chats with an engine that has no thread, several at a time."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.outputs: dict[int, list[Output]] = {}

    def ask(self, prompt: list[int], max_tokens: int = 8) -> int:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, logprobs=2)
        return self.engine.submit(
            prompt, params, lambda output: self.outputs.setdefault(output.request, []).append(output)
        )

    def finish(self) -> None:
        while not self.engine.idle:
            self.engine.step()

    def tokens(self, request: int) -> list[int]:
        return [output.token for output in self.outputs[request] if output.token is not None]

    def run(self) -> list[tuple[list[int], list[float]]]:
        """Three chats of three turns after one system prompt; one request more in each turn is cancelled."""
        tokenizer = self.engine.tokenizer
        chats = [tokenizer(f"{SYSTEM}{name}, ")["input_ids"] for name in ("Anna", "Bert", "Carl")]
        given = []
        for turn in TURNS:
            asked = tokenizer(f"\nUser: {turn}\nAssistant:")["input_ids"]
            chats = [chat + asked for chat in chats]
            requests = [self.ask(chat) for chat in chats]
            dropped = self.ask(chats[0] + chats[1][:20])
            self.engine.step()
            self.engine.step()
            self.engine.cancel(dropped)
            self.finish()
            chats = [chat + self.tokens(request) for chat, request in zip(chats, requests, strict=True)]
            given += [
                (self.tokens(request), [o.logprob.logprob for o in self.outputs[request] if o.logprob is not None])
                for request in requests
            ]
        return given


@pytest.mark.parametrize("kv_tokens", [1024, 192])
def test_a_chat_is_answered_alike_and_its_log_replays(kv_tokens: int, tmp_path: Path) -> None:
    log = tmp_path / "log"
    plain, cached = Talk(_open(kv_tokens, caching=False)), Talk(_open(kv_tokens, caching=True, log=log))
    expected, found = plain.run(), cached.run()
    for (tokens, logprobs), (same, close) in zip(expected, found, strict=True):
        assert same == tokens
        assert close == pytest.approx(logprobs, abs=1e-4)
    first = {request: outputs[0].reused for request, outputs in cached.outputs.items()}
    assert all(output.reused == 0 for outputs in cached.outputs.values() for output in outputs[1:])
    stats, counts = cached.engine.stats()["tokens"], cached.engine.residency.counts
    assert stats["prompt"] == plain.engine.stats()["tokens"]["prompt"]
    assert plain.engine.stats()["tokens"]["reused"] == 0 and stats["reused"] == sum(first.values())
    if kv_tokens == 1024:
        assert stats["reused"] > 0.4 * stats["prompt"]
    else:
        assert cached.engine.metrics()["kv_pages_evicted"] > 0
    plain.engine.close()
    cached.engine.close()

    trace = Trace(log)
    trace.verify()
    (row,) = replay(trace, ["lru"], [64 * trace.spec.slot_bytes])
    assert row.counts == counts and row.digest == trace.manifest["provenance"]["decisions"]
    position_of: dict[int, int] = {}  # of the first row
    for batch in trace.batches():
        for request, position in zip(batch.request_T.tolist(), batch.position_T.tolist(), strict=True):
            position_of.setdefault(request, position)
    answered = {
        request: outputs[0].reused for request, outputs in cached.outputs.items() if outputs[0].token is not None
    }
    assert {request: position_of[request] for request in answered} == answered
    assert trace.manifest["provenance"]["reused_tokens"] >= sum(first.values())  # and those of cancelled requests


def test_a_small_cache_grows_for_chats_that_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two chats of 200 tokens in turn lose their prefixes once to a KV cache of 256; other prompts let it shrink."""
    monkeypatch.setattr(ledger, "IDLE_FORWARDS", 8)
    share = MemoryShare(slots=64, chunk_tokens=256, kv_slots=8, kv_tokens=768)
    talk = Talk(_open(1024, caching=True, chunk=256, first_kv_tokens=256, share=share))
    chats, reused, sizes = [[50 + i] * 200 for i in range(2)], [], []
    for turn in range(6):
        for i in range(2):
            request = talk.ask(chats[i], max_tokens=4)
            talk.finish()
            reused.append(talk.outputs[request][0].reused)
            sizes.append(talk.engine.batcher.grown_kv_tokens)
            chats[i] = [*chats[i], *talk.tokens(request), 60 + turn, 61, 62]
    assert reused[:2] == [0, 0] and sizes[:2] == [0, 0]
    assert min(reused[2:4]) < 100 and all(0 < size <= 768 for size in sizes[4:])
    assert all(count >= 190 for count in reused[4:])
    assert talk.engine.residency.reserved_slots > 0
    for number in range(60):
        talk.ask([70 + number % 20, 3, 4], max_tokens=4)
        talk.finish()
    assert talk.engine.batcher.grown_kv_tokens == talk.engine.residency.reserved_slots == 0
    talk.engine.close()


def test_prefixes_outlive_their_server(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state, kept = tmp_path / "state", tmp_path / "state.prefixes"
    prompt = list(range(5, 5 + 10 * PAGE_TOKENS + 1))

    def answer() -> tuple[list[int], list[float], int]:
        talk = Talk(_open(1024, caching=True, state=state))
        outputs = talk.outputs
        request = talk.ask(prompt)
        talk.finish()
        logprobs = [output.logprob.logprob for output in outputs[request] if output.logprob is not None]
        talk.engine.close()
        return talk.tokens(request), logprobs, outputs[request][0].reused

    first, again = answer(), answer()
    assert (first[2], again[2]) == (0, 10 * PAGE_TOKENS) and not caplog.records
    assert again[0] == first[0] and again[1] == pytest.approx(first[1], abs=1e-4)
    kept.write_bytes(kept.read_bytes()[:-1])
    assert answer() == first and [str(kept) in record.message for record in caplog.records] == [True]
    assert answer()[2] == 10 * PAGE_TOKENS  # the damaged file was replaced
    kept.unlink()
    kept.mkdir()
    talk = Talk(_open(1024, caching=True, state=state, log=tmp_path / "log"))
    talk.ask(prompt)
    talk.finish()
    with refused(MoetoolError, str(kept)):
        talk.engine.close()
    Trace(tmp_path / "log").verify()  # the rest was closed


def test_usage_tells_how_much_of_a_prompt_was_there() -> None:
    made = _open(1024, caching=True)
    made.state = "starting"
    made.start()
    with serving(made) as (url, _):
        ask: dict[str, Any] = {"model": "reference", "prompt": SYSTEM * 3, "max_tokens": 3, "temperature": 0, "n": 2}
        first = post(url, "/v1/completions", ask)[1]
        again = post(url, "/v1/completions", ask)[1]
        chunks = client_of(url).completions.create(**ask, stream=True, stream_options={"include_usage": True})
        usage = [chunk.usage for chunk in chunks][-1]
        metrics = get(url, "/metrics")[2]
    assert [choice["text"] for choice in first["choices"]] == [choice["text"] for choice in again["choices"]]
    most = (first["usage"]["prompt_tokens"] - 1) // PAGE_TOKENS * PAGE_TOKENS
    assert first["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert again["usage"]["prompt_tokens_details"] == {"cached_tokens": most}
    assert usage is not None and usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == most
    (count,) = (
        float(line.split()[1]) for line in metrics.splitlines() if line.startswith("moetool_reused_prompt_tokens_total")
    )
    assert count >= 4 * most
