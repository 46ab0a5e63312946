"""Engines without a thread, so that tests compose the batches."""

import ctypes
import random
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from moetool.base.types import ForwardInfo, GateEvent
from moetool.caching.devices import build_policies, open_pool, split_slots
from moetool.caching.policies import lru
from moetool.caching.policy import Policy
from moetool.models.checkpoint import Checkpoint
from moetool.models.experts.expert_files import ExpertFiles
from moetool.models.loading import CPU, load_lazy
from moetool.runtime.experts.device_stores import open_stores
from moetool.runtime.experts.forward import ExpertRuntime
from moetool.runtime.loop.batching import Batcher
from moetool.runtime.loop.engine import Engine
from moetool.runtime.loop.own_caches import OwnCaches
from moetool.runtime.recording.gate_log import ServeLog
from moetool.runtime.request import Output, SamplingParams
from moetool.trace.reader import Trace
from moetool.trace.rows import KEEP
from moetool.tuning.replay import AS_RECORDED, ReplayRow, ReplaySetup, replay


class RandomPolicy(Policy):
    """A policy that prefetches and evicts at random: decisions must never affect the result."""

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


class SomeOnHost(RandomPolicy):
    """Has some misses computed on the host, at random, and otherwise prefetches and evicts at random."""

    computes_on_host = True

    def on_host(self, event: GateEvent, misses: list[int]) -> Collection[int]:
        return self._draw.sample(misses, self._draw.randrange(len(misses) + 1))


class AllOnHost(RandomPolicy):
    """Has every miss computed on the host; nothing is ever loaded on demand."""

    computes_on_host = True

    def on_host(self, event: GateEvent, misses: list[int]) -> Collection[int]:
        return misses


class EventRecorder(lru.Policy):
    """LRU that records the experts of every event."""

    def __init__(self, spec: Any, num_slots: int) -> None:
        super().__init__(spec, None, num_slots)
        self.needed: list[tuple[int, ...]] = []

    def gate(self, event: GateEvent, hits: list[int], misses: list[int]) -> Sequence[int]:
        self.needed.append(event.needed)
        return super().gate(event, hits, misses)


class WrongPrefetches(EventRecorder):
    """A policy that prefetches only experts that the next layer does not need."""

    def __init__(self, spec: Any, num_slots: int, seen: EventRecorder) -> None:
        super().__init__(spec, num_slots)
        self._coming = seen.needed
        self.wrong = 0

    def begin_forward(self, info: ForwardInfo) -> Sequence[int]:
        return self._unneeded(len(self.needed), 0)

    def after_first_expert(self, event: GateEvent) -> Sequence[int]:
        layer = event.layer + 1
        return self._unneeded(len(self.needed), layer) if layer < self.spec.num_layers else ()

    def _unneeded(self, number: int, layer: int) -> list[int]:
        experts = set(range(self.spec.num_experts_L[layer])) - set(self._coming[number])
        self.wrong += len(experts)
        return [self.spec.expert_key(layer, expert) for expert in sorted(experts)]


def openmp() -> ctypes.CDLL:
    """The library whose threads torch computes with; skips the test if it is another than GNU's."""
    libraries = [*Path(torch.__file__).parents[1].glob("torch*/**/libgomp*.so*")]
    if not libraries:
        pytest.skip("torch computes with another OpenMP library")
    return ctypes.CDLL(str(libraries[0]))


@contextmanager
def every_read_fails_once(files: ExpertFiles) -> Iterator[Counter[int]]:
    """Make the first read of every expert corrupt its slot and fail; returns the number of reads per expert."""
    real, tries = files.read_stored, Counter[int]()

    def read_stored(key: int, slot: torch.Tensor) -> int:
        tries[key] += 1
        if tries[key] == 1:
            slot.fill_(0xAB)
            raise OSError(5, "input/output error")
        return real(key, slot)

    files.read_stored = read_stored  # type: ignore[method-assign]
    try:
        yield tries
    finally:
        files.read_stored = real  # type: ignore[method-assign]


def engine(
    reference: Path,
    tokenizer: Any,
    policy: str | Policy | list[Policy],
    slots: int,
    *,
    max_requests: int = 8,
    io_threads: int = 2,
    predictor: Any = None,
    log: Path | None = None,
    host_memory_bytes: int | None = None,
    device: torch.device = CPU,
    layer_slots: Sequence[int] = (),
    devices: int = 1,
    options: dict[str, Any] | None = None,
    pooled: bool | None = None,
) -> Engine:
    """An engine over the embedded model in float32, without its own thread."""
    loaded = load_lazy(Checkpoint.open(reference), torch.float32, device)
    if isinstance(policy, str):
        shares = split_slots(loaded.spec, slots, devices)
        policy = build_policies(policy, loaded.spec, options or {}, shares, predictor=predictor)
    policies = policy if isinstance(policy, list) else [policy]
    first = policies[0]
    residency = open_pool(policies, layer_slots=layer_slots)
    made = Engine(
        loaded,
        tokenizer,
        ExpertRuntime(loaded, residency, open_stores(loaded, residency, io_threads, host_memory_bytes), pooled=pooled),
        Batcher(loaded.model, max_requests=max_requests, kv_tokens=4096),
        model_name="reference",
        log=ServeLog(log, {"topk"} | (first.columns & set(KEEP)), first.distance) if log else None,
    )
    made.state = "ready"
    return made


def require_replayed(
    made: Engine, log: Path, policy: str, slots: int = 60, setup: ReplaySetup = AS_RECORDED
) -> tuple[Trace, ReplayRow]:
    """Close an engine, and require that a replay of its log takes its decisions; returns the log and the replay."""
    counts = made.residency.counts
    made.close()
    trace = Trace(log)
    (row,) = replay(trace, [policy], [slots * trace.spec.slot_bytes], setup)
    assert row.counts == counts
    assert row.digest == trace.manifest["provenance"]["decisions"]
    return trace, row


def run_all(batcher: Batcher | OwnCaches) -> dict[int, list[Output]]:
    """Step until all requests have ended; returns their outputs."""
    outputs: dict[int, list[Output]] = {}
    while not batcher.idle:
        for output in batcher.step():
            outputs.setdefault(output.request, []).append(output)
    return outputs


def tokens_of(outputs: Sequence[Output]) -> list[int]:
    """The generated tokens."""
    return [output.token for output in outputs if output.token is not None]


def generate(engine: Engine, prompts: list[list[int]], max_tokens: int) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Generate greedily for all prompts in one batch; returns their tokens and the logits of every forward."""
    logits: list[torch.Tensor] = []
    hook = engine.batcher.model.lm_head.register_forward_hook(lambda m, a, out: logits.append(out.clone()))
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


@dataclass
class Answered:
    """A batch of prompts that an engine has answered greedily, for others to answer with the same bits.

    Attributes:
        ids: tokens of the prompts.
        tokens: of the answers.
        logits: of every forward.
    """

    ids: list[list[int]]
    max_tokens: int
    tokens: list[list[int]]
    logits: list[torch.Tensor]

    @classmethod
    def by(cls, made: Engine, texts: Sequence[str], max_tokens: int) -> "Answered":
        """Generate with an engine, and close it."""
        ids = [made.tokenizer(text)["input_ids"] for text in texts]
        found = cls(ids, max_tokens, *generate(made, ids, max_tokens))
        made.close()
        return found

    def require_same(self, made: Engine, atol: float = 0.0) -> dict[str, float]:
        """Require the same tokens and logits of another engine, and close it; returns its metrics."""
        tokens, logits = generate(made, self.ids, self.max_tokens)
        metrics = made.metrics()
        made.close()
        assert tokens == self.tokens
        assert [one.shape for one in logits] == [one.shape for one in self.logits]
        assert all(torch.allclose(a, b, rtol=0, atol=atol) for a, b in zip(logits, self.logits, strict=True))
        return metrics
