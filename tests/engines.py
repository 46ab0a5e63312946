"""Engines without a thread, so that a test composes the batches."""

import random
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch

from moetool.models.batching import Batcher
from moetool.models.loading import CPU, load_lazy
from moetool.policy import Policy, build_policy
from moetool.request import Output, SamplingParams
from moetool.residency import Residency
from moetool.serving.engine import Engine
from moetool.serving.log import ServeLog
from moetool.trace import KEEP
from moetool.types import ForwardInfo, GateEvent


class Chaos(Policy):
    """Prefetches and evicts at random: decisions must never matter to the result."""

    def __init__(self, spec: Any, num_slots: int, seed: int) -> None:
        super().__init__(spec, None, num_slots)
        self._draw = random.Random(seed)
        self._residents: list[int] = []

    def begin_forward(self, info: ForwardInfo) -> Sequence[int]:
        return self._some()

    def gate(self, event: GateEvent, hits: list[int], misses: list[int]) -> Sequence[int]:
        return self._draw.sample(misses, len(misses))

    def after_first_expert(self, event: GateEvent) -> Sequence[int]:
        return self._some()

    def admit(self, key: int, prefetched: bool) -> None:
        self._residents.append(key)

    def removed(self, key: int) -> None:
        self._residents.remove(key)

    def evict(self, locked: Collection[int]) -> int:
        return self._draw.choice([key for key in self._residents if key not in locked])

    def evict_for_prefetch(self, key: int, locked: Collection[int]) -> int | None:
        return self.evict(locked) if self._draw.random() < 0.8 else None

    def _some(self) -> list[int]:
        return [self._draw.randrange(self.spec.total_experts) for _ in range(self._draw.randrange(6))]


def engine(
    reference: Path,
    tokenizer: Any,
    policy: str | Policy,
    slots: int,
    *,
    max_requests: int = 8,
    io_threads: int = 2,
    predictor: Any = None,
    log: Path | None = None,
    host_memory_bytes: int | None = None,
    device: torch.device = CPU,
) -> Engine:
    """An engine over the embedded model in float32, ready but with no thread of its own."""
    loaded = load_lazy(reference, torch.float32, device)
    if isinstance(policy, str):
        policy = build_policy(policy, loaded.spec, {}, slots, predictor=predictor)
    made = Engine(
        loaded,
        tokenizer,
        Residency(policy),
        Batcher(loaded.model, max_requests=max_requests, kv_tokens=4096),
        model_name="reference",
        io_threads=io_threads,
        host_memory_bytes=host_memory_bytes,
        log=ServeLog(log, {"topk"} | (policy.columns & set(KEEP)), policy.distance) if log else None,
    )
    made.state = "ready"
    return made


def generate(engine: Engine, prompts: list[list[int]], max_tokens: int) -> tuple[list[list[int]], list[torch.Tensor]]:
    """All prompts in one batch, greedily; gives their tokens and the logits of every forward."""
    logits: list[torch.Tensor] = []
    hook = engine._batcher.model.lm_head.register_forward_hook(lambda m, a, out: logits.append(out.clone()))
    tokens: dict[int, list[int]] = {}

    def sink(output: Output) -> None:
        assert output.error is None, output.error
        if output.token is not None:
            tokens.setdefault(output.request, []).append(output.token)

    requests = [engine.submit(prompt, SamplingParams(max_tokens=max_tokens), sink) for prompt in prompts]
    while not engine.idle:
        engine.step()
    hook.remove()
    return [tokens[request] for request in requests], logits
