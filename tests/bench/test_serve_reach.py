"""Bytes that `moetool serve MODEL` without flags reads from disk, beside bounds and manual settings.

    python -m pytest tests/bench/test_serve_reach.py -s -m ''

Every pool begins with slots for a quarter of the experts. Models are the embedded one with a longer context, and three
MoE layers of DeepSeek-V2-Lite's shape with random weights (3.5 GB in `MOETOOL_BENCH_WORK`); loads over routes of
DeepSeek-V2-Lite are counted without a model. Counts are exact, seconds are medians.
"""

import json
import os
import shutil
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from moetool.base.errors import CapacityError
from moetool.base.machine import resident_bytes
from moetool.base.types import ForwardInfo, GateEvent, ModelSpec
from moetool.bench.random_checkpoint import random_checkpoint
from moetool.caching.layer_slots import equal_slots
from moetool.caching.policy import build_policy
from moetool.caching.residency import Residency
from moetool.models.checkpoint import Checkpoint
from moetool.models.files.location import locate_config
from moetool.runtime.assembly import build_engine
from moetool.runtime.automatic import ServeSetup, choose
from moetool.runtime.budget import divide_with_slots
from moetool.runtime.decoding import Batch
from moetool.runtime.expected_reads import ExpectedSplit, best_split
from moetool.runtime.experts.event_window import EventWindow, WindowForward
from moetool.runtime.loop.batching import Batcher
from moetool.runtime.loop.engine import Engine
from moetool.runtime.loop.prompt_chunks import LEAST_WAITED_CHUNK
from moetool.runtime.memory_share import MemoryShare, fixed_share, flexible_share
from moetool.runtime.request import Output, SamplingParams
from moetool.runtime.serve_options import ServeOptions
from moetool.runtime.sizing import GOOD_CONTEXT, MemorySplit, divide
from moetool.trace.foreign.model_facts import ModelFacts
from moetool.trace.formats import route_csv
from tests import families
from tests.bench.test_foresight import sequences
from tests.published_routes import QWEN, needs_routes
from tests.synthetic import DEEPSEEK_V2_LITE, make_forward

pytestmark = pytest.mark.slow
SHARE = 0.25
MODELS = ("reference", "deepseek-v2-lite")


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, reference: Path) -> Checkpoint:
    return long_model(request.param, tmp_path_factory.mktemp("model"), reference)


def long_model(name: str, folder: Path, reference: Path) -> Checkpoint:
    """The embedded model with a context of 4,096 tokens, or three MoE layers of a shape with its vocabulary."""
    if name == "reference":
        shutil.copytree(reference, folder, dirs_exist_ok=True)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 4096}))
        return Checkpoint.open(str(folder))
    own = Checkpoint.open(str(reference)).raw
    shape = json.loads((Path(locate_config(name)) / "config.json").read_text())
    kept = ("bos_token_id", "eos_token_id", "pad_token_id", "vocab_size")
    (folder / "config.json").write_text(json.dumps(shape | {key: own[key] for key in kept if key in own}))
    made = random_checkpoint(str(folder), 3, Path(os.environ.get("MOETOOL_BENCH_WORK", str(folder / "made"))))
    for file in reference.glob("token*"):
        shutil.copy(file, made)
    return Checkpoint.open(str(made))


def without_flags(checkpoint: Checkpoint, share: float = SHARE, **values: Any) -> ServeSetup:
    """The choices of `moetool serve MODEL` on a machine that has slots for `share` of the experts."""
    values = {"device": "cpu", "oracle_s": 0.0, "warm_start": False, **values}
    return choose(checkpoint, values, process_memory_bytes=memory_for(checkpoint, values, share) + resident_bytes())


def memory_for(checkpoint: Checkpoint, values: dict[str, Any], share: float = SHARE) -> int:
    """Memory of a process, beside what it takes already, with slots for `share` of the experts."""
    least, most = 0, 2 * checkpoint.dense_bytes(torch.bfloat16) + checkpoint.spec.total_experts * 2**25
    wanted = round(share * checkpoint.spec.total_experts)
    while most - least > 100_000:
        middle = (least + most) // 2
        found = slots_of(checkpoint, values, middle)
        least, most = (middle, most) if found < wanted else (least, middle)
    return most


def slots_of(checkpoint: Checkpoint, values: dict[str, Any], memory: int) -> int:
    try:
        rows = choose(checkpoint, values, process_memory_bytes=memory + resident_bytes()).choices
    except CapacityError:
        return 0
    return int(next(value for name, value, _ in rows if name == "expert slots").split()[0])


def opened(checkpoint: Checkpoint, setup: ServeSetup) -> Engine:
    engine = build_engine(checkpoint, options=setup.options, policy=setup.policy, device_memory_bytes=setup.budget)
    engine.runtime.window = EventWindow(10**6, 10**8)
    engine.state = "ready"
    return engine


@dataclass
class Asked:
    """One request: its answer, experts needed at least once and those resident before, experts read, seconds."""

    answer: list[int]
    tokens: int
    needed: set[int]
    resident: int
    read: float
    seconds: float


def ask(engine: Engine, prompt: Sequence[int], max_tokens: int = 1, *, whole: bool = False) -> Asked:
    """Run a request; `whole`: without its cached prefix."""
    answer: list[int] = []
    before, passed, held = engine.metrics()["bytes_read"], engine.runtime.window.passed, set(engine.residency.slot_of)
    began = time.perf_counter()
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, return_routes=whole)
    engine.submit(list(prompt), params, lambda output: answer.append(output.token or 0))
    while not engine.idle:
        engine.step()
    seconds = time.perf_counter() - began
    forwards = engine.runtime.window.forwards()[passed:]
    key = engine.spec.expert_key
    needed = {key(event.layer, expert) for one in forwards for event in one.events for expert in event.needed}
    read = (engine.metrics()["bytes_read"] - before) / engine.spec.slot_bytes
    return Asked(answer, len(forwards[0].info.request_T), needed, len(needed & held), read, seconds)


def texts(checkpoint: Checkpoint, length: int, count: int) -> list[list[int]]:
    folder = Path(__file__).parents[2] / "data" / "prompts"
    text = "".join((folder / f"{name}.jsonl").read_text() for name in ("narratives", "encyclopedia", "chat"))
    ids = checkpoint.tokenizer(text)["input_ids"]
    assert len(ids) >= length * count
    return [ids[i * length : (i + 1) * length] for i in range(count)]


def test_prompts_of_2000_tokens(checkpoint: Checkpoint) -> None:
    setup = without_flags(checkpoint, kv_tokens=2304)
    engine = opened(checkpoint, setup)
    print("\n", checkpoint.name, setup.choices)
    for prompt in texts(checkpoint, 2000, 3):
        found = ask(engine, prompt)
        ratio = found.read / len(found.needed)
        print(f"  {len(prompt)} tokens need {len(found.needed)} of {engine.spec.total_experts}, read {ratio:.3f} x")
        ask(engine, prompt[:20], 20)
        assert ratio <= 1.05 or setup.options.prefill_chunk < len(prompt)  # several forwards
    engine.close()


NEW_TOKENS = (8, 20, 50, 100)
"""New tokens of a chat's second turn; the last token of the first answer is forwarded with them."""
CHATS = 2


def test_second_turn(checkpoint: Checkpoint) -> None:
    """Experts read by the second turn of a chat, over those that the whole conversation would read in one forward.

    The least are those that the forwarded tokens need and that are not resident. Then the whole conversation runs.
    """
    for new in NEW_TOKENS:
        read, least, needed, plain, whole, seconds = 0.0, 0, 0, 0, 0, []
        engine = opened(checkpoint, without_flags(checkpoint, kv_tokens=2304))
        for chat in texts(checkpoint, 2100, CHATS):
            first = ask(engine, chat[:1984], 16)
            held = set(engine.residency.slot_of)
            prompt = [*chat[:1984], *first.answer, *chat[1984 : 1984 + new]]
            turn = ask(engine, prompt)
            used = first.needed | turn.needed
            read, needed, least = read + turn.read, needed + len(turn.needed), least + len(turn.needed - held)
            plain, whole = plain + len(used - held), whole + len(used)
            seconds.append((turn.seconds, ask(engine, prompt, whole=True).seconds))
        engine.close()
        mine, others = (statistics.median(column) for column in zip(*seconds, strict=True))
        print(
            f"\n  {checkpoint.name}, {new} new tokens, {turn.tokens} forwarded: {needed} of {whole} needed, {least} "
            f"not resident, least {least / whole:.2f} of whole, {least / plain:.2f} x; read {read:.0f}, "
            f"{read / plain:.2f} x; TTFT {mine:.2f} s, {mine / others:.2f} x",
            flush=True,
        )


@needs_routes
@pytest.mark.parametrize("source", ["law", "intent", "translation", "qwen3"])
def test_second_turn_on_published_routes(source: str) -> None:
    """The least reads of a second turn with prefix caching, over those without.

    Before it are 2,000 tokens, the last 48 decoded. Qwen3's routes have 156 tokens in all, the first 28 of a prompt.
    """
    if source == "qwen3":
        spec, rows = whole_conversation()
    else:
        spec, parts = sequences(source)
        rows = np.concatenate(parts)
    slots = round(SHARE * spec.total_experts)
    room_L = np.array(equal_slots(spec, slots))
    for new in NEW_TOKENS:
        first = min(2000, len(rows) - new)
        sums = dict.fromkeys(("needed", "whole", "best", "least", "plain"), 0)
        chats = [rows[start : start + first + new] for start in range(0, len(rows) - first - new + 1, first + new)]
        for chat in chats:
            residency = Residency(build_policy("foresight", spec, {}, slots), layer_slots=equal_slots(spec, slots))
            prompt = max(28, first - 48) if source != "qwen3" else 28
            for number, end in enumerate(range(prompt, first)):
                _forward(spec, residency, chat[end - 1 if number else 0 : end], number, 0)
            used, needed = (_used(spec, part) for part in (chat, chat[first - 1 :]))
            held_LE = np.zeros_like(used)
            for key in residency.slot_of:
                held_LE[divmod(key, spec.num_experts)] = True
            sums["needed"] += int(needed.sum())
            sums["whole"] += int(used.sum())
            sums["best"] += int(np.maximum(needed.sum(1) - room_L, 0).sum())
            sums["least"] += int((needed & ~held_LE).sum())
            sums["plain"] += int((used & ~held_LE).sum())
        print(
            f"\n  {source}, {len(chats)} chats of {first} + {new} tokens: {sums}; least "
            f"{sums['least'] / sums['whole']:.2f} of whole, {sums['least'] / sums['plain']:.2f} x; with the best "
            f"residents {sums['best'] / sums['plain']:.2f} x"
        )


def _used(spec: ModelSpec, experts_TLK: np.ndarray) -> np.ndarray:
    """Whether an expert is used, [L, E]."""
    used_LE = np.zeros((spec.num_layers, spec.num_experts), bool)
    for layer in range(spec.num_layers):
        used_LE[layer, experts_TLK[:, layer]] = True
    return used_LE


def whole_conversation() -> tuple[ModelSpec, np.ndarray]:
    """Qwen3's spec, and experts [T, L, K] of its conversation."""
    routes = route_csv.read_routes(QWEN, ModelFacts())
    (sequence,) = routes.sequences
    return routes.spec, sequence.experts_TS.astype(np.int64).reshape(-1, routes.spec.num_layers, routes.spec.top_k_L[0])


def _forward(spec: ModelSpec, residency: Residency, experts_TLK: np.ndarray, number: int, request: int) -> None:
    info, events = make_forward(spec, experts_TLK, forward_id=number, request=request)
    residency.begin_forward(info)
    for event in events:
        residency.event(event)
    residency.end_forward(info)


def test_prompt_wait(checkpoint: Checkpoint) -> None:
    """A prompt of 1,500 tokens alone and while another request decodes, by the limit of its wait.

    A forward of the fewest tokens tells the fixed time.
    """
    for limit in (0.0, 2.0):
        engine = opened(checkpoint, without_flags(checkpoint, kv_tokens=2304, max_prompt_wait=limit))
        waiting, long, alone = (prompt[: 30 if i == 0 else 1500] for i, prompt in enumerate(texts(checkpoint, 1500, 3)))
        found = ask(engine, alone)
        fixed = ask(engine, waiting[-1:] + alone[-LEAST_WAITED_CHUNK:]).seconds
        print(f"\n  {checkpoint.name}, limit {limit}: alone read {found.read:.0f} experts", end="")
        engine.submit(list(waiting), SamplingParams(max_tokens=500, ignore_eos=True), lambda output: None)
        engine.step()
        answered: list[Output] = []
        engine.submit(list(long), SamplingParams(max_tokens=1), answered.append)
        before, forwards, longest, began = engine.metrics()["bytes_read"], 0, 0.0, time.perf_counter()
        while not answered:
            start = time.perf_counter()
            engine.step()
            forwards, longest = forwards + 1, max(longest, time.perf_counter() - start)
        read = (engine.metrics()["bytes_read"] - before) / engine.spec.slot_bytes
        seconds = time.perf_counter() - began
        print(
            f"; beside a decoding request {read:.0f} in {forwards} forwards, {seconds:.2f} s, longest {longest:.2f} s, "
            f"{LEAST_WAITED_CHUNK} tokens {fixed:.2f} s"
        )
        assert not limit or longest <= 1.5 * max(limit, 2 * fixed)
        engine.close()


def test_chats_by_size_of_the_cache(checkpoint: Checkpoint) -> None:
    """Bytes of a chat in the same memory without flags, and with the smallest and the largest cache by hand.

    Turns come at lengths from 200 to 2,400 tokens. A chat that outgrows the cache drops its oldest tokens.
    """
    values = {"device": "cpu", "oracle_s": 0.0, "warm_start": False, "max_prompt_wait": 0.0}
    memory, read = memory_for(checkpoint, values), {}
    for title, fixed in (
        ("without flags", {}),
        ("1,024 tokens", {"kv_tokens": 1024}),
        ("4,096 tokens", {"kv_tokens": 4096, "prefill_chunk": 512}),
    ):
        try:
            setup = choose(checkpoint, {**values, **fixed}, process_memory_bytes=memory + resident_bytes())
        except CapacityError as error:
            print(f"\n  {checkpoint.name}, {title}: {error}")
            continue
        engine = opened(checkpoint, setup)
        total, forwarded = 0.0, 0
        for chat in texts(checkpoint, 2600, 1):
            for length in (200, 312, 1000, 1112, 2200, 2312):
                prompt = chat[: length + 64][-(setup.options.kv_tokens - 32) :]
                found = ask(engine, prompt, 24)
                total, forwarded = total + found.read, forwarded + found.tokens
        engine.close()
        read[title] = total
        rows = {name: value for name, value, _ in setup.choices}
        print(
            f"\n  {checkpoint.name}, {title}: {rows['expert slots']} slots, {rows['KV cache']}, chunk "
            f"{rows['prefill chunk']}, expected {rows.get('expected reads')}: {total:.0f} experts, {forwarded} tokens"
        )
    print({title: f"{loads / read['without flags']:.3f} x" for title, loads in read.items()})


# -- loads over events -------------------------------------------------------------------------------------------------

Stream = list[tuple[ForwardInfo, list[GateEvent], tuple[int, ...]]]  # with the requests that end


def loads(spec: ModelSpec, stream: Stream, slots: int, policy: str, *, by_layer: bool) -> int:
    future = [[spec.expert_key(event.layer, x) for x in event.needed] for _, events, _ in stream for event in events]
    made = build_policy(policy, spec, {}, slots, future=future if policy == "belady" else None)
    residency = Residency(made, layer_slots=equal_slots(spec, slots) if by_layer else ())
    for info, events, ended in stream:
        residency.begin_forward(info)
        for event in events:
            residency.event(event)
        residency.end_forward(info)
        for request in ended:
            residency.end_request(request)
    return residency.counts.loads


def of_window(forwards: Sequence[WindowForward]) -> Stream:
    last = {request: number for number, one in enumerate(forwards) for request in one.info.request_T}
    return [
        (one.info, list(one.events), tuple(r for r in sorted(set(one.info.request_T)) if last[r] == number))
        for number, one in enumerate(forwards)
    ]


def print_ratios(title: str, spec: ModelSpec, turn: Stream, both: Stream, slots: int) -> None:
    needed = [sum(len(event.needed) for _, events, _ in stream for event in events) for stream in (turn, both)]
    rows = [f"needed {needed[1] / needed[0]:.2f}"]
    for name, by_layer in (("lru", False), ("lru", True), ("foresight", False), ("foresight", True), ("belady", False)):
        one, other = (loads(spec, stream, slots, name, by_layer=by_layer) for stream in (turn, both))
        rows.append(f"{name}{' by layer' if by_layer else ''} {other / one:.2f} ({other} / {one})")
    print(f"\n  {title}, {slots} of {spec.total_experts} slots: " + "; ".join(rows), flush=True)


@pytest.mark.parametrize("layers_and_experts", [(4, 8, 2), (8, 32, 4)], ids=str)
def test_four_requests(layers_and_experts: tuple[int, int, int], tmp_path: Path, reference: Path) -> None:
    layers, experts, top_k = layers_and_experts
    counts = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), experts)
    families.save(
        "qwen3_next",
        tmp_path,
        num_experts_per_tok=top_k,
        num_hidden_layers=layers,
        vocab_size=512,
        layer_types=["linear_attention", "full_attention"] * (layers // 2),
        **counts,
    )
    for file in reference.glob("token*"):
        shutil.copy(file, tmp_path)
    made = Checkpoint.open(str(tmp_path))
    draw = np.random.default_rng(1)
    prompts = [draw.integers(3, 512, 16).tolist() for _ in range(4)]
    slots = round(SHARE * made.spec.total_experts)
    streams, live = [], []
    for together in (False, True):
        options = ServeOptions(kv_tokens=512, prefill_chunk=256, pool="layer", oracle_s=0.0, threads=1)
        memory = divide_with_slots(made, options, slots).device_bytes
        engine = build_engine(made, options=options, policy="foresight", device_memory_bytes=memory)
        engine.state, engine.runtime.window = "ready", EventWindow(10**6, 10**8)
        for prompt in prompts:
            engine.submit(prompt, SamplingParams(max_tokens=32, ignore_eos=True), lambda output: None)
            while not together and not engine.idle:
                engine.step()
        while not engine.idle:
            engine.step()
        streams.append(of_window(engine.runtime.window.forwards()))
        live.append(engine.metrics()["bytes_read"])
        engine.close()
    print(f"\n  qwen3_next: bytes of a live engine, foresight by layer: {live[1] / live[0]:.2f}")
    print_ratios(f"qwen3_next, {layers} layers, {top_k} of {experts}", made.spec, *streams, slots)


@needs_routes
def test_four_requests_of_published_routes() -> None:
    """120 prompt tokens and 60 new ones of each, of one task and of two."""
    spec, law = sequences("law")
    tasks = {"law": np.concatenate(law), "intent": np.concatenate(sequences("intent")[1])}
    for title, names in (("law", ["law"] * 4), ("law and intent", ["law", "intent"] * 2)):
        starts = [180 * names[:number].count(name) for number, name in enumerate(names)]
        rows = [tasks[name][start : start + 180] for name, start in zip(names, starts, strict=True)]
        turn: Stream = []
        for number, row in enumerate(rows):
            for start, end in [(0, 120), *((t, t + 1) for t in range(120, 180))]:
                info, events = make_forward(spec, row[start:end], forward_id=len(turn), request=number)
                turn.append((info, events, (number,) if end == 180 else ()))
        both: Stream = []
        for start, end in [(0, 120), *((t, t + 1) for t in range(120, 180))]:
            parts_ = [row[start:end] for row in rows]
            info, events = make_forward(spec, np.concatenate(parts_), forward_id=len(both))
            owners = tuple(number for number, part in enumerate(parts_) for _ in part)
            positions = tuple(position for _ in parts_ for position in range(start, end))
            info = replace(info, request_T=owners, position_T=positions, embedding_TD=None)
            events = [GateEvent(forward=info, layer=e.layer, experts_TK=e.experts_TK) for e in events]
            both.append((info, events, tuple(range(4)) if end == 180 else ()))
        print_ratios(f"DeepSeek-V2-Lite, {title}", spec, turn, both, round(SHARE * spec.total_experts))


@needs_routes
def test_second_start_on_published_routes() -> None:
    """Hits of the first 50 tokens of another request, by what a first run of 600 tokens has left."""
    spec, law = sequences("law")
    slots = round(SHARE * spec.total_experts)
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(len(law))
        first = np.concatenate([law[i] for i in order])[:600]
        later = law[order[-1]][:50]
        hits = []
        for warm in (False, True):
            policy = build_policy("foresight", spec, {}, slots)
            residency = Residency(policy, layer_slots=equal_slots(spec, slots))
            if warm:
                taught = build_policy("foresight", spec, {}, slots)
                earlier = Residency(taught, layer_slots=equal_slots(spec, slots))
                _run(spec, earlier, first, 0)
                policy.restore(taught.state())
                for key in earlier.slot_of:
                    residency.load_into_free_slot(key)
            before = residency.counts
            _run(spec, residency, later, 10_000)
            hits.append((residency.counts - before).hit_rate)
        print(f"\n  law, order {seed}: first start {hits[0]:.3f}, second {hits[1]:.3f}")


def _run(spec: ModelSpec, residency: Residency, experts_TLK: np.ndarray, number: int) -> None:
    for token in range(len(experts_TLK)):
        _forward(spec, residency, experts_TLK[None, token], number + token, number)
    residency.end_request(number)


# -- settings by hand --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "prompt", "new"), [(6, 120, 60), (4, 600, 60)])
def test_default_settings_on_the_embedded_model(
    count: int, prompt: int, new: int, tmp_path: Path, reference: Path
) -> None:
    """Experts read without flags over the fewest by hand, with KV cache and chunk of exactly the longest request."""
    checkpoint = long_model("reference", tmp_path, reference)
    values = {"device": "cpu", "oracle_s": 0.0, "warm_start": False}
    memory = memory_for(checkpoint, values)
    hand = {"kv_tokens": prompt + new + 16, "prefill_chunk": prompt}
    choices = [("without flags", "auto", {})]
    choices += [
        (f"{policy}, {pool}, chunk {chunk}", policy, {**hand, "pool": pool, "prefill_chunk": chunk})
        for policy, pool in (("foresight", "layer"), ("foresight", "one"), ("lfru", "layer"), ("lru", "layer"))
        for chunk in (prompt, 64)
    ]
    read: dict[str, float] = {}
    for title, policy, fixed in choices:
        limit = memory + resident_bytes()
        try:
            setup = choose(checkpoint, {**values, **fixed}, process_memory_bytes=limit, policy=policy)
        except CapacityError:
            continue  # a chunk of the whole prompt does not fit
        engine = opened(checkpoint, setup)
        read[title] = sum(ask(engine, text, new).read for text in texts(checkpoint, prompt, count))
        engine.close()
        print(f"\n  {count} of {prompt} + {new}, {title}: {engine.store.num_slots} slots, {read[title]:.0f} experts")
    best = min(value for title, value in read.items() if title != "without flags")
    print(f"  {read['without flags'] / best:.3f} x the best by hand")


@needs_routes
@pytest.mark.parametrize(("count", "prompt", "new"), [(12, 120, 120), (6, 2000, 200)])
def test_default_settings_on_published_routes(count: int, prompt: int, new: int) -> None:
    """Loads of DeepSeek-V2-Lite without flags over those with KV cache and chunk of exactly the longest request.

    A batcher over a model with one small layer composes the forwards, and its KV cache grows as a server's.
    """
    spec, law = sequences("law")
    sources = [np.concatenate(law), np.concatenate(sequences("intent")[1])]
    starts = [(i % 2, i // 2 * (prompt + new)) for i in range(count)]
    rows = [sources[which][at : at + prompt + new] for which, at in starts]
    chats = [(row, [(prompt, new)]) for row in rows if len(row) == prompt + new]
    found, memory = default_split(round(SHARE * DEEPSEEK_V2_LITE.num_experts))
    hand = divide(DEEPSEEK_V2_LITE, memory, kv_tokens=prompt + new, chunk_tokens=prompt)
    by_hand = {
        f"{name}{' by layer' if by_layer else ''}": _served(
            spec, chats, hand, fixed_share(hand), name, by_layer=by_layer
        )
        for name, by_layer in (("foresight", True), ("foresight", False), ("lfru", True), ("lru", True))
    }
    ours = _served(spec, chats, found.split, found.share, "foresight", by_layer=True)
    best = min(by_hand.values())
    print(
        f"\n  {len(chats)} of {prompt} + {new}: without flags {found.split} {found.share}; "
        f"{hand.slots} slots by hand: {by_hand}"
    )
    print(f"  {ours} loads without flags, {ours / best:.3f} x the best")


@needs_routes
@pytest.mark.parametrize("kv_tokens", [None, 1024, 8192])
def test_chats_by_size_of_the_cache_on_published_routes(kv_tokens: int | None) -> None:
    """Loads of two chats without flags, and with KV caches of a fixed size in the same memory."""
    spec, law = sequences("law")
    rows = np.concatenate(law)
    turns = [(length, 48) for length in (200, 312, 424, 1000, 1112, 2200, 2312)]
    chats = [(rows[start : start + 2400], turns) for start in (0, 2400)]
    found, memory = default_split(round(SHARE * DEEPSEEK_V2_LITE.num_experts))
    split, share = found.split, found.share
    if kv_tokens is not None:
        split = divide(DEEPSEEK_V2_LITE, memory, kv_tokens=kv_tokens)
        share = fixed_share(split)
    loads = _served(spec, chats, split, share, "foresight", by_layer=True)
    print(f"\n  KV cache {kv_tokens}: {share.slots} slots, {loads} loads")


def default_split(slots: int) -> tuple[ExpectedSplit, int]:
    """The division without flags that has so many slots beside a full KV cache, and its memory."""
    memory = slots * DEEPSEEK_V2_LITE.slot_bytes
    while True:
        found = best_split(
            DEEPSEEK_V2_LITE,
            memory,
            kv_tokens=None,
            chunk_tokens=None,
            longest=GOOD_CONTEXT,
            share=partial(flexible_share, DEEPSEEK_V2_LITE, chunk=True, cache=True),
        )
        if found.split.slots >= slots:
            return found, memory
        memory += 2_000_000


def _small_batcher(split: MemorySplit, share: MemoryShare, first_kv_tokens: int) -> Batcher:
    """A batcher over a model with one small layer, with the server's KV cache and chunks."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        max_position_embeddings=16_384,
    )
    return Batcher(
        LlamaForCausalLM(config).eval(),
        max_requests=8,
        kv_tokens=split.kv_tokens,
        max_batch_tokens=share.chunk_tokens,
        prefix_caching=True,
        first_kv_tokens=first_kv_tokens,
    )


def _served(
    spec: ModelSpec,
    chats: Sequence[tuple[np.ndarray, Sequence[tuple[int, int]]]],
    split: MemorySplit,
    share: MemoryShare,
    name: str,
    *,
    by_layer: bool,
) -> int:
    """Loads of chats, one after the other: routes [T, L, K], and the length of each turn's prompt and answer.

    A chat that outgrows the KV cache drops its oldest tokens.
    """
    slots = share.slots
    residency = Residency(build_policy(name, spec, {}, slots), layer_slots=equal_slots(spec, slots) if by_layer else ())
    batcher = _small_batcher(split, share, split.kv_tokens - share.kv_tokens if share.kv_tokens else 0)
    now: dict[int, np.ndarray] = {}  # routes of each request, by position

    def forward(batch: Batch) -> None:
        info = batch.info
        residency.reserve_slots(
            share.slots_for_forward(len(info.request_T)) + share.slots_for_cache(batcher.grown_kv_tokens)
        )
        experts_TLK = np.array([now[r][t] for r, t in zip(info.request_T, info.position_T, strict=True)])
        residency.begin_forward(info)
        for layer in range(spec.num_layers):
            routes = tuple(map(tuple, experts_TLK[:, layer].tolist()))
            residency.event(GateEvent(forward=info, layer=layer, experts_TK=routes, weights_TK=None))
        residency.end_forward(info)

    batcher.on_forward = forward
    number = 0
    for row, turns in chats:
        ids: list[int] = []
        for prompt, new in turns:
            ids += np.random.default_rng(number).integers(3, 64, prompt - len(ids)).tolist()
            start = max(0, prompt + new - split.kv_tokens)
            now[number] = row[start:]
            batcher.add(number, ids[start:], SamplingParams(max_tokens=new, ignore_eos=True))
            while not batcher.idle:
                ids += [output.token for output in batcher.step() if output.token is not None]
            residency.end_request(number)
            number += 1
    batcher.close()
    return residency.counts.loads
