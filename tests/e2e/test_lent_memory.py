"""Long requests at once on a server whose expert slots, long prompts and KV cache share memory."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moetool.models.checkpoint import Checkpoint
from moetool.runtime.assembly import build_engine
from moetool.runtime.budget import divide_with_slots
from moetool.runtime.kv.ledger import PageLedger
from moetool.runtime.loop.engine import Engine
from moetool.runtime.memory_share import MemoryShare
from moetool.runtime.request import Output, SamplingParams
from moetool.runtime.serve_options import ServeOptions
from moetool.trace.reader import Trace
from moetool.tuning.replay import SERVED, replay

KV_TOKENS, CHUNK, SLOTS = 2560, 700, 80
SHARE = MemoryShare(slots=SLOTS, most_slots=16, chunk_tokens=CHUNK, kv_slots=24, kv_tokens=KV_TOKENS - 128)
PROMPTS = [[3 + (7 * i + 11 * n + i * i) % 4000 for i in range(300 + 130 * n)] for n in range(4)]


class Client:
    """Requests to an engine that has no thread."""

    def __init__(self, log: Path | None = None, *, lends: bool = False) -> None:
        checkpoint = Checkpoint.open("reference")
        options = ServeOptions(prefill_chunk=CHUNK, kv_tokens=KV_TOKENS, pool="layer", oracle_s=0)
        budget = divide_with_slots(checkpoint, options, SLOTS)
        if lends:
            budget = replace(budget, share=SHARE, first_kv_tokens=128)
        self.engine: Engine = build_engine(
            checkpoint, options=options, policy="foresight", device_memory_bytes=budget, log=log
        )
        self.engine.state = "ready"
        self.outputs: dict[int, list[Output]] = {}

    def ask(self, number: int) -> int:
        params = SamplingParams(max_tokens=24, ignore_eos=True)
        return self.engine.submit(
            PROMPTS[number], params, lambda output: self.outputs.setdefault(output.request, []).append(output)
        )

    def answer(self, request: int) -> list[int]:
        return [output.token for output in self.outputs[request] if output.token is not None]


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    """Answers of a server that lends nothing, one request at a time."""
    client, found = Client(), []
    for number in range(len(PROMPTS)):
        request = client.ask(number)
        while not client.engine.idle:
            client.engine.step()
        found.append(client.answer(request))
    client.engine.close()
    return found


def test_long_requests_at_once_keep_to_the_memory_and_to_their_answers(
    alone: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Client(tmp_path / "log", lends=True)
    engine, batcher, seen = client.engine, client.engine.batcher, list[tuple[int, int]]()
    announced, sizes = batcher.on_forward, list[int]()

    def on_forward(batch: Any) -> None:
        sizes.append(len(batch.info.request_T))
        announced(batch)

    batcher.on_forward = on_forward

    def run(steps: int) -> None:
        for _ in range(steps):
            if engine.idle:
                return
            before = len(sizes)
            engine.step()
            if len(sizes) > before:  # slots lent are at least what the forward and the grown cache need
                lent, grown = engine.residency.reserved_slots, batcher.grown_kv_tokens
                assert lent >= SHARE.slots_for_forward(sizes[-1])
                assert (
                    lent >= min(SLOTS - 2, SHARE.slots_for_forward(sizes[-1]) + SHARE.slots_for_cache(grown))
                    or not grown
                )
                seen.append((grown, lent))

    first = [client.ask(number) for number in range(3)]
    run(4)
    late = client.ask(3)
    run(1000)
    assert [client.answer(request) for request in (*first, late)] == alone
    assert max(grown for grown, _ in seen) > 1000 and len({lent for _, lent in seen}) > 3

    broken = [client.ask(number) for number in range(4)]
    run(3)
    with monkeypatch.context() as patch:
        patch.setattr(PageLedger, "begin_forward", lambda ledger: 1 // 0)
        engine.step()
    assert all(client.outputs[request][-1].finish == "error" for request in broken)
    again = [client.ask(number) for number in range(4)]
    run(1000)
    assert [client.answer(request) for request in again] == alone
    counts = engine.residency.counts
    engine.close()
    (row,) = replay(Trace(tmp_path / "log"), [SERVED], [SLOTS * engine.spec.slot_bytes])
    assert row.counts == counts
