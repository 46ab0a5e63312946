"""Expert-parallel ranks as threads of the test process."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from moetool.base.errors import MoetoolError
from moetool.base.types import Cluster, Gpu, ModelSpec, Server
from moetool.cluster.parallel.batch_placement import BatchReplacement
from moetool.cluster.parallel.rank import Rank
from moetool.cluster.parallel.rank_head import RankedModel, RankHead
from moetool.cluster.parallel.rank_options import HeadOptions, RankOptions
from moetool.models.checkpoint import Checkpoint
from moetool.runtime.request import Output, SamplingParams
from tests.servers import eventually


class ThreadRanks:
    """A `Launcher` of ranks in threads."""

    def __init__(self, restarts: bool = True) -> None:
        self.ranks: dict[int, Rank] = {}
        self.restarts = restarts
        self._arguments: Sequence[Mapping[str, Any]] = ()

    def launch(self, arguments: Sequence[Mapping[str, Any]], on_death: Callable[[int], None]) -> None:
        self._arguments = arguments
        for gpu in range(len(arguments)):
            self._start(gpu)

    def restart(self, gpu: int) -> None:
        if not self.restarts:
            raise MoetoolError("ranks are not started again")
        self._start(gpu)

    def kill(self, gpu: int) -> None:
        """End a rank's connections, since a thread cannot be killed."""
        threading.Thread(target=self.ranks[gpu].close, daemon=True).start()

    def release(self, gpu: int) -> None:
        self.ranks[gpu].close()

    def close(self) -> None:
        for rank in list(self.ranks.values()):
            rank.close()

    def _start(self, gpu: int) -> None:
        self.ranks[gpu] = Rank(**self._arguments[gpu])


def cluster_of(spec: ModelSpec, gpus: int, slots: int, servers: int = 1) -> Cluster:
    """A cluster of servers with so many GPUs in total, and slots for so many experts on each."""
    gpu = Gpu(memory_bytes=slots * spec.slot_bytes)
    each = gpus // servers
    return Cluster(servers=tuple(Server(name=f"s{n}", gpus=(gpu,) * each) for n in range(servers)), link_bytes_s=1e9)


def striped(spec: ModelSpec, gpus: int, replicas: int = 0) -> np.ndarray:
    """Expert e of every layer on GPU e modulo their number, and the first few also on the next GPU."""
    placed_GLE = np.zeros((gpus, spec.num_layers, spec.num_experts), bool)
    for expert in range(spec.num_experts):
        placed_GLE[expert % gpus, :, expert] = True
        if expert < replicas:
            placed_GLE[(expert + 1) % gpus, :, expert] = True
    return placed_GLE


def open_head(
    reference: Path,
    tokenizer: Any,
    *,
    gpus: int = 3,
    control: BatchReplacement | None = None,
    placed_GLE: np.ndarray | None = None,
    launcher: Any = None,
    slots: int = 256,
    gather_s: float = 0.01,
    **options: Any,
) -> RankHead:
    """A started head over ranks in threads."""
    spec = Checkpoint.open(reference).spec
    cluster = cluster_of(spec, gpus, slots)
    head = RankHead(
        RankedModel(name=str(reference), spec=spec, tokenizer=tokenizer, vocab_size=4096),
        cluster,
        striped(spec, gpus) if placed_GLE is None else placed_GLE,
        control or BatchReplacement("offline", spec, cluster),
        launcher or ThreadRanks(),
        rank_options=RankOptions(**{"dtype": "float32", "kv_tokens": 1024, "threads": 1, **options}),
        options=HeadOptions(gather_s=gather_s),
    )
    head.start()
    return head


def joined_after(head: RankHead, generation: int) -> float | None:
    """Time when the first generation after this one was complete; None before that."""
    joined = dict(head.loop.ranks.joined)
    return min((at for number, at in joined.items() if number > generation), default=None)


@contextmanager
def held(head: RankHead) -> Iterator[None]:
    """Hold back batches and decisions, so that the requests made meanwhile form full batches."""
    batches = head.loop
    batches.advance = lambda: None  # type: ignore[method-assign]
    try:
        yield
        eventually(lambda: not batches.events.unfinished_tasks)
    finally:
        del batches.advance  # restores the method
        batches.post("tick", None)


class Answers:
    """Collects outputs of requests."""

    def __init__(self, head: RankHead) -> None:
        self._head = head
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, Output] = {}
        self._changed = threading.Condition()

    def ask(self, prompt: list[int], max_tokens: int, **params: Any) -> int:
        """Submit a request."""
        return self._head.submit(prompt, SamplingParams(max_tokens=max_tokens, **params), self._take)

    def wait(self, requests: Sequence[int], timeout_s: float = 60.0) -> list[list[int]]:
        """The tokens of each request once all have ended."""
        with self._changed:
            assert self._changed.wait_for(lambda: all(r in self.ends for r in requests), timeout_s), self.ends
        return [self.tokens.get(request, []) for request in requests]

    def wait_for_tokens(self, count: int, timeout_s: float = 60.0) -> None:
        """Wait until so many tokens have come, over all requests."""
        with self._changed:
            assert self._changed.wait_for(lambda: sum(map(len, self.tokens.values())) >= count, timeout_s)

    def _take(self, output: Output) -> None:
        with self._changed:
            if output.token is not None:
                self.tokens.setdefault(output.request, []).append(output.token)
            if output.finish is not None:
                self.ends[output.request] = output
            self._changed.notify_all()
