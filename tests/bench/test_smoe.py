"""Savings and costs of SMoE by alpha, and the share of each of its parts.

    python -m pytest tests/bench/test_smoe.py -m '' -s

The first table is live: bytes and hits of new tokens whose text is given (`_forced`: prefill of a few tokens, then one
at a time), their cross-entropy, how often the likeliest token is that of alpha 0, and answers as a server gives them:
arithmetic by greedy decoding, multiple choice by the likeliest of its letters. The embedded prompts are in no training
data. The second is a replay of one trace, part by part, beside policies that substitute nothing; its last column sums,
over the events, the longer of what the link and the host do in one of them, in loads. The third is live, on generated
models with shared experts and without. In none is anything timed.
"""

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moetool.caching._policy import build_policy
from moetool.caching._residency import Counts, Residency, StepKind
from moetool.capture.run import CaptureOptions, capture
from moetool.models.checkpoint import Checkpoint
from moetool.models.loading import load_lazy
from moetool.prompts import gather as prompt_sets
from moetool.request import Output, SamplingParams
from moetool.runtime.expert_forward import ExpertRuntime
from moetool.runtime.expert_store import ExpertStore
from moetool.tables import print_table
from moetool.trace.reader import Trace
from moetool.tuning.replay import ReplaySetup, decisions, replay
from moetool.types import ForwardInfo, Phase
from tests import families
from tests.engines import engine, generate

SLOTS = 96
ALPHAS = (0.0, 0.1, 0.2, 0.3, 0.5, 0.8)
LENGTH, KNOWN = 80, 8
COSTS = {"load_s": 3.0, "host_s": 1.0}  # a load takes the host's time for three experts, as in the paper's S3
STEPS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("lru", "lru", {}),
    ("lfu", "lfu", {}),
    ("hybrimoe", "hybrimoe", {}),
    ("hybrimoe and host", "hybrimoe", COSTS),
    ("eviction by scores, n = 0", "smoe", {"alpha": 0.0, "prefetch": False, "window": 0}),
    ("eviction by scores, n = 3", "smoe", {"alpha": 0.0, "prefetch": False}),
    ("eviction by scores, n = 31", "smoe", {"alpha": 0.0, "prefetch": False, "window": 31}),
    ("and router, alpha 0.3", "smoe", {"alpha": 0.3, "prefetch": False}),
    ("and prefetch", "smoe", {"alpha": 0.3}),
    ("and host, by sums", "smoe", {"alpha": 0.3, **COSTS}),
    ("and host, by finish", "smoe", {"alpha": 0.3, "split": "finish", **COSTS}),
)


@contextlib.contextmanager
def _opened(reference: Path, alpha: float) -> Iterator[tuple[Any, ExpertRuntime]]:
    loaded = load_lazy(Checkpoint.open(reference), torch.float32)
    assert loaded.files is not None
    policy = build_policy("smoe", loaded.spec, {"alpha": alpha}, SLOTS)
    runtime = ExpertRuntime(loaded, Residency(policy), ExpertStore(loaded.files, SLOTS, num_threads=1))
    try:
        yield loaded.model, runtime
    finally:
        runtime.close()
        loaded.files.shards.close()


def _forced(reference: Path, ids_ST: torch.Tensor, alpha: float, batch: int) -> tuple[float, list[int], Counts]:
    """Nats per given token, the likeliest token in the place of each, and what happened in decode."""
    total, forwards, likeliest = 0.0, 0, list[int]()
    with _opened(reference, alpha) as (model, runtime), torch.inference_mode():
        for start in range(0, len(ids_ST), batch):
            ids_BT, cache = ids_ST[start : start + batch], None
            spans = [(0, KNOWN), *((i, i + 1) for i in range(KNOWN, LENGTH - 1))]
            for begin, end in spans:
                length = end - begin
                runtime.begin_forward(
                    ForwardInfo(
                        forward_id=forwards,
                        request_T=tuple(start + b for b in range(len(ids_BT)) for _ in range(length)),
                        phase_T=(Phase.DECODE if begin else Phase.PREFILL,) * (len(ids_BT) * length),
                        position_T=tuple(range(begin, end)) * len(ids_BT),
                    )
                )
                made = model(ids_BT[:, begin:end], past_key_values=cache, use_cache=True)
                runtime.end_forward()
                cache, forwards = made.past_key_values, forwards + 1
                if begin:
                    nats_B = torch.nn.functional.cross_entropy(made.logits[:, -1], ids_BT[:, end], reduction="none")
                    total += float(nats_B.sum())
                    likeliest += made.logits[:, -1].argmax(dim=-1).tolist()
        counts = runtime.residency.decode
    return total / len(likeliest), likeliest, counts


def _answers(reference: Path, tokenizer: Any, alpha: float, batch: int) -> tuple[float, float]:
    """Shares of right answers: arithmetic by decoding, multiple choice by likelihood."""
    policy = build_policy("smoe", Checkpoint.open(reference).spec, {"alpha": alpha}, SLOTS)
    made = engine(reference, tokenizer, policy, SLOTS, max_requests=batch)
    outputs: dict[int, list[Output]] = defaultdict(list)

    def ask(text: str, params: SamplingParams) -> int:
        return made.submit(tokenizer(text)["input_ids"], params, lambda output: outputs[output.request].append(output))

    sums = prompt_sets.load(["arithmetic"])
    exams = [prompt for prompt in prompt_sets.load(["exam"]) if prompt.answer in ("A", "B", "C", "D")]
    asked = [ask(prompt.text, SamplingParams(max_tokens=9)) for prompt in sums]
    chosen = [ask(prompt.text, SamplingParams(max_tokens=1, logprobs=made.vocab_size)) for prompt in exams]
    while not made.idle:
        made.step()
    made.close()
    letters = {tokenizer(f" {letter}")["input_ids"][-1]: letter for letter in "ABCD"}

    def decoded(request: int) -> str:
        tokens = [output.token for output in outputs[request] if output.token is not None]
        words = tokenizer.decode(tokens).split()
        return str(words[0]).rstrip(".") if words else ""

    def likeliest(request: int) -> str:
        logprob = outputs[request][0].logprob
        assert logprob is not None
        return letters[next(token for token, _ in logprob.top if token in letters)]

    right = sum(decoded(request) == prompt.answer for request, prompt in zip(asked, sums, strict=True))
    picked = sum(likeliest(request) == prompt.answer for request, prompt in zip(chosen, exams, strict=True))
    return right / len(sums), picked / len(exams)


def test_against_alpha(reference: Path, tokenizer: Any) -> None:
    spec = Checkpoint.open(reference).spec
    pieces = []
    for name in ("arithmetic", "chat", "code", "encyclopedia", "exam", "narratives"):
        text = "\n".join(f"{prompt.text} {prompt.answer or ''}" for prompt in prompt_sets.load([name]))
        pieces.append(torch.tensor(tokenizer(text)["input_ids"][: 3 * LENGTH]).view(3, LENGTH))
    ids_ST = torch.cat(pieces)
    rows = []
    for batch in (1, 3):
        first: tuple[float, list[int]] | None = None
        for alpha in ALPHAS:
            nats, likeliest, counts = _forced(reference, ids_ST, alpha, batch)
            sums, exams = _answers(reference, tokenizer, alpha, batch)
            first = first or (nats, likeliest)
            tokens = len(likeliest)
            same = sum(map(int.__eq__, likeliest, first[1])) / tokens
            moved = counts.loads * spec.slot_bytes / tokens / 1e6
            rows.append(
                [
                    f"batch {batch}, alpha {alpha}",
                    f"{moved:.3f}",
                    f"{counts.missed / tokens:.2f}",
                    f"{counts.hit_rate:.3f}",
                    f"{nats:.4f}",
                    f"{nats - first[0]:+.4f}",
                    f"{100 * same:.1f}",
                    f"{100 * sums:.1f}",
                    f"{100 * exams:.1f}",
                ]
            )
            assert alpha or counts.loads
    columns = ["smoe", "MB / token", "misses", "hit rate", "nats", "added", "same %", "arithmetic %", "choice %"]
    print_table(f"{SLOTS} of {spec.total_experts} experts, {ids_ST.numel()} tokens, live", columns, rows)


@pytest.mark.parametrize("batch", [1, 3])
def test_part_by_part(batch: int, tmp_path: Path) -> None:
    prompts = prompt_sets.load(["all"], max_prompts=4)
    options = CaptureOptions(max_new_tokens=48, batch_size=batch, keep=("topk", "logits", "ahead"))
    trace = Trace(capture("reference", prompts, tmp_path / "trace", options).out)
    spec, budget = trace.spec, SLOTS * trace.spec.slot_bytes
    rows = []
    for title, name, chosen in STEPS:
        setup = ReplaySetup(options={name: chosen}, sequential=False)
        (row,) = replay(trace, [name], [budget], setup)
        decode = {info.forward_id for info, _ in trace.forwards(sequential=False) if not info.prefill}
        sides: dict[tuple[int, int], list[int]] = defaultdict(lambda: [0, 0])
        for forward, layer, step in decisions(trace, name, budget, setup):
            if forward in decode and step.kind in (StepKind.LOAD, StepKind.HOST):
                sides[forward, layer][step.kind == StepKind.HOST] += 1
        longer = sum(max(loaded, hosted * COSTS["host_s"] / COSTS["load_s"]) for loaded, hosted in sides.values())
        counts, tokens = row.decode, row.decode_tokens
        done = (counts.missed, counts.hosted, counts.prefetched, counts.prefetch_loads, counts.wasted)
        rows.append(
            [
                title,
                f"{counts.hit_rate:.3f}",
                f"{counts.loads * spec.slot_bytes / tokens / 1e6:.3f}",
                *(f"{value / tokens:.2f}" for value in done),
                f"{longer / tokens:.2f}",
            ]
        )
    columns = ["decode", "hit rate", "MB / token", "missed", "hosted", "used ahead", "ahead", "wasted", "waits"]
    print_table(f"batch {batch}, {SLOTS} of {spec.total_experts} experts, a token of the replay", columns, rows)


PARTS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("lru", "lru", {}),
    ("smoe, alpha 0, no prefetch", "smoe", {"alpha": 0.0, "prefetch": False}),
    ("smoe, alpha 0, later gates", "smoe", {"alpha": 0.0}),
    ("smoe, alpha 0, partial forward", "smoe", {"alpha": 0.0, "look": "resident"}),
    ("smoe, alpha 0.3, later gates", "smoe", {"alpha": 0.3}),
    ("smoe, alpha 0.3, partial forward", "smoe", {"alpha": 0.3, "look": "resident"}),
)


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe", "deepseek_v3"])
def test_with_and_without_shared_experts(family: str, tmp_path: Path) -> None:
    """Live, on generated models: softmax and no shared expert, then sigmoid scores and a shared expert."""
    wide = {"hidden_size": 96, "num_hidden_layers": 7, "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1}
    experts = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 32)
    families.save(family, tmp_path / "model", **wide, **experts, n_shared_experts=int(family != "qwen3_moe"))
    spec = Checkpoint.open(tmp_path / "model").spec
    assert (spec.num_experts, spec.top_k_L[0]) == (32, 4) and (family == "qwen3_moe") == (spec.num_shared_experts == 0)
    prompts = [[(17 * i * i + 7 * n) % 60 + 3 for i in range(12 + n)] for n in range(6)]
    rows = []
    for title, policy, options in PARTS:
        cells = []
        for share in (0.25, 0.5):
            made = engine(
                tmp_path / "model", None, policy, int(share * spec.total_experts), max_requests=1, options=options
            )
            answers, _ = generate(made, prompts, 24)
            counts, tokens = made.residency.decode, sum(map(len, answers)) - len(prompts)
            made.close()
            cells += [
                f"{counts.hit_rate:.3f}",
                f"{counts.loads / tokens:.2f}",
                f"{counts.wasted / max(1, counts.prefetch_loads):.2f}",
            ]
        rows.append([title, *cells])
    names = ["hits", "loads a token", "wasted"]
    shared = f"{spec.num_shared_experts} shared, {spec.score_function}"
    print_table(f"{family} ({shared}): 25 %, then 50 % of {spec.total_experts} experts", ["live", *names, *names], rows)
