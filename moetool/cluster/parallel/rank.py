"""One rank: a model whose experts lie on all ranks, its own share of each batch, step by step with the others."""

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from moetool.cluster.parallel.channel import Closed, connect
from moetool.cluster.parallel.dispatch import ParallelRuntime, tally_to_json
from moetool.cluster.parallel.group import Group, GroupBroken
from moetool.cluster.parallel.migration import MIGRATIONS, Migration
from moetool.cluster.parallel.routing import placed_of
from moetool.cluster.parallel.shelf import Shelf
from moetool.cluster.parallel.stages import Stage
from moetool.cluster.parallel.windows import Link, Windows
from moetool.cluster.transport import own_address
from moetool.errors import MoetoolError, UsageError, first_line, unknown_name
from moetool.models.decoding import Batch
from moetool.models.loading import load_lazy, parse_device, parse_dtype, use_threads
from moetool.models.sampling import NOT_NUMBERS
from moetool.models.sequential import open_batcher
from moetool.models.spec import locate
from moetool.policy import MIN_SLOTS, build_policy
from moetool.request import Output, SamplingParams
from moetool.residency import Residency
from moetool.serving.store import open_store

_FOREVER = float("inf")
_POLL_S = 0.002
_ALIVE_S = 5.0
"""While it reads experts a rank says so often that it is alive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOptions:
    """How each rank runs.

    Attributes:
        device: `cpu` or `cuda`. With `cuda` rows travel over NCCL, and each rank needs a GPU of its own.
        dtype: of everything but the experts, which stay as the checkpoint has them.
        kv_tokens: tokens that a rank's KV cache holds; the longest context of one request.
        seats: requests of a batch on each rank.
        threads: of a rank's own arithmetic (0 chooses).
        timeout_s: a collective that takes longer has failed: longer than the slowest rank's forward may take, and as
            long as a rank that hangs goes unnoticed. One that has ended is noticed at once.
        migrate: `overlap`, `pipelined` or `stop` (`moetool.cluster.parallel.migration`, DIRECTOR's Figure 6).
        link_bytes_s: emulates each rank's way out: what it sends queues at this rate (0: not emulated).
        expert_token_s: emulates the experts' computing: so many seconds a row, waited and not computed (0: not).
    """

    device: str = "cpu"
    dtype: str = "float32"
    kv_tokens: int = 4096
    seats: int = 4
    threads: int = 0
    timeout_s: float = 5.0
    migrate: str = "overlap"
    link_bytes_s: float = 0.0
    expert_token_s: float = 0.0

    def __post_init__(self) -> None:
        if self.migrate not in MIGRATIONS:
            raise unknown_name("--set migrate", self.migrate, MIGRATIONS)
        if min(self.seats, self.kv_tokens // 16) < 1 or not self.timeout_s > 0 or self.threads < 0:
            raise UsageError("seats and timeout_s are above 0, kv_tokens at least 16 and threads at least 0")
        if min(self.link_bytes_s, self.expert_token_s) < 0:
            raise UsageError("link_bytes_s and expert_token_s are 0 or more")


def build_rank(
    *,
    gpu: int,
    model: str,
    server_G: Sequence[int],
    head: tuple[str, int],
    store: tuple[str, int],
    token: str,
    options: dict[str, Any],
) -> "Rank":
    """What a worker of `moetool.cluster.launch.Workers` is; all arguments as plain values."""
    known = bytes.fromhex(token)
    return Rank(gpu, model, server_G, head=head, store=store, token=known, options=RankOptions(**options))


class Rank:
    """Loads its model, says hello to the head, and does what that asks until it says stop or is gone.

    Two threads: one hears the head, one forwards. A batch is static: its requests begin together, and the next one
    begins when all of them, on all ranks, have ended. Each step begins with an agreement: who has work, and up to
    which version everybody's experts have arrived, so that all switch to a placement in the same step.

    Args:
        gpu: its number in the cluster.
        server_G: the server of each GPU.
        head: where the head listens.
        store: where the head's store of process groups is.
        token: of the cluster.

    Raises:
        UsageError, MismatchError: as `load_lazy`.
        Closed: the head cannot be reached.
    """

    def __init__(
        self,
        gpu: int,
        model: str,
        server_G: Sequence[int],
        *,
        head: tuple[str, int],
        store: tuple[str, int],
        token: bytes,
        options: RankOptions,
    ) -> None:
        self.gpu, self._options = gpu, options
        self._host = own_address(head[0])  # the way to the head is taken to be the way to the other ranks
        loaded = load_lazy(locate(model), parse_dtype(options.dtype), _device(options.device, gpu, server_G))
        assert loaded.files is not None
        use_threads(loaded.model.config.get_text_config(), options.threads)
        self.spec, self._loaded = loaded.spec, loaded
        self._shelf = Shelf(loaded.files, loaded.device)
        self._windows = Windows(strict=options.migrate != "pipelined")
        link = Link(options.link_bytes_s)
        # The base class wants a pool; experts here lie on the shelf, so it is the smallest there is.
        residency = Residency(build_policy("lru", loaded.spec, {}, MIN_SLOTS))
        self.runtime = ParallelRuntime(
            loaded,
            residency,
            open_store(loaded, residency, 1),
            self._shelf,
            gpu=gpu,
            server_G=server_G,
            windows=self._windows,
            link=link,
            expert_token_s=options.expert_token_s,
        )
        self._batcher = open_batcher(loaded.model, max_requests=options.seats, kv_tokens=options.kv_tokens)
        self._batcher.on_forward = self._on_forward
        self._migration = Migration(
            loaded.spec, self._shelf, gpu, host=self._host, token=token, windows=self._windows, link=link
        )
        self._store = dist.TCPStore(store[0], store[1], None, False, timedelta(seconds=10))
        self._inbox: queue.Queue[dict[str, Any]] = queue.Queue()
        self._cancelled: deque[int] = deque()
        self._scores: deque[tuple[int, list[int], int]] = deque()
        self._ids: set[int] = set()
        self._stages: deque[Stage] = deque()
        self._generation = self._version = 0
        self._members: list[int] = []
        self._placed_GLE = np.zeros((0, 0, 0), bool)
        self._moved = asdict(self._migration.moved)  # when the last batch ended
        self._head = connect(head, token)
        self._head.send(
            {
                "kind": "hello",
                "gpu": gpu,
                "migration": self._migration.address,
                "max_context": self._batcher.max_context,
                "seats": self._batcher.max_requests,
                "revision": loaded.spec.revision,
            }
        )
        self._threads = [
            threading.Thread(target=run, name=f"rank-{gpu}-{run.__name__.strip('_')}", daemon=True)
            for run in (self._hear, self._run)
        ]
        for thread in self._threads:
            thread.start()

    def ready(self) -> bool:
        """For `Workers.call`: answers once the rank is built, or not at all."""
        return True

    def close(self) -> None:
        """End the threads and give up the memory."""
        self._head.close()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=10.0)

    # -- the thread that hears the head ------------------------------------------------------------------------

    def _hear(self) -> None:
        try:
            with contextlib.suppress(MoetoolError):
                while self._heed(self._head.receive()[0]):
                    pass
        finally:  # whatever it was: a rank that does not hear does not go on
            self._abort()
            self._inbox.put({"kind": "stop"})

    def _heed(self, message: dict[str, Any]) -> bool:
        """Take in what the head says; whether more is to be heard."""
        match message["kind"]:
            case "cancel":
                self._cancelled.append(message["request"])
            case "migrate":
                if message["generation"] == self._generation:
                    for stage in map(Stage.from_json, message["stages"]):
                        self._stages.append(stage)
                        self._migration.ask(stage)
            case kind:
                if kind in ("form", "stop"):
                    self._abort()
                if kind == "form":
                    self._say({"kind": "alive", "generation": message["generation"]})
                self._inbox.put(message)
                return bool(kind != "stop")
        return True

    def _abort(self) -> None:
        if (group := self.runtime.group) is not None:
            group.abort()

    # -- the thread that forwards ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while (message := self._inbox.get())["kind"] != "stop":
                try:
                    if message["kind"] == "form":
                        self._hold(message)
                    elif message["kind"] == "join" and message["generation"] == self._generation:
                        self._join()
                    elif message["kind"] == "batch" and message["generation"] == self._generation:
                        self._batch(message)
                except GroupBroken as error:
                    self._say({"kind": "broken", "generation": self._generation, "reason": first_line(error)})
        except Closed:
            pass
        finally:
            self._abort()
            self._migration.close()
            self.runtime.close()
            self._batcher.close()
            self._head.close()
            self._shelf.close()

    def _hold(self, message: dict[str, Any]) -> None:
        """Get ready for a generation: what ran is dropped, what is to be held is held."""
        self._forget()
        self._generation, self._version = message["generation"], message["version"]
        self._members = message["members"]
        self._placed_GLE = placed_of(message["holders"], len(message["peers"]))
        wanted = {self.spec.expert_key(*map(int, place)) for place in np.argwhere(self._placed_GLE[self.gpu])}
        self._stages.clear()
        self._windows.strict = message["migrate"] != "pipelined"
        self._migration.begin(self._version, [tuple(peer) if peer else None for peer in message["peers"]])
        for key in self._shelf.keys - wanted:
            self._shelf.drop(key)
        self._shelf.most = 0
        said = time.monotonic()
        for key in sorted(wanted):
            self._shelf.load(key)
            if time.monotonic() - said > _ALIVE_S:
                said = time.monotonic()
                self._say({"kind": "alive", "generation": self._generation})
        self._windows.open(_FOREVER)
        self._say({"kind": "holds", "generation": self._generation})

    def _join(self) -> None:
        """Everybody is ready: meet the others."""
        group = Group(
            self._store,
            self._generation,
            self._members.index(self.gpu),
            len(self._members),
            device=self._loaded.device,
            timeout_s=self._options.timeout_s,
            host=self._host,
        )
        self.runtime.join(group, self._members, self._placed_GLE)
        self._say({"kind": "formed", "generation": self._generation})

    def _batch(self, message: dict[str, Any]) -> None:
        """Serve one batch together with the others."""
        began = time.perf_counter()
        self.runtime.count_anew()
        waited_s = self._windows.waited_s
        for one in message["requests"]:
            if "top" in one:
                self._scores.append((one["id"], one["prompt"], one["top"]))
            else:
                self._batcher.add(one["id"], one["prompt"], SamplingParams(**one["params"]), one["drawn"])
            self._ids.add(one["id"])
        ready_s = self._reach(message["version"])
        while True:
            self._cancel()
            work = bool(self._scores) or not self._batcher.idle
            said = self._agree(work)
            self._switch(min(arrived for _, arrived in said), False)
            if not any(busy for busy, _ in said):
                break
            self.runtime.begin_step()
            outputs = self._forward() if work else []
            self._require_whole()
            self.runtime.end_step()
            if outputs:
                self._tell(outputs)
        self._windows.open(_FOREVER)
        moved, self._moved = self._moved, asdict(self._migration.moved)
        self._say(
            {
                "kind": "done",
                "generation": self._generation,
                "batch": message["batch"],
                "seconds": time.perf_counter() - began,
                "ready_s": ready_s,
                "waited_s": self._windows.waited_s - waited_s,
                "held": self._shelf.most,
                "version": self._version,
                "tally": tally_to_json(self.runtime.tally),
                "moved": {name: value - moved[name] for name, value in self._moved.items()},
            }
        )

    def _reach(self, version: int) -> float:
        """Wait until the placement that the batch is to begin with is in force everywhere; how long that took."""
        began = time.perf_counter()
        self._windows.open(_FOREVER)
        while self._version < version:
            if self._migration.arrived < version:
                self._migration.wait(self._version + 1, _POLL_S)
            arrived = min(arrived for _, arrived in self._agree(False))
            self._switch(min(arrived, version), True)
        return time.perf_counter() - began

    def _agree(self, work: bool) -> list[list[int]]:
        assert self.runtime.group is not None
        self._migration.require_well()
        return self.runtime.group.gather([work, self._migration.arrived])

    def _switch(self, arrived: int, begins: bool) -> None:
        """Switch to stages that have arrived everywhere.

        Args:
            begins: whether a batch begins.
        """
        while self._stages and self._stages[0].version <= arrived and (begins or not self._stages[0].at_batch):
            stage = self._stages.popleft()
            placed_GLE = self.runtime.placed_GLE.copy()
            stage.apply(placed_GLE)
            self.runtime.place(placed_GLE)
            for layer, expert, holders in stage.changes:
                if self.gpu not in holders:
                    self._shelf.drop(self.spec.expert_key(layer, expert))
            self._version = stage.version
            self._migration.switched(stage.version)

    def _forward(self) -> list[dict[str, Any]]:
        if not self._scores:
            return [_message(output) for output in self._end(self._batcher.step())]
        request, prompt, top = self._scores.popleft()
        self._ids.discard(request)
        try:
            logits_TV = self._batcher.score(request, prompt)
        except GroupBroken:
            raise
        except Exception as error:
            return [{"request": request, "error": first_line(error)}]
        finally:
            self.runtime.end_forward()
        logprobs_TV = logits_TV.log_softmax(-1)
        if logprobs_TV[: len(prompt) - 1].isnan().any():
            return [{"request": request, "error": NOT_NUMBERS}]
        values, ids = logprobs_TV.topk(top) if top else (logprobs_TV[:, :0], logprobs_TV[:, :0].long())
        scored = [
            [float(logprobs_TV[t, token]), list(zip(ids[t].tolist(), values[t].tolist(), strict=True))]
            for t, token in enumerate(prompt[1:])
        ]
        return [{"request": request, "scored": scored}]

    def _end(self, outputs: list[Output]) -> list[Output]:
        self.runtime.end_forward()
        self._ids -= {output.request for output in outputs if output.finish is not None}
        return outputs

    def _require_whole(self) -> None:
        """The batcher takes any error in a forward for one of its requests; that of a lost rank is not."""
        group = self.runtime.group
        if group is not None and group.broken is not None:
            raise GroupBroken(first_line(group.broken))

    def _cancel(self) -> None:
        while self._cancelled:
            request = self._cancelled.popleft()
            if request in self._ids:
                self._ids.discard(request)
                self._batcher.cancel(request)
                self._scores = deque(score for score in self._scores if score[0] != request)
                self._tell([{"request": request, "token": None, "finish": "cancelled"}])

    def _forget(self) -> None:
        for request in self._ids:
            self._batcher.cancel(request)
        self._ids.clear()
        self._scores.clear()
        self._cancelled.clear()
        self.runtime.end_forward()

    def _on_forward(self, batch: Batch) -> None:
        self.runtime.begin_forward(batch.info)

    def _tell(self, outputs: list[dict[str, Any]]) -> None:
        self._say({"kind": "tokens", "generation": self._generation, "outputs": outputs})

    def _say(self, message: dict[str, Any]) -> None:
        self._head.send(message)


def _device(name: str, gpu: int, server_G: Sequence[int]) -> torch.device:
    """The GPU of this machine that is the rank's own, or the CPU. Raises: UsageError."""
    if parse_device(name).type == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", list(server_G[:gpu]).count(server_G[gpu]) % torch.cuda.device_count())


def _message(output: Output) -> dict[str, Any]:
    said: dict[str, Any] = {"request": output.request, "token": output.token, "finish": output.finish}
    if output.logprob is not None:
        said["logprob"] = [output.logprob.logprob, [list(pair) for pair in output.logprob.top]]
    if output.error is not None:
        said["error"] = output.error
    return said
