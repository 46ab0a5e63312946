"""Continuous batching: requests of a forward, and the extent of a failure."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from moetool.base.errors import CapacityError, UsageError
from moetool.base.types import Phase
from moetool.runtime.decoding import PAGE_TOKENS, Batch, kv_cache_bytes
from moetool.runtime.kv.ledger import PageLedger
from moetool.runtime.loop import scheduler
from moetool.runtime.loop.batching import Batcher
from moetool.runtime.loop.prompt_chunks import PromptChunks
from moetool.runtime.recording.recorder import GateRecorder
from moetool.runtime.request import Output, SamplingParams
from tests.engines import run_all, tokens_of
from tests.refusals import refused

PROMPTS = ["Question: What is 12 + 7? Answer:", "def add(a, b):", "The king said", "12 * 3 ="]


@pytest.fixture
def batcher(full: Any) -> Iterator[Batcher]:
    batcher = Batcher(full.model, max_requests=4, kv_tokens=512, max_batch_tokens=64)
    yield batcher
    batcher.close()


def _ids(tokenizer: Any) -> list[list[int]]:
    return [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]


def test_batches_tell_requests_phases_and_iterations(batcher: Batcher, tokenizer: Any) -> None:
    seen: list[Batch] = []
    batcher.on_forward = seen.append
    ids = _ids(tokenizer)
    for i, prompt in enumerate(ids):
        batcher.add(10 + i, prompt, SamplingParams(max_tokens=3 + i, ignore_eos=True))
    outputs = run_all(batcher)
    assert [b.info.forward_id for b in seen] == list(range(len(seen)))
    assert all(b.info.token_id_T == b.token_id_T for b in seen)
    for i, prompt in enumerate(ids):
        rows = [
            (phase, position, token, iteration)
            for b in seen
            for request, phase, position, token, iteration in zip(
                b.info.request_T, b.info.phase_T, b.info.position_T, b.token_id_T, b.iteration_T, strict=True
            )
            if request == 10 + i
        ]
        generated = tokens_of(outputs[10 + i])
        assert len(generated) == 3 + i
        assert outputs[10 + i][-1].finish == "length"
        # the last token of an answer is never forwarded
        assert [token for _, _, token, _ in rows] == prompt + generated[:-1]
        assert [position for _, position, _, _ in rows] == list(range(len(rows)))
        assert [phase for phase, *_ in rows] == [Phase.PREFILL] * len(prompt) + [Phase.DECODE] * (2 + i)
        assert [it for *_, it in rows] == [0] * len(prompt) + list(range(1, 3 + i))


def test_with_fewer_tokens_per_forward_requests_decode_in_turn(batcher: Batcher, tokenizer: Any) -> None:
    seen: list[Batch] = []
    batcher.on_forward = seen.append
    for number, prompt in enumerate(_ids(tokenizer)):
        batcher.add(number, prompt, SamplingParams(max_tokens=3, ignore_eos=True))
    together = batcher.max_batch_tokens
    batcher.step()
    batcher.max_batch_tokens = 1
    while batcher.running == len(_ids(tokenizer)):
        batcher.step()
    batcher.max_batch_tokens = together
    run_all(batcher)
    prompts, *steps = [batch.info.request_T for batch in seen]
    assert sorted(set(prompts)) == list(range(len(_ids(tokenizer))))
    assert steps == [(0,), (0,), *[tuple(range(1, len(_ids(tokenizer))))] * 2]


def test_a_prompt_in_chunks_gives_the_same_tokens(full: Any, tokenizer: Any, batcher: Batcher) -> None:
    prompt = tokenizer("The first day of the month, " * 30)["input_ids"]
    assert len(prompt) > 2 * 64
    seen: list[Batch] = []
    batcher.on_forward = seen.append
    batcher.add(1, prompt, SamplingParams(max_tokens=8))
    tokens = tokens_of(run_all(batcher)[1])
    assert sum(b.iteration_T[0] == 0 for b in seen) > 2
    assert all(p is Phase.PREFILL for b in seen[:2] for p in b.info.phase_T)
    batcher.close()
    with torch.inference_mode():
        whole = full.model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)
    assert tokens == whole[0, len(prompt) :].tolist()[: len(tokens)]


def test_recorded_experts_and_weights_are_those_of_the_router(full: Any, tokenizer: Any, batcher: Batcher) -> None:
    recorder = GateRecorder(full.model, full.layers, ["logits", "hidden", "embeddings"])
    seen: list[Batch] = []
    batcher.on_forward = seen.append
    prompt = _ids(tokenizer)[0]
    batcher.add(1, prompt, SamplingParams(max_tokens=1))
    batcher.step()
    rows, embedding_TD = recorder.take(seen[-1])
    recorder.close()
    batcher.close()
    with torch.inference_mode():
        plain = full.model(torch.tensor([prompt]), output_router_logits=True, output_hidden_states=True)
    for layer, logits_TE in enumerate(plain.router_logits):
        probabilities = logits_TE.softmax(-1)
        weights, experts = probabilities.topk(4)
        weights = weights / weights.sum(-1, keepdim=True)
        span = slice(4 * layer, 4 * layer + 4)
        assert (torch.from_numpy(rows.experts_TS[:, span].astype("int64")) == experts).all()
        assert torch.allclose(torch.from_numpy(rows.weights_TS[:, span]).float(), weights, atol=1e-3)
        logits = torch.from_numpy(rows.logits_TF[:, 32 * layer : 32 * layer + 32]).float()
        assert torch.allclose(logits, logits_TE, atol=2e-3, rtol=1e-3)
    assert rows.hidden_TH is not None and rows.hidden_TH.shape == (len(prompt), 8 * 192)
    assert torch.allclose(torch.from_numpy(embedding_TD), plain.hidden_states[0][0])


def test_a_failure_takes_only_the_forward_it_was_in(full: Any, tokenizer: Any, batcher: Batcher) -> None:
    ids = _ids(tokenizer)
    batcher.add(0, ids[0], SamplingParams(max_tokens=6, ignore_eos=True))
    alone = tokens_of(run_all(batcher)[0])
    fuse = {"left": 3}

    def blow(module: Any, args: Any) -> None:
        fuse["left"] -= 1
        if fuse["left"] == 0:
            raise RuntimeError("the fuse is blown")

    hook = full.layers[3].experts.register_forward_pre_hook(blow)
    for i in range(3):
        batcher.add(1 + i, ids[i], SamplingParams(max_tokens=6, ignore_eos=True))
    outputs = run_all(batcher)
    hook.remove()
    assert {i: o[-1].finish for i, o in outputs.items()} == {1: "error", 2: "error", 3: "error"}
    assert outputs[1][-1].error == "the fuse is blown"
    batcher.add(9, ids[0], SamplingParams(max_tokens=6, ignore_eos=True))
    assert tokens_of(run_all(batcher)[9]) == alone
    assert batcher.running == batcher.waiting == 0


def test_a_failure_while_composing_the_batch_begins_afresh(tokenizer: Any, batcher: Batcher, monkeypatch) -> None:
    ids = _ids(tokenizer)
    batcher.add(0, ids[0], SamplingParams(max_tokens=6, ignore_eos=True))

    def broken(*args: Any) -> None:
        raise RuntimeError("no batch today")

    with monkeypatch.context() as patch:
        patch.setattr(PageLedger, "reserve", broken)
        assert run_all(batcher)[0][-1].finish == "error"
    batcher.add(1, ids[0], SamplingParams(max_tokens=6, ignore_eos=True))
    assert len(tokens_of(run_all(batcher)[1])) == 6


def test_cancelled_requests_leave_the_batch(tokenizer: Any, batcher: Batcher) -> None:
    ids = _ids(tokenizer)
    for i in range(2):
        batcher.add(i, ids[i], SamplingParams(max_tokens=20, ignore_eos=True))
    batcher.step()
    batcher.cancel(0)
    batcher.cancel(77)
    outputs = run_all(batcher)
    assert 0 not in outputs
    assert len(tokens_of(outputs[1])) == 19


def test_a_cancelled_request_may_come_again_at_once(tokenizer: Any, batcher: Batcher) -> None:
    ids, params = _ids(tokenizer), SamplingParams(max_tokens=6, ignore_eos=True)
    batcher.add(9, ids[0], params)
    alone = tokens_of(run_all(batcher)[9])
    for steps in (1, 0):  # it runs, or it has yet to
        batcher.add(0, ids[1], params)
        for _ in range(steps):
            batcher.step()
        batcher.cancel(0)
        batcher.add(0, ids[0], params)
        outputs = [output for _ in range(10) for output in batcher.step()]
        assert batcher.idle and tokens_of(outputs) == alone


def test_seeded_text_is_the_same_alone_and_in_a_batch(tokenizer: Any, batcher: Batcher) -> None:
    ids = _ids(tokenizer)
    params = SamplingParams(max_tokens=12, temperature=0.9, top_p=0.95, seed=5, ignore_eos=True)
    batcher.add(0, ids[0], params)
    alone = tokens_of(run_all(batcher)[0])
    batcher.add(1, ids[1], SamplingParams(max_tokens=12, temperature=1.5, ignore_eos=True))
    batcher.step()
    batcher.add(2, ids[0], params)
    batcher.add(3, ids[2], SamplingParams(max_tokens=5))
    assert tokens_of(run_all(batcher)[2]) == alone


def test_scores_of_a_prompt_are_those_of_a_plain_forward(full: Any, tokenizer: Any, batcher: Batcher) -> None:
    prompt = _ids(tokenizer)[0]
    (logits_TV,) = batcher.score(5, prompt)
    batcher.close()
    with torch.inference_mode():
        plain = full.model(torch.tensor([prompt])).logits[0]
    assert torch.allclose(logits_TV, plain, atol=1e-4)


def test_requests_that_cannot_run_are_refused_before_they_are_queued(batcher: Batcher) -> None:
    assert batcher.max_context == 512
    with refused(UsageError, "prompt", "empty"):
        batcher.check([], SamplingParams(max_tokens=1))
    with refused(UsageError, "4096"):
        batcher.check([0, 4096], SamplingParams(max_tokens=1))
    with refused(CapacityError, "500", "13", "512"):
        batcher.check([1] * 500, SamplingParams(max_tokens=13))


def test_kv_bytes_are_known_before_they_are_taken(full: Any, batcher: Batcher) -> None:
    assert kv_cache_bytes(full.model.config, torch.float32, 512) == batcher.kv_bytes
    assert batcher.kv_tokens == 512


def test_a_family_that_cannot_be_batched_is_refused(full: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(full.model), "set_attn_implementation", lambda self, name: None)
    with refused(UsageError, "Qwen3MoeForCausalLM"):
        Batcher(full.model, max_requests=1, kv_tokens=64)
    assert full.model.config._attn_implementation == "sdpa"


class _Ending:
    """A grammar without a token after the first ones; `fails`: it raises there."""

    error, may_end = "the row is full", False

    def __init__(self, fails: bool) -> None:
        self._fails, self._left = fails, 2

    def start(self) -> "_Ending":
        return self

    def allowed(self) -> bytearray:
        if self._fails and not self._left:
            raise RuntimeError("the grammar is torn")
        return bytearray((b"\1" if self._left else b"\0") * 100_000)

    def accept(self, token: int) -> None:
        self._left -= 1


@pytest.mark.parametrize("fails", [True, False])
def test_prefixes_of_a_request_whose_grammar_ends_are_kept(full: Any, fails: bool) -> None:
    grammar: Any = _Ending(fails)
    prompt = list(range(5, 69))
    with contextlib.closing(Batcher(full.model, max_requests=2, kv_tokens=256, prefix_caching=True)) as batcher:
        batcher.add(0, prompt, SamplingParams(max_tokens=9, ignore_eos=True, grammar=grammar))
        outputs = run_all(batcher)[0]
        assert len(tokens_of(outputs)) == 2 and outputs[-1].finish == ("error" if fails else "refused")
        batcher.add(1, prompt, SamplingParams(max_tokens=1, ignore_eos=True))
        assert run_all(batcher)[1][0].reused == len(prompt) - PAGE_TOKENS


def test_inputs_of_a_forward_on_a_cpu_are_not_packed(full: Any, batcher: Batcher) -> None:
    """Packed ones are copied again: a key row for each token in the cache."""
    seen: list[torch.Tensor] = []

    def note(module: Any, args: Any, inputs: dict[str, Any]) -> None:
        seen.extend((inputs["input_ids"], inputs["position_ids"], inputs["kv_batch"].key_rows))

    with full.model.register_forward_pre_hook(note, with_kwargs=True):
        batcher.add(0, [5, 6, 7], SamplingParams(max_tokens=1))
        run_all(batcher)
    assert seen and all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in seen)


def test_scores_that_are_no_numbers_end_their_request_alone(full: Any, tokenizer: Any, batcher: Batcher) -> None:
    ids = _ids(tokenizer)
    only_first = next(token for token in ids[0] if all(token not in other for other in ids[1:]))

    def poison(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        return torch.where((args[0] == only_first)[..., None], float("nan"), output)

    def run(prompts: list[list[int]]) -> dict[int, list[Output]]:
        for i, prompt in enumerate(prompts, start=len(ids) - len(prompts)):
            batcher.add(i, prompt, SamplingParams(max_tokens=4, ignore_eos=True, logprobs=2))
        return run_all(batcher)

    handle = full.model.get_input_embeddings().register_forward_hook(poison)
    try:
        outputs = run(ids)
    finally:
        handle.remove()
    (ended,) = outputs[0]
    assert (ended.token, ended.finish) == (None, "error") and "not finite (NaN" in str(ended.error)
    assert {i: tokens_of(outputs[i]) for i in (1, 2, 3)} == {i: tokens_of(o) for i, o in run(ids[1:]).items()}


@pytest.mark.parametrize(("max_tokens", "together"), [(4, 6), (50, 4), (200, 2)])
def test_more_requests_run_together_as_far_as_the_cache_holds_them(full: Any, max_tokens: int, together: int) -> None:
    """Of 16 pages a request takes one, four or thirteen at its full length; two run whatever they take."""
    batcher = Batcher(full.model, max_requests=6, kv_tokens=256, unreserved=2)
    seen: list[set[int]] = []
    batcher.on_forward = lambda batch: seen.append(set(batch.info.request_T))
    for request in range(9):
        batcher.add(request, [50 + request] * 5, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    batcher.cancel(8)
    for _ in range(3):
        batcher.step()
    assert seen[0] == set(range(together)) and max(map(len, seen)) == together
    for request in range(8):
        batcher.cancel(request)
    batcher.step()
    assert batcher.idle and batcher.running == 0
    batcher.close()


def test_all_are_answered_however_few_run_together(full: Any, tokenizer: Any) -> None:
    ids = _ids(tokenizer)
    answers = []
    for unreserved in (1, 4):
        batcher = Batcher(full.model, max_requests=4, kv_tokens=64, unreserved=unreserved)
        for request, prompt in enumerate(ids):
            batcher.add(request, prompt, SamplingParams(max_tokens=10, ignore_eos=True))
        answers.append({request: tokens_of(outputs) for request, outputs in run_all(batcher).items()})
        batcher.close()
    assert answers[0] == answers[1] and all(len(tokens) == 10 for tokens in answers[0].values())


@pytest.mark.parametrize(("fixed", "chunks"), [(0.0, 100), (0.25, 75), (3.0, 300)])
@pytest.mark.parametrize("stalls", [True, False])
def test_chunks_are_small_while_others_decode(
    full: Any, monkeypatch: pytest.MonkeyPatch, fixed: float, chunks: int, stalls: bool
) -> None:
    """On a clock by which a forward takes a fixed time, and a second more for every 100 tokens."""
    now, stalled = [0.0], [0.0]
    monkeypatch.setattr(scheduler.time, "perf_counter", lambda: now[0])
    batcher = Batcher(full.model, max_requests=2, kv_tokens=2048, max_batch_tokens=512, max_prompt_wait_s=1.0)
    batcher.stalled_s = lambda: stalled[0]
    seen: list[Batch] = []

    def forward(batch: Batch) -> None:
        seen.append(batch)
        stalled[0] += fixed * stalls
        now[0] += fixed + len(batch.token_id_T) / 100

    batcher.on_forward = forward
    alone = [60 + i % 50 for i in range(900)]
    batcher.add(0, alone, SamplingParams(max_tokens=1))
    run_all(batcher)
    assert [len(batch.token_id_T) for batch in seen] == [512, 388]  # nobody waits
    batcher.add(1, [50, 51], SamplingParams(max_tokens=30, ignore_eos=True))
    batcher.step()
    seen.clear()
    batcher.add(2, alone, SamplingParams(max_tokens=1))
    run_all(batcher)
    batcher.close()
    prompts = [sum(phase is Phase.PREFILL for phase in batch.info.phase_T) for batch in seen]
    assert sum(prompts) == 900 and all(abs(size - chunks) <= 5 for size in prompts[: 900 // chunks])
    assert all(1 in batch.info.request_T for batch in seen[: 900 // chunks])


def test_the_first_prompt_that_others_wait_for_is_cut_too(full: Any, tokenizer: Any) -> None:
    """Answers are those of whole prompts."""
    ids, answers = _ids(tokenizer), []
    for limit in (0.0, 1e-6):
        batcher = Batcher(full.model, max_requests=3, kv_tokens=2048, max_batch_tokens=900, max_prompt_wait_s=limit)
        seen: list[int] = []
        batcher.on_forward = lambda batch, seen=seen: seen.append(len(batch.token_id_T))
        batcher.add(0, ids[0], SamplingParams(max_tokens=30, ignore_eos=True))
        found = {0: batcher.step()}
        for request in (1, 2):
            batcher.add(request, [60 + i % 50 for i in range(400)], SamplingParams(max_tokens=4, ignore_eos=True))
        for request, outputs in run_all(batcher).items():
            found.setdefault(request, []).extend(outputs)
        batcher.close()
        answers.append({request: tokens_of(outputs) for request, outputs in found.items()})
        assert seen[1] == (801 if not limit else 257)
    assert answers[0] == answers[1]


def test_one_size_of_forwards_tells_the_fixed_time_by_its_wait() -> None:
    chunks = PromptChunks(1.0, 4096)
    assert chunks.tokens(decoding=True) == 256 and chunks.tokens(decoding=False) == 4096
    chunks.observe(1000, 13.0, 3.0)
    assert chunks.tokens(decoding=True) == 300
    chunks.observe(300, 6.0, 2.0)  # now by both: 2 + 1.43 s and 8.57 ms per token
    assert chunks.tokens(decoding=True) == pytest.approx(400, abs=1)
    chunks.observe(400, 12.0, 0.0)  # beyond the limit and twice the fixed time
    assert chunks.tokens(decoding=True) < 400
    for _ in range(9):
        chunks.observe(chunks.tokens(decoding=True), 100.0 * chunks.tokens(decoding=True), 0.0)
    assert chunks.tokens(decoding=True) == 64 and PromptChunks(0.0, 99).tokens(decoding=True) == 99


def test_a_cold_start_does_not_make_later_chunks_long() -> None:
    chunks = PromptChunks(2.0, 8192)
    chunks.observe(50, 20.0, 18.0)
    chunks.observe(8192, 8.0, 1.0)
    assert chunks.tokens(decoding=True) == pytest.approx(1 / (7 / 8192), abs=1)
    slower = PromptChunks(2.0, 8192)
    slower.observe(300, 20.0, 18.0)
    slower.observe(8192, 28.0, 1.0)  # it took longer than the cold start, and 3.2 ms per token
    assert slower.tokens(decoding=True) < 1000
    quadratic = PromptChunks(2.0, 8192)
    quadratic.observe(256, 0.5, 0.0)
    quadratic.observe(4096, 20.0, 0.0)  # by least squares the fixed time would be negative
    assert quadratic.tokens(decoding=True) == int(2 / (20 / 4096))


@pytest.mark.parametrize("stalled_s", [0.0, 3.0])
@pytest.mark.parametrize(("fixed_s", "token_s"), [(1.0, 0.00085), (3.0, 0.001), (0.1, 0.01)])
def test_chunks_become_those_of_the_limit_or_of_the_fixed_time(
    fixed_s: float, token_s: float, stalled_s: float
) -> None:
    chunks = PromptChunks(2.0, 8192)
    chunks.observe(300, 60.0, 50.0)  # a cold start, which is forgotten
    for _ in range(100):
        tokens = chunks.tokens(decoding=True)
        chunks.observe(tokens, fixed_s + token_s * tokens, min(fixed_s, stalled_s))
    assert chunks.tokens(decoding=True) == pytest.approx(max(2 - fixed_s, fixed_s) / token_s, rel=0.05)


def test_a_chunk_of_one_token_and_decode_steps() -> None:
    chunks = PromptChunks(1.0, 1)
    chunks.observe(0, 0.5, 0.0)
    chunks.observe(1, 0.5, 0.1)
    assert chunks.tokens(decoding=True) == 1
