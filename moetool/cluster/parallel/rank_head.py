"""The head of the ranks: one engine for the OpenAI server."""

import secrets
import socket
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from moetool.base.errors import CapacityError, MoetoolError, UsageError
from moetool.base.types import Cluster, ModelSpec
from moetool.base.validation import outside_vocabulary
from moetool.caching.event_counts import expert_map
from moetool.cluster.certificates import Authority
from moetool.cluster.listener import Acceptor
from moetool.cluster.parallel.batch_loop import BatchLoop
from moetool.cluster.parallel.batch_placement import BatchReplacement
from moetool.cluster.parallel.batch_records import BatchRecord
from moetool.cluster.parallel.channel import RankChannel, open_listener
from moetool.cluster.parallel.members import Launcher, Members
from moetool.cluster.parallel.placement_state import PlacementState
from moetool.cluster.parallel.rank_costs import Costs
from moetool.cluster.parallel.rank_options import HeadOptions, RankOptions
from moetool.cluster.parallel.requests import RankRequest
from moetool.placement.decide import Decision
from moetool.runtime.request import SamplingParams, Sink, State, TokenLogprob, Unavailable


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedModel:
    """The model that ranks serve.

    Attributes:
        name: name or path by which ranks locate it.
        tokenizer: for the HTTP server; the head works on token ids.
        content: SHA-256 of each of its files, which must match on every rank (`Checkpoint.content`).
    """

    name: str
    spec: ModelSpec
    tokenizer: Any
    vocab_size: int
    content: Mapping[str, str] = field(default_factory=dict)


class RankHead:
    """An `EngineLike` over ranks in lockstep.

    Requests wait in one queue and join as soon as a seat is free, on the rank that the plan's `Seating` chooses.
    Batching is continuous: a batch is a run of steps between two changes of the set of requests; unfinished requests
    continue in the next batch. While one batch runs, the control may plan a placement for the waiting requests, and
    their experts move.

    When a rank is lost, the others drop the batch and form the next generation at once, reading the lost experts from
    their own disks. Running requests restart, at most three times, with their generated tokens as part of the prompt.
    Seed and request number fix the draws, so the same tokens follow. The lost rank is restarted and rejoins between two
    batches.

    Args:
        model: the model to serve.
        cluster: the ranks' GPUs, with all of their memory.
        placed_GLE: the initial placement, also of every generation with all ranks.
        control: decides on new placements.
        costs: costs for decisions (default: measured only).
        launcher: starts the ranks.
        options: options of batches.

    Attributes:
        loop: batches, generations and the current placement, in the head's own thread.
        launcher: starts the ranks.

    Effects: `start` starts the ranks; `close` ends them.
    """

    def __init__(
        self,
        model: RankedModel,
        cluster: Cluster,
        placed_GLE: np.ndarray,
        control: BatchReplacement,
        launcher: Launcher,
        *,
        rank_options: RankOptions,
        costs: Costs | None = None,
        options: HeadOptions | None = None,
    ) -> None:
        options = options or HeadOptions()
        self.model_name, self.tokenizer, self.vocab_size = model.name, model.tokenizer, model.vocab_size
        self.spec, self.cluster = model.spec, cluster
        self.launcher, self._rank_options, self._host = launcher, rank_options, options.host
        self.loop = BatchLoop(model.spec, cluster, options, model.content)
        self.loop.ranks = Members(
            len(cluster.gpus), launcher, self.loop.post, names=options.names, narrate=options.narrate
        )
        self.loop.placing = PlacementState(
            model.spec,
            cluster,
            control,
            placed_GLE,
            rank_options.migrate,
            costs=costs or Costs(model.spec, cluster),
            patience_s=options.patience_s,
            post=self.loop.post,
        )
        self.loop.placing.narrate = options.narrate
        self._store: Any = None
        self._listener: Acceptor | None = None
        self._thread: threading.Thread | None = None

    @property
    def state(self) -> State:
        """Return `starting`, `ready`, `draining` (while closing) or `failed`."""
        return self.loop.state

    @property
    def problems(self) -> list[str]:
        """Return the cause of a failure, or the missing ranks."""
        return self.loop.problems

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """Return the addresses that the started head listens on: for ranks, and on GPUs for NCCL's groups."""
        store = [] if self._store is None else [(self._host, self._store.port)]
        return [] if self._listener is None else [self._listener.address, *store]

    @property
    def max_context(self) -> int:
        """Return the limit of prompt and new tokens of a request."""
        return self.loop.max_context

    @property
    def max_requests(self) -> int:
        """Return the number of requests in a batch."""
        return self.loop.max_requests

    @property
    def max_unbegun(self) -> int:
        """Return the limit of waiting requests: those of one batch, for which the next placement is planned."""
        return self.max_requests

    @property
    def batches(self) -> list[BatchRecord]:
        """Return the last hundred batches since `use`."""
        return self.loop.records

    @property
    def control(self) -> BatchReplacement:
        """Return the re-placement between batches."""
        return self.loop.placing.control

    @property
    def decisions(self) -> list[Decision]:
        """Return the last thousand decisions since `use`."""
        return self.loop.placing.decisions

    # -- from any thread ---------------------------------------------------------------------------------------

    def start(self, timeout_s: float = 180.0, read_s: float = 3600.0) -> None:
        """Start the ranks; return when they are ready.

        Args:
            timeout_s: time limit for all ranks to register.
            read_s: time limit for reading their experts after that.

        Raises:
            MoetoolError: a rank cannot be built or is late.
        """
        from datetime import timedelta

        import torch.distributed as dist

        authority = Authority.new()
        self._listener = open_listener(self._host, authority.issue("head"), self._hear)
        if self._rank_options.device != "cpu":
            with socket.create_server((self._host, 0)) as sock:  # by itself the store would listen on every interface
                port = sock.getsockname()[1]
                self._store = dist.TCPStore(
                    *(self._host, port, None, True, timedelta(seconds=10)),
                    wait_for_workers=False,
                    master_listen_fd=sock.detach(),
                )
        self._thread = threading.Thread(target=self.loop.run, name="head", daemon=True)
        self._thread.start()
        arguments = [
            {
                "gpu": gpu,
                "model": self.model_name,
                "server_G": list(self.cluster.server_G),
                "head": tuple(self._listener.address),
                "store": None if self._store is None else (self._host, self._store.port),
                "identity": authority.issue(f"rank-{gpu}"),
                "options": self._rank_options,
            }
            for gpu in range(len(self.cluster.gpus))
        ]
        try:
            self.launcher.launch(arguments, lambda gpu: self.loop.post("died", gpu))
            deadline = time.monotonic() + timeout_s
            while self.state == "starting":
                late_s, there = time.monotonic() - deadline, len(self.loop.ranks.there)
                if late_s > 0 and there < len(arguments):
                    raise MoetoolError(f"{there} of {len(arguments)} ranks joined within {timeout_s:g} s")
                if late_s > read_s:
                    raise MoetoolError(f"the ranks did not read their experts within {read_s:g} s")
                time.sleep(0.02)
            if self.state == "failed":
                raise MoetoolError(self.loop.reason)
        except BaseException:
            self.close()
            raise

    def use(self, control: BatchReplacement, placed_GLE: np.ndarray, migrate: str | None = None) -> None:
        """Replace control, placement and migration mode while no request runs; also clears records.

        Raises:
            MoetoolError: the engine has failed or is closed meanwhile.
        """
        over = threading.Event()
        self.loop.post("use", (control, placed_GLE, migrate or self._rank_options.migrate, over))
        while not over.wait(0.1):
            self._require_going()
        self._require_going()

    def wait_idle(self) -> None:
        """Wait until no request runs or waits. Raises: as `use`."""
        while not self.loop.idle:
            self._require_going()
            time.sleep(0.005)

    def check(self, prompt: list[int], params: SamplingParams) -> None:
        """Refuse a request that can never be served. Raises: UsageError, CapacityError."""
        if not prompt:
            raise UsageError("the prompt is empty; send at least one character")
        if why := outside_vocabulary(prompt, self.vocab_size):
            raise UsageError(f"the prompt's {why}")
        if params.grammar is not None:
            raise UsageError("the ranks of --mode ep support no response_format and no forced tool call; omit them")
        if params.return_routes:
            raise UsageError("the ranks of --mode ep return no routed experts; omit return_routed_experts")
        if len(prompt) + params.max_tokens > self.max_context:
            raise CapacityError(
                f"the prompt has {len(prompt):,} tokens and the request asks for {params.max_tokens:,} more, but the "
                f"context holds {self.max_context:,}; shorten the prompt or ask for fewer tokens"
            )

    def submit(self, prompt: list[int], params: SamplingParams, sink: Sink) -> int:
        """Queue a request; its tokens go to `sink`, called in the head's thread. Raises: as `check`; Unavailable."""
        self._require_ready()
        self.check(prompt, params)
        if params.seed is None:  # so that a retry draws the same tokens
            params = replace(params, seed=secrets.randbits(63))
        return self.loop.admit(RankRequest(prompt=list(prompt), params=params, sink=sink))

    def cancel(self, request: int) -> None:
        """Stop a request; its sink gets a last output unless the request has ended already."""
        self.loop.post("cancel", request)

    def prompt_logprobs(self, prompt: list[int], top: int) -> list[TokenLogprob | None]:
        """Return the log-probabilities of a prompt's tokens; waits for its batch. Raises: as `submit`."""
        self._require_ready()
        params = SamplingParams(max_tokens=0)
        self.check(prompt, params)
        answer: Future[list[TokenLogprob | None]] = Future()
        self.loop.admit(RankRequest(prompt=list(prompt), params=params, score=answer, top=top))
        return answer.result()

    def metrics(self) -> dict[str, float]:
        """Return counters and gauges by name."""
        batches = self.loop
        requests, ranks, placing, began = batches.requests, batches.ranks, batches.placing, batches.began
        return {
            "tokens_prompt": requests.prompt,
            "tokens_generated": requests.generated,
            "forwards": batches.forwards,
            "failures": batches.failures,
            "requests_retried": requests.retried,
            "queue_running": len(requests.running),
            "queue_waiting": len(requests.pending),
            "ranks": len(ranks.members),
            "generation": ranks.generation,
            "batches": batches.batch + 1,
            "batch_running_seconds": 0.0 if began is None else time.monotonic() - began,
            "placement_version": placing.version,
            "decisions_late": placing.late,
            "migrated_bytes": batches.moved_bytes,
            "migrated_bytes_during_all_to_all": batches.moved_during_exchange,
        }

    def stats(self) -> dict[str, Any]:
        """Return the metrics with the last batches and decisions, measured costs, memory, and experts by rank."""
        ranks, placing = self.loop.ranks, self.loop.placing
        held_G = placing.placed_GLE.sum(axis=(1, 2))
        counts = zip(placing.placed_GLE, placing.used_GLE, placing.loaded_GLE, strict=True)
        return {
            "placement": self.control.placement,
            "ranks": ranks.members,
            "generation": ranks.generation,
            "experts_held": held_G.tolist(),
            "experts": expert_map(self.spec, [(f"rank {gpu}", *counts_3LE) for gpu, counts_3LE in enumerate(counts)]),
            "memory_bytes": {
                **{part: size * len(ranks.members) for part, size in self.loop.memory_bytes.items()},
                "expert_slots": int(held_G.sum()) * self.spec.slot_bytes,
            },
            "batches": [record.to_json() for record in self.batches[-8:]],
            "control_error": placing.error or None,
            "costs": placing.costs.to_json(),
            "predictors": {one.name: {"token_s": one.token_s} for one in self.control.predictors},
            "decisions": list(placing.history),
            "counters": self.metrics(),
        }

    def close(self) -> None:
        """End the ranks and refuse all waiting requests."""
        if self.state != "failed":
            self.loop.state = "draining"
        self.loop.post("close", None)
        if self._thread is not None:
            self._thread.join(timeout=10.0)
        self.launcher.close()
        if self._listener is not None:
            self._listener.close()
        self._store = None

    def _require_going(self) -> None:
        """Require a running engine. Raises: MoetoolError."""
        if self.state in ("draining", "failed"):
            raise MoetoolError(self.loop.reason or f"the engine is {self.state}")

    def _require_ready(self) -> None:
        if self.state != "ready":
            raise Unavailable(f"the server is {self.state}; try again later")

    # -- one thread per rank ---------------------------------------------------------------------------------

    def _hear(self, channel: RankChannel) -> None:
        gpu = channel.gpu
        try:
            hello, _ = channel.receive()
            self.loop.post("hello", (gpu, channel, hello))
            while True:
                message, _ = channel.receive()
                self.loop.post("message", (gpu, channel, message))
        finally:
            self.loop.post("gone", (gpu, channel))
