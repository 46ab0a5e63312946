"""Requests with caches of their own: one in every forward, or several that meet at the MoE layers."""

import contextlib
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from moetool.base.errors import CapacityError, UsageError
from moetool.base.types import Phase
from moetool.measuring.plain_model import Forward, PlainModel
from moetool.runtime.decoding import Batch
from moetool.runtime.kv.kept_caches import KeptCache
from moetool.runtime.loop import own_caches
from moetool.runtime.loop.batching import Batcher
from moetool.runtime.loop.joint_forwards import JointForwards
from moetool.runtime.loop.own_caches import OwnCaches, open_batcher
from moetool.runtime.request import Output, SamplingParams
from tests.engines import run_all, tokens_of
from tests.refusals import refused

PROMPTS = ["Question: What is 12 + 7? Answer:", "def add(a, b):", "The king said"]


@pytest.fixture
def batcher(full: Any) -> Iterator[OwnCaches]:
    batcher = OwnCaches(full.model, kv_tokens=256)
    yield batcher
    batcher.close()


@pytest.fixture
def ids(tokenizer: Any) -> list[list[int]]:
    return [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]


def test_requests_run_one_after_the_other(batcher: OwnCaches, ids: list[list[int]]) -> None:
    seen: list[Batch] = []
    batcher.on_forward = seen.append
    for i, prompt in enumerate(ids):
        batcher.add(10 + i, prompt, SamplingParams(max_tokens=3, ignore_eos=True))
    assert (batcher.running, batcher.waiting) == (0, 3)
    outputs = run_all(batcher)
    assert [b.info.forward_id for b in seen] == list(range(9))
    assert all(b.info.token_id_T == b.token_id_T for b in seen)
    for i, prompt in enumerate(ids):
        first, second, third = seen[3 * i : 3 * i + 3]
        tokens = tokens_of(outputs[10 + i])
        assert len(tokens) == 3 and outputs[10 + i][-1].finish == "length"
        assert first.info.request_T == (10 + i,) * len(prompt) and first.token_id_T == tuple(prompt)
        assert first.info.phase_T == (Phase.PREFILL,) * len(prompt) and set(first.iteration_T) == {0}
        assert second.info.phase_T == third.info.phase_T == (Phase.DECODE,)
        assert (second.token_id_T, third.token_id_T) == ((tokens[0],), (tokens[1],))
        assert (second.info.position_T, third.info.position_T) == ((len(prompt),), (len(prompt) + 1,))
        assert (second.iteration_T, third.iteration_T) == ((1,), (2,))


def test_tokens_and_samples_are_those_of_the_batch(full: Any, batcher: OwnCaches, ids: list[list[int]]) -> None:
    draws = [
        SamplingParams(max_tokens=8, temperature=0.0, logprobs=2),
        SamplingParams(max_tokens=8, temperature=0.9, top_p=0.9, seed=3),
        SamplingParams(max_tokens=8, temperature=1.2, seed=4),
    ]
    for i, params in enumerate(draws):
        batcher.add(i, ids[i], params)
    alone = run_all(batcher)
    together = Batcher(full.model, max_requests=3, kv_tokens=256)
    for i, params in enumerate(draws):
        together.add(i, ids[i], params)
    batched = run_all(together)
    together.close()
    for i in range(3):
        assert tokens_of(alone[i]) == tokens_of(batched[i])
        assert alone[i][-1].finish == batched[i][-1].finish
    first, other = alone[0][0].logprob, batched[0][0].logprob
    assert first is not None and other is not None and first.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_a_failure_takes_only_its_own_request(full: Any, batcher: OwnCaches, ids: list[list[int]]) -> None:
    def blow(module: Any, args: Any) -> None:
        hook.remove()
        raise RuntimeError("the fuse is blown")

    hook = full.layers[3].experts.register_forward_pre_hook(blow)
    for i in range(2):
        batcher.add(i, ids[i], SamplingParams(max_tokens=4, ignore_eos=True))
    outputs = run_all(batcher)
    assert outputs[0] == [Output(0, None, finish="error", error="the fuse is blown")]
    assert len(tokens_of(outputs[1])) == 4


def test_cancelled_requests_leave(batcher: OwnCaches, ids: list[list[int]]) -> None:
    for i in range(3):
        batcher.add(i, ids[i], SamplingParams(max_tokens=4, ignore_eos=True))
    batcher.step()
    assert (batcher.running, batcher.waiting) == (1, 2)
    for request in (0, 1, 77):
        batcher.cancel(request)
    outputs = run_all(batcher)
    assert list(outputs) == [2] and len(tokens_of(outputs[2])) == 4


def test_scores_do_not_disturb_the_running_request(batcher: OwnCaches, full: Any, ids: list[list[int]]) -> None:
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    batcher.add(0, ids[0], params)
    alone = tokens_of(run_all(batcher)[0])
    batcher.add(1, ids[0], params)
    tokens = tokens_of(batcher.step())
    with torch.inference_mode():
        plain = full.model(torch.tensor([ids[1]])).logits[0]
    assert torch.allclose(torch.cat(list(batcher.score(5, ids[1]))), plain, atol=1e-4)
    assert tokens + tokens_of(run_all(batcher)[1]) == alone


def test_requests_that_cannot_run_are_refused(batcher: OwnCaches) -> None:
    with refused(UsageError, "prompt", "empty"):
        batcher.check([], SamplingParams(max_tokens=1))
    with refused(CapacityError, "250", "7", "256"):
        batcher.check([1] * 250, SamplingParams(max_tokens=7))


def test_families_that_can_be_batched_are(full: Any) -> None:
    batcher = open_batcher(full.model, max_requests=2, kv_tokens=64)
    assert isinstance(batcher, Batcher) and batcher.max_requests == 2
    batcher.close()


@pytest.fixture
def three(full: Any) -> Iterator[OwnCaches]:
    batcher = OwnCaches(full.model, max_requests=3, kv_tokens=256)
    yield batcher
    batcher.close()


def test_several_meet_at_every_moe_layer(full: Any, three: OwnCaches, batcher: OwnCaches, ids: list[list[int]]) -> None:
    seen: list[Batch] = []
    rows: list[int] = []
    hook = full.layers[2].experts.register_forward_pre_hook(lambda module, args: rows.append(len(args[0])))
    three.on_forward = seen.append
    params = [
        SamplingParams(max_tokens=4 + i, temperature=0.8 * i, seed=i, logprobs=1, ignore_eos=True) for i in range(3)
    ]
    for i, prompt in enumerate(ids):
        three.add(i, prompt, params[i])
    together = run_all(three)
    hook.remove()
    assert rows == [sum(map(len, ids)), 3, 3, 3, 2, 1] == [len(b.token_id_T) for b in seen]
    assert seen[0].info.position_T == tuple(position for prompt in ids for position in range(len(prompt)))
    assert seen[1].info.position_T == tuple(map(len, ids)) and seen[1].info.request_T == (0, 1, 2)
    for i, prompt in enumerate(ids):
        batcher.add(i, prompt, params[i])
    assert {i: tokens_of(outputs) for i, outputs in together.items()} == {
        i: tokens_of(o) for i, o in run_all(batcher).items()
    }


def test_with_fewer_tokens_per_forward_requests_decode_in_turn(three: OwnCaches, ids: list[list[int]]) -> None:
    seen: list[Batch] = []
    three.on_forward = seen.append
    for number, prompt in enumerate(ids):
        three.add(number, prompt, SamplingParams(max_tokens=3, ignore_eos=True))
    together = three.max_batch_tokens
    three.step()
    three.max_batch_tokens = 1
    while three.running == len(ids):
        three.step()
    three.max_batch_tokens = together
    run_all(three)
    prompts, *steps = [batch.info.request_T for batch in seen]
    assert sorted(set(prompts)) == list(range(len(ids)))
    assert steps == [(0,), (0,), *[tuple(range(1, len(ids)))] * 2]


def test_requests_come_and_go_while_others_run(three: OwnCaches, ids: list[list[int]]) -> None:
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    three.add(0, ids[0], params)
    alone = tokens_of(run_all(three)[0])
    three.add(1, ids[1], params)
    three.step()
    three.add(2, ids[0], params)
    three.step()
    three.cancel(1)
    for i in range(3, 6):
        three.add(i, ids[0], params)
    outputs = run_all(three)
    assert sorted(outputs) == [2, 3, 4, 5] and three.running == 0
    assert all(tokens_of(outputs[i])[-5:] == alone[-5:] for i in outputs)


def test_as_many_run_as_their_caches_have_room_for(three: OwnCaches, ids: list[list[int]]) -> None:
    seen: list[Batch] = []
    three.on_forward = seen.append
    for i in range(3):
        three.add(i, ids[0], SamplingParams(max_tokens=100, ignore_eos=True))
    three.step()
    assert set(seen[0].info.request_T) == {0, 1} and (three.running, three.waiting) == (2, 1)


@pytest.mark.parametrize("module", ["experts", "self_attn"])
def test_a_failure_ends_the_forward_and_nothing_else(
    full: Any, three: OwnCaches, ids: list[list[int]], module: str
) -> None:
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    three.add(9, ids[0], params)
    alone = tokens_of(run_all(three)[9])

    def blow(*args: Any) -> None:
        hook.remove()
        raise RuntimeError("the fuse is blown")

    places = {"experts": full.layers[3].experts, "self_attn": full.model.model.layers[3].self_attn}
    hook = places[module].register_forward_pre_hook(blow)
    for i in range(2):
        three.add(i, ids[i], params)
    first = three.step()
    assert [(o.request, o.finish, o.error) for o in first] == [(i, "error", "the fuse is blown") for i in (0, 1)]
    three.add(9, ids[0], params)
    assert tokens_of(run_all(three)[9]) == alone


def test_the_model_is_left_as_it_was(full: Any) -> None:
    before = [type(module) for module in full.model.modules()]
    batcher = OwnCaches(full.model, max_requests=2, kv_tokens=64)
    for i in range(2):
        batcher.add(i, [50 + i], SamplingParams(max_tokens=2, ignore_eos=True))
    run_all(batcher)
    batcher.close()
    assert [type(module) for module in full.model.modules()] == before


class _TornGrammar:
    may_end = False

    def __init__(self, fails: str) -> None:
        self._fails = fails

    def start(self) -> "_TornGrammar":
        if self._fails == "start":
            raise RuntimeError("the grammar is torn")
        return self

    def allowed(self) -> bytearray:
        if self._fails == "allowed":
            raise RuntimeError("the grammar is torn")
        return bytearray(b"\1" * 100_000)

    def accept(self, token: int) -> None:
        raise RuntimeError("the grammar is torn")


@pytest.mark.parametrize("kind", [OwnCaches, Batcher])
@pytest.mark.parametrize("fails", ["allowed", "accept"])
def test_a_grammar_that_raises_fails_its_request_alone(
    full: Any, ids: list[list[int]], fails: str, kind: type[OwnCaches | Batcher]
) -> None:
    grammar: Any = _TornGrammar(fails)
    with contextlib.closing(kind(full.model, max_requests=3, kv_tokens=256)) as batcher:
        batcher.add(0, ids[0], SamplingParams(max_tokens=3, ignore_eos=True, grammar=grammar))
        batcher.add(1, ids[1], SamplingParams(max_tokens=3, ignore_eos=True))
        outputs = run_all(batcher)
        assert not batcher.failed
    assert outputs[0] == [Output(0, None, finish="error", error="the grammar is torn")]
    assert len(tokens_of(outputs[1])) == 3


@pytest.mark.parametrize("kind", [OwnCaches, Batcher])
@pytest.mark.parametrize("fails", ["start", "accept"])
def test_a_grammar_that_cannot_start_leaves_nothing_queued(
    full: Any, ids: list[list[int]], fails: str, kind: type[OwnCaches | Batcher]
) -> None:
    """At its beginning, or after the tokens that were generated elsewhere."""
    grammar: Any = _TornGrammar(fails)
    with contextlib.closing(kind(full.model, max_requests=3, kv_tokens=256)) as batcher:
        with pytest.raises(RuntimeError, match="the grammar is torn"):
            batcher.add(0, ids[0], SamplingParams(max_tokens=3, grammar=grammar), drawn=2)
        assert batcher.idle and not batcher.waiting
        batcher.add(0, ids[0], SamplingParams(max_tokens=3, ignore_eos=True))
        assert len(tokens_of(run_all(batcher)[0])) == 3


def test_a_kept_cache_that_cannot_be_copied_fails_its_request_alone(
    full: Any, ids: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    with contextlib.closing(OwnCaches(full.model, max_requests=3, kv_tokens=512, prefix_caching=True)) as batcher:
        batcher.add(0, ids[0], params)
        run_all(batcher)
        batcher.add(1, ids[1], params)
        batcher.step()
        monkeypatch.setattr(KeptCache, "resumed", _out_of_memory)
        batcher.add(2, [*ids[0], 9], params)
        batcher.add(3, ids[2], params)
        outputs = run_all(batcher)
        assert outputs[2] == [Output(2, None, finish="error", error="out of memory")] and not batcher.failed
        assert (len(tokens_of(outputs[1])), len(tokens_of(outputs[3]))) == (2, 3)


def test_states_that_cannot_be_marked_fail_the_forward_alone(
    full: Any, ids: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    with contextlib.closing(OwnCaches(full.model, kv_tokens=512, prefix_caching=True)) as batcher:
        with monkeypatch.context() as patch:
            patch.setattr(own_caches, "cuttable", _out_of_memory)
            batcher.add(0, ids[0], params)
            assert batcher.step() == [Output(0, None, finish="error", error="out of memory")] and batcher.failed
        batcher.add(1, ids[0], params)
        assert len(tokens_of(run_all(batcher)[1])) == 3 and not batcher.failed


def _out_of_memory(*args: Any) -> Any:
    raise RuntimeError("out of memory")


def _forward_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "forward"}


def test_forward_threads_are_kept_between_forwards_and_end_with_the_batcher(
    three: OwnCaches, ids: list[list[int]]
) -> None:
    before = _forward_threads()
    for i in range(3):
        three.add(i, ids[i], SamplingParams(max_tokens=8, ignore_eos=True))
    three.step()
    first = _forward_threads() - before
    three.step()
    assert _forward_threads() - before == first and len(first) == 3
    three.cancel(1)
    three.step()
    assert _forward_threads() - before < first and len(_forward_threads() - before) == 2
    three.close()
    assert _forward_threads() == before


def test_a_thread_that_cannot_start_fails_its_requests_alone(
    full: Any, three: OwnCaches, ids: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    before, kinds, start = _forward_threads(), [type(module) for module in full.model.modules()], threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if len(_forward_threads() - before) == 1:
            raise RuntimeError("can't start new thread")
        start(thread)

    params = SamplingParams(max_tokens=2, ignore_eos=True)
    for i in range(2):
        three.add(i, ids[i], params)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert [output.error for output in three.step()] == ["can't start new thread"] * 2
    assert [type(module) for module in full.model.modules()] == kinds
    for i in range(2):
        three.add(i, ids[i], params)
    assert [len(tokens_of(outputs)) for outputs in run_all(three).values()] == [2, 2]
    three.close()
    assert _forward_threads() == before


@pytest.mark.parametrize(
    ("first", "other"),
    [
        ({"scale": 2.0}, {"scale": 3.0}),
        ({"scale": None}, {"scale": torch.ones(1, 1)}),
        ({"pair": (torch.ones(2), 1)}, {"pair": (torch.ones(2), 1)}),
        ({"mask": torch.ones(2, 2)}, {"mask": torch.ones(3, 2)}),
        ({"scale": 2.0}, {}),
    ],
)
def test_calls_that_differ_in_more_than_tokens_are_refused(full: Any, first: Any, other: Any) -> None:
    joint, module = JointForwards(full.model), full.model.get_input_embeddings()
    works = [lambda kwargs=kwargs: module(torch.tensor([[1, 2]]), **kwargs) for kwargs in (first, other)]
    with refused(UsageError, "Embedding", "run", "several"):
        joint.run(works)
    joint.close()


def test_forwards_that_a_failure_leaves_behind_release_no_lock(full: Any) -> None:
    plain = PlainModel(full.model, "as it is", {})

    def visit(number: int, layer: int, again: Any) -> None:
        if number == 0:
            raise RuntimeError("the first is lost")

    with warnings.catch_warnings(record=True) as seen, refused(RuntimeError, "lost"):
        warnings.simplefilter("always")
        plain.run([Forward([1, 2], 0)] * 2, visit=visit, on_layer=lambda number, layer: None)
    assert [str(warning.message) for warning in seen if "silenced" in str(warning.message)] == []


def test_a_prompt_that_others_wait_for_comes_in_chunks(full: Any, ids: list[list[int]]) -> None:
    long, answers, sizes = [60 + i % 50 for i in range(400)], [], []
    for limit in (0.0, 1e-6):
        batcher = OwnCaches(full.model, max_requests=3, kv_tokens=1024, max_prompt_wait_s=limit)
        seen: list[Batch] = []
        batcher.on_forward = seen.append
        params = SamplingParams(max_tokens=8, ignore_eos=True)
        batcher.add(0, long, params)
        found = {0: tokens_of(batcher.step())}
        batcher.add(1, long[::-1], params)
        for request, outputs in run_all(batcher).items():
            found.setdefault(request, []).extend(tokens_of(outputs))
        batcher.close()
        answers.append(found)
        sizes.append([len(batch.token_id_T) for batch in seen])
        info = [batch.info for batch in seen]
        held = [t for one in info for r, t in zip(one.request_T, one.position_T, strict=True) if r == 1]
        assert held == list(range(400 + 7))
    assert answers[0] == answers[1] and all(len(tokens) == 8 for tokens in answers[0].values())
    assert sizes[0][:2] == [400, 401] and sizes[1][:2] == [400, 65]


def _asked(batcher: OwnCaches, prompts: list[list[int]]) -> list[tuple[int, list[int]]]:
    """Prompt tokens reused and answer of each, all in one batch."""
    for i, prompt in enumerate(prompts):
        batcher.add(i, prompt, SamplingParams(max_tokens=4, ignore_eos=True))
    outputs = run_all(batcher)
    return [(outputs[i][0].reused, tokens_of(outputs[i])) for i in range(len(prompts))]


def test_several_chats_and_a_common_beginning_are_kept(full: Any, ids: list[list[int]]) -> None:
    """Requests of one batch share a kept prefix, and leave it as it was for the next ones."""
    chats = [[*ids[0], *ids[1]], [*ids[0], *ids[2]]]
    plain = OwnCaches(full.model, max_requests=4, kv_tokens=512)
    kept = OwnCaches(full.model, max_requests=4, kv_tokens=512, prefix_caching=True)
    assert [reused for reused, _ in _asked(kept, [ids[0] + [9]])] == [0]
    for turn in range(3):
        expected, found = _asked(plain, chats), _asked(kept, chats)
        assert [tokens for _, tokens in found] == [tokens for _, tokens in expected]
        least = [len(ids[0]) if turn == 0 else len(chat) - 4 for chat in chats]
        assert all(reused >= count for (reused, _), count in zip(found, least, strict=True))
        chats = [[*chat, *tokens, 7, 8 + turn, 9] for chat, (_, tokens) in zip(chats, found, strict=True)]
    plain.close()
    kept.close()


def test_kept_caches_leave_for_requests(full: Any, ids: list[list[int]]) -> None:
    batcher = OwnCaches(full.model, max_requests=4, kv_tokens=64, prefix_caching=True)
    assert _asked(batcher, [ids[0]])[0][0] == 0
    assert _asked(batcher, [ids[0]])[0][0] == len(ids[0]) - 1  # the last token is forwarded for its logits
    batcher.add(0, [50] * 40, SamplingParams(max_tokens=20, ignore_eos=True))
    run_all(batcher)
    assert _asked(batcher, [ids[0]])[0][0] == 0
    batcher.close()
