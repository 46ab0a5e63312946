"""The real engine behind the real server, asked by the real client."""

import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pyarrow.parquet as pq
import pytest
import torch

from moetool.base.errors import MoetoolError
from moetool.models.checkpoint import Checkpoint
from moetool.runtime.assembly import build_engine
from moetool.runtime.request import Output, SamplingParams, Unavailable
from moetool.runtime.serve_options import ServeOptions
from moetool.trace.reader import Trace
from tests.live_page import missing_fields
from tests.refusals import refused
from tests.servers import PATIENCE_S, client_of, eventually, get, serving

PROMPTS = ["Question: What is 12 + 7? Answer:", "def add(a, b):", "The king said", "12 * 3 =", "User: hello there"]


@pytest.fixture(scope="module")
def engine(reference: Path) -> Any:
    # 20 MB: dense weights 6.5, KV cache 8.5, and a quarter of the experts
    made = build_engine(
        Checkpoint.open("reference"),
        options=ServeOptions(kv_tokens=2048, oracle_s=4),
        policy="lru",
        device_memory_bytes=20_000_000,
    )
    assert made.store.num_slots < made.spec.total_experts // 3
    made.start()
    return made


@pytest.fixture(scope="module")
def client(engine: Any) -> Iterator[openai.OpenAI]:
    with serving(engine) as (url, _):
        yield client_of(url)


@pytest.fixture(scope="module")
def plain(full: Any, tokenizer: Any) -> dict[str, str]:
    """The plain model's greedy answer of 16 tokens."""
    answers = {}
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt")
        with torch.inference_mode():
            tokens = full.model.generate(**ids, max_new_tokens=16, do_sample=False)[0]
        answers[prompt] = tokenizer.decode(tokens[ids["input_ids"].shape[1] :], skip_special_tokens=True)
    return answers


def _complete(client: openai.OpenAI, prompt: str, **options: Any) -> str:
    made = client.completions.create(
        model="reference", prompt=prompt, **{"max_tokens": 16, "temperature": 0, **options}
    )
    return made.choices[0].text


def test_greedy_text_is_the_plain_models(client: openai.OpenAI, plain: dict[str, str]) -> None:
    assert {prompt: _complete(client, prompt) for prompt in PROMPTS} == plain


def test_streamed_text_is_the_same(client: openai.OpenAI, plain: dict[str, str]) -> None:
    stream = client.completions.create(model="reference", prompt=PROMPTS[0], max_tokens=16, temperature=0, stream=True)
    pieces = [chunk.choices[0].text for chunk in stream if chunk.choices]
    assert "".join(pieces) == plain[PROMPTS[0]]
    assert len(pieces) > 5


def test_chat(client: openai.OpenAI, tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "Hello, I want to book a table."}]
    made = client.chat.completions.create(model="reference", messages=messages, max_tokens=12, temperature=0)  # type: ignore[arg-type]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert made.choices[0].message.content == _complete(client, prompt, max_tokens=12)
    assert made.usage is not None
    assert made.usage.completion_tokens == 12
    assert made.usage.prompt_tokens == len(tokenizer(prompt)["input_ids"])


def test_the_same_seed_gives_the_same_text_alone_and_in_a_batch(client: openai.OpenAI) -> None:
    def sample(prompt: str, seed: int) -> str:
        return _complete(client, prompt, temperature=0.8, top_p=0.95, seed=seed)

    asked = [(prompt, seed) for prompt in PROMPTS for seed in (1, 2)]
    alone = [sample(*one) for one in asked]
    with ThreadPoolExecutor(len(asked)) as pool:
        together = list(pool.map(lambda one: sample(*one), asked))
    assert together == alone
    assert len(set(alone)) == len(alone)


def test_many_clients_at_once_get_their_own_answers(client: openai.OpenAI, plain: dict[str, str]) -> None:
    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(lambda prompt: (prompt, _complete(client, prompt)), PROMPTS * 4))
    assert all(text == plain[prompt] for prompt, text in answers)


def test_stop_and_logprobs_and_echo(client: openai.OpenAI, plain: dict[str, str]) -> None:
    text = plain[PROMPTS[0]]
    stop = text[5:8]
    assert _complete(client, PROMPTS[0], stop=stop) == text[: text.find(stop)]
    made = client.completions.create(
        model="reference", prompt=PROMPTS[0], max_tokens=4, temperature=0, logprobs=3, echo=True
    )
    choice = made.choices[0]
    assert choice.text.startswith(PROMPTS[0])
    assert choice.logprobs is not None and choice.logprobs.token_logprobs is not None
    assert choice.logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in choice.logprobs.token_logprobs[1:])
    assert choice.logprobs.top_logprobs is not None
    last, best = choice.logprobs.token_logprobs[-1], choice.logprobs.top_logprobs[-1]
    assert last == pytest.approx(max(best.values()))  # greedy takes the likeliest


def test_a_context_that_is_too_long_is_refused_with_the_numbers(client: openai.OpenAI) -> None:
    with refused(openai.BadRequestError, "context"):
        _complete(client, "word " * 3000)


def test_metrics_add_up(client: openai.OpenAI, engine: Any) -> None:
    eventually(lambda: engine.metrics()["queue_running"] == 0)
    metrics = engine.metrics()
    counts = engine.residency.counts
    assert metrics["hits_kept"] == counts.kept > 0
    assert metrics["misses"] == counts.missed > 0
    assert metrics["bytes_read"] == metrics["expert_reads"] * engine.spec.slot_bytes
    assert metrics["expert_reads"] == counts.loads
    assert metrics["slots_bytes"] + metrics["kv_bytes"] < 20_000_000
    _, _, text = get(str(client.base_url).removesuffix("/v1/"), "/metrics")
    assert f'moetool_expert_uses_total{{outcome="missed"}} {float(metrics["misses"])}' in text
    assert "The engine's" not in text  # every number of an engine says what it is
    layers = _layers(text)
    assert [sum(layers[name]) for name in ("needed_experts_total", "expert_hits_total", "loaded_experts_total")] == [
        counts.needed,
        counts.kept + counts.prefetched,
        counts.loads,
    ]
    assert sum(layers["resident_experts"]) == engine.residency.num_residents and len(layers) == 4
    dashboard = json.loads((Path(__file__).parents[2] / "docs" / "grafana.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    names = {name for query in queries for name in re.findall(r"\bmoetool_\w+", query)}
    printed = {re.split("[{ ]", line)[0] for line in text.splitlines()}
    assert len(queries) > 20 and names <= printed


def _layers(text: str) -> dict[str, list[float]]:
    """Values of /metrics by layer."""
    found: dict[str, list[float]] = {}
    for name, value in re.findall(r'^moetool_layer_(\w+){layer="\d+"} (\S+)$', text, re.MULTILINE):
        if not name.endswith("_created"):
            found.setdefault(name, []).append(float(value))
    return found


def test_the_page_shows_the_server(client: openai.OpenAI, engine: Any) -> None:
    url = str(client.base_url).removesuffix("/v1/")
    _complete(client, PROMPTS[0])
    eventually(lambda: engine.stats()["oracle"])
    stats = json.loads(get(url, "/stats")[2])
    assert not missing_fields("serverView", stats)
    if (chromium := shutil.which("chromium")) is None:
        pytest.skip("no chromium")
    shown = subprocess.run(
        [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=6000", "--dump-dom", url],
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout
    texts = re.sub(r"<script.*?</script>|<[^>]+>", " ", shown, flags=re.DOTALL)
    assert "ready, renewed every 2 s" in texts and "lru (serving)" in texts and "belady" in texts
    assert f"{engine.residency.num_residents} of {engine.spec.total_experts} experts are resident" in texts
    assert f"{100 * stats['engine']['hit_rate']:.1f} %" in texts


def _answer(engine: Any, prompt: list[int], max_tokens: int = 8) -> list[Output]:
    outputs: list[Output] = []
    done = threading.Event()

    def sink(output: Output) -> None:
        outputs.append(output)
        if output.finish is not None:
            done.set()

    engine.submit(prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True), sink)
    assert done.wait(PATIENCE_S)
    return outputs


def test_a_disk_that_fails_fails_the_request_and_not_the_server(
    reference: Path, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(reference, tmp_path / "m")
    engine = build_engine(
        Checkpoint.open(str(tmp_path / "m")),
        options=ServeOptions(kv_tokens=512),
        policy="lru",
        device_memory_bytes=None,
    )
    engine.start()
    prompt = tokenizer(PROMPTS[0])["input_ids"]
    before = [output.token for output in _answer(engine, prompt)]
    real = engine.store.files.shards.read
    broken = {"on": True}

    def read(file: int, offset: int, num_bytes: int) -> memoryview:
        if broken["on"]:
            raise OSError("input/output error")
        return real(file, offset, num_bytes)

    monkeypatch.setattr(engine.store.files.shards, "read", read)
    other = tokenizer("An entirely different beginning, with other experts")["input_ids"]
    failed = _answer(engine, other)
    assert failed[-1].finish == "error"
    assert failed[-1].error is not None and "cannot read expert" in failed[-1].error
    assert all(output.token is None for output in failed)
    broken["on"] = False
    assert [output.token for output in _answer(engine, prompt)] == before
    assert _answer(engine, other)[-1].finish == "length"
    assert engine.metrics()["failures"] == 1
    engine.close()


def test_closing_cancels_what_runs_and_refuses_what_comes(reference: Path, tokenizer: Any) -> None:
    engine = build_engine(Checkpoint.open("reference"), options=ServeOptions(kv_tokens=1024))
    engine.start()
    outputs: list[Output] = []
    prompt = tokenizer(PROMPTS[0])["input_ids"]
    engine.submit(prompt, SamplingParams(max_tokens=900, ignore_eos=True), outputs.append)
    eventually(lambda: len(outputs) > 2)
    engine.close()
    assert outputs[-1].finish == "cancelled"
    with pytest.raises(Unavailable):
        engine.submit(prompt, SamplingParams(max_tokens=1), outputs.append)


def test_a_full_disk_ends_the_log_and_neither_the_server_nor_what_was_logged(
    reference: Path, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build_engine(
        Checkpoint.open("reference"), options=ServeOptions(kv_tokens=512, log_segment_s=0.01), log=tmp_path / "log"
    )
    engine.start()
    prompt = tokenizer(PROMPTS[0])["input_ids"]
    assert _answer(engine, prompt)[-1].finish == "length"
    eventually(lambda: engine.metrics()["gate_log_rows_written"] >= len(prompt))
    eventually(lambda: not engine.metrics()["gate_log_rows_waiting"])
    written = engine.metrics()["gate_log_rows_written"]

    def full(*args: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq, "write_table", full)
    assert _answer(engine, prompt)[-1].finish == "length"
    assert engine.state == "ready"
    with refused(MoetoolError, "No space left"):
        engine.close()
    assert Trace(tmp_path / "log").num_tokens == written


def test_an_engine_that_dies_lets_nobody_wait(reference: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build_engine(Checkpoint.open("reference"), options=ServeOptions(kv_tokens=512))
    prompt = tokenizer(PROMPTS[0])["input_ids"]
    engine.state = "ready"  # taken, and not begun
    outputs: list[Output] = []

    def broken(output: Output) -> None:
        raise RuntimeError("the sink is broken")

    engine.submit(prompt, SamplingParams(max_tokens=0), broken)
    engine.submit(prompt, SamplingParams(max_tokens=5), outputs.append)
    with ThreadPoolExecutor(1) as pool:
        scored = pool.submit(engine.prompt_logprobs, prompt, 1)
        eventually(lambda: engine.num_pending == 3)
        monkeypatch.setattr(threading, "excepthook", lambda args: None)
        engine.start()
        with refused(MoetoolError, "sink", "broken"):
            scored.result(timeout=PATIENCE_S)
    eventually(lambda: bool(outputs))
    assert outputs[-1].finish == "error"
    assert engine.state == "failed"
    with pytest.raises(Unavailable):
        engine.submit(prompt, SamplingParams(max_tokens=1), outputs.append)
    engine.close()


def test_a_plans_memory_holds_for_other_options_too(reference: Path, tmp_path: Path) -> None:
    from moetool.capture.run import CaptureOptions, capture
    from moetool.prompts.gather import load
    from moetool.runtime.budget import divide_with_slots
    from moetool.tuning.cache_planning import plan_cache
    from tests.plans import fixed_parts

    trace = Trace(
        capture(
            "reference", load(["chat"], max_prompts=6), tmp_path / "t", CaptureOptions(dtype="float32", batch_size=1)
        ).out
    )
    options = ServeOptions(kv_tokens=512)
    made = divide_with_slots(Checkpoint.open(reference), options, 8)
    parts = fixed_parts(trace.spec, 20_000_000, dense_bytes=made.dense_bytes, kv_bytes=made.kv_bytes, kv_tokens=512)
    plan = plan_cache(trace, parts)
    as_planned = build_engine(Checkpoint.open("reference"), options=options, plan=plan)
    assert as_planned.store.num_slots == plan.slots
    more_kv = build_engine(Checkpoint.open("reference"), options=ServeOptions(kv_tokens=2048), plan=plan)
    assert more_kv.store.num_slots < plan.slots
    for engine in (as_planned, more_kv):
        metrics = engine.metrics()
        assert made.dense_bytes + metrics["kv_bytes"] + metrics["slots_bytes"] <= plan.device_memory_bytes
        engine.close()


@pytest.mark.parametrize(
    ("memory", "given", "together"), [(None, 0, 64), (14_000_000, 0, 8), (None, 3, 3), (14_000_000, 20, 20)]
)
def test_how_many_requests_run_together_follows_from_memory(memory: int | None, given: int, together: int) -> None:
    options = ServeOptions(kv_tokens=512, max_requests=given)
    made = build_engine(Checkpoint.open("reference"), options=options, policy="lru", device_memory_bytes=memory)
    assert made.max_requests == together
    made.close()
