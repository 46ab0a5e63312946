"""One expert-parallel rank: its model, its share of the experts, and its connection to the head."""

import contextlib
import logging
import queue
import threading
import time
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from moetool.base.errors import MoetoolError, first_line
from moetool.cluster.certificates import Identity
from moetool.cluster.frames import LinkError
from moetool.cluster.links import Bucket
from moetool.cluster.parallel.channel import connect
from moetool.cluster.parallel.compute_windows import Windows
from moetool.cluster.parallel.dispatch import RankExperts
from moetool.cluster.parallel.expert_buffers import ExpertBuffers
from moetool.cluster.parallel.expert_transfer import ExpertTransfer
from moetool.cluster.parallel.lockstep import FOREVER, Lockstep
from moetool.cluster.parallel.process_group import Group, GroupBroken
from moetool.cluster.parallel.rank_mesh import Arrivals, Mesh
from moetool.cluster.parallel.rank_options import RankOptions
from moetool.cluster.parallel.staged_migration import MigrationStage
from moetool.cluster.transport import own_address
from moetool.models.checkpoint import Checkpoint
from moetool.models.loading import load_lazy, parse_device, parse_dtype, use_threads
from moetool.placement.replica_routing import placed_of
from moetool.runtime.decoding import Batch
from moetool.runtime.loop.own_caches import open_batcher

_LOG = logging.getLogger(__name__)

USED_AT_START = (
    "transformers.models.auto.modeling_auto",
    "transformers.modeling_utils",
    "accelerate",
    "scipy.optimize",
)
"""Modules imported to build a rank (`ForkServer`)."""
_ALIVE_S = 5.0
"""Seconds between keep-alive messages of a rank that reads experts."""
_MESSAGE_BYTES = 2**20
"""Largest message between ranks besides rows."""


class Rank:
    """Loads its model, registers with the head, and follows the head's orders until told to stop or the head is gone.

    Two threads: one receives orders, one runs forwards (`Lockstep`). With micro-batches a third exchanges rows.

    Args:
        gpu: the rank's number in the cluster.
        server_G: the server of each GPU.
        head: address of the head.
        store: address of the head's store, in which ranks on GPUs meet for NCCL; None on CPUs.
        identity: the rank's key and certificate.

    Attributes:
        loaded: the model.
        buffers: the experts held here.
        windows: the compute phases in which experts may move.
        transfer: exchanges experts with other ranks.

    Raises:
        UsageError, MismatchError: as `load_lazy`.
        LinkError: the head cannot be reached.
    """

    def __init__(
        self,
        gpu: int,
        model: str,
        server_G: list[int],
        *,
        head: tuple[str, int],
        store: tuple[str, int] | None,
        identity: Identity,
        options: RankOptions,
    ) -> None:
        self.gpu, self._options = gpu, options
        self._host = own_address(head[0])  # assumes that the other ranks are reached over the same interface
        self._inbox: queue.Queue[dict[str, Any]] = queue.Queue()
        self._generation = 0
        self._members: list[int] = []
        self._peers: dict[int, tuple[str, int]] = {}
        self._identity = identity
        self._placed_GLE = np.zeros((0, 0, 0), bool)
        with contextlib.ExitStack() as stack:
            on_one_machine = head[0] == "127.0.0.1"
            device = parse_device(options.device, gpu if on_one_machine else server_G[:gpu].count(server_G[gpu]))
            self.loaded = loaded = load_lazy(Checkpoint.open(model), parse_dtype(options.dtype), device)
            stack.callback(loaded.close)
            assert loaded.files is not None
            use_threads(loaded.model.config.get_text_config(), options.threads)
            self.spec = loaded.spec
            self.buffers = ExpertBuffers(loaded.files, loaded.device)
            stack.callback(self.buffers.close)
            self.windows = Windows(strict=options.migrate != "pipelined")
            link = Bucket(options.link_bytes_s or float("inf"))
            self._in_halves = options.in_halves(on_one_machine)
            self.experts = RankExperts(
                loaded, self.buffers, gpu=gpu, server_G=server_G, windows=self.windows, link=link
            )
            self._batcher = open_batcher(
                loaded.model,
                max_requests=options.seats,
                kv_tokens=options.kv_tokens,
                max_prompt_wait_s=options.max_prompt_wait_s,
            )
            stack.callback(self._batcher.close)
            self._batcher.on_forward = self._on_forward
            self._arrivals = Arrivals()
            self.transfer = ExpertTransfer(
                loaded.spec,
                self.buffers,
                gpu,
                host=self._host,
                identity=identity,
                windows=self.windows,
                link=link,
                on_join=self._arrivals.keep,
            )
            stack.callback(self.transfer.close)
            stack.callback(self._arrivals.close)
            self._store: Any = None
            if store is not None:
                self._store = dist.TCPStore(store[0], store[1], None, False, timedelta(seconds=10))
            self._lockstep = Lockstep(
                loaded.spec, gpu, self.experts, self._batcher, self.transfer, self.windows, self._say
            )
            self._head = connect(head, identity, "head")
            stack.callback(self._head.close)
            self._head.send(
                {
                    "kind": "hello",
                    "migration": self.transfer.address,
                    "max_context": self._batcher.max_context,
                    "seats": self._batcher.max_requests,
                    "revision": loaded.spec.revision,
                    "content": loaded.checkpoint.content,
                    "memory_bytes": {
                        "dense": sum(tensor.nbytes for tensor in loaded.model.parameters() if not tensor.is_meta),
                        "kv_cache": self._batcher.kv_bytes,
                    },
                }
            )
            self._opened = stack.pop_all()
        self._threads = [
            threading.Thread(target=run, name=f"rank-{gpu}-{run.__name__.strip('_')}", daemon=True)
            for run in (self._hear, self._run)
        ]
        for thread in self._threads:
            thread.start()

    def ready(self) -> bool:
        """Wait until the rank is built, for `Workers.call`."""
        return True

    def drain(self) -> None:
        """Ask the head to finish this rank's requests and to form a generation without it."""
        with contextlib.suppress(LinkError):  # a rank without a head ends
            self._say({"kind": "leaving"})

    def close(self) -> None:
        """End the threads and free the memory."""
        self._head.close()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=10.0)

    # -- receiving thread ------------------------------------------------------------------------------------

    def _hear(self) -> None:
        try:
            with contextlib.suppress(MoetoolError):
                while self._heed(self._head.receive()[0]):
                    pass
        finally:  # after any failure: a rank without its receiver must stop
            self._abort()
            self._inbox.put({"kind": "stop"})

    def _heed(self, message: dict[str, Any]) -> bool:
        """Handle a message of the head; return whether to go on."""
        match message["kind"]:
            case "cancel":
                self._lockstep.cancel(message["request"])
            case "requests":
                if message["generation"] == self._generation:
                    self._lockstep.join(message["requests"])
            case "end":
                if message["generation"] == self._generation:
                    self._lockstep.end(message["batch"])
            case "migrate":
                if message["generation"] == self._generation:
                    self._lockstep.follow([MigrationStage.from_json(stage) for stage in message["stages"]])
            case kind:
                if kind in ("form", "stop"):
                    self._abort()
                if kind == "form":
                    self._say({"kind": "alive", "generation": message["generation"]})
                self._inbox.put(message)
                return bool(kind != "stop")
        return True

    def _abort(self) -> None:
        if (group := self.experts.group) is not None:
            group.abort()

    # -- forward thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        torch.get_num_threads()  # otherwise this thread may compute the first rows of others with all cores
        try:
            while (message := self._inbox.get())["kind"] != "stop":
                try:
                    if message["kind"] == "form":
                        self._hold(message)
                    elif message["kind"] == "join" and message["generation"] == self._generation:
                        self._join()
                    elif message["kind"] == "batch" and message["generation"] == self._generation:
                        self._lockstep.serve(message)
                except GroupBroken as error:
                    _LOG.info("GPU %d: %s", self.gpu, error)
                    self._say({"kind": "broken", "reason": first_line(error)})
        except LinkError as error:
            _LOG.info("GPU %d lost the head: %s", self.gpu, error)
        finally:
            self._abort()
            self._opened.close()

    def _hold(self, message: dict[str, Any]) -> None:
        """Prepare a generation: drop running requests, load the planned experts."""
        self._lockstep.begin_anew(message["version"])
        self._generation, self._members = message["generation"], message["members"]
        self._placed_GLE = placed_of(message["holders"], len(message["peers"]))
        wanted = {self.spec.expert_key(*map(int, place)) for place in np.argwhere(self._placed_GLE[self.gpu])}
        self.windows.strict = message["migrate"] != "pipelined"
        self._peers = {gpu: tuple(peer) for gpu, peer in enumerate(message["peers"]) if peer}
        self.transfer.begin(message["version"], [self._peers.get(gpu) for gpu in range(len(message["peers"]))])
        for key in self.buffers.keys - wanted:
            self.buffers.drop(key)
        self.buffers.most = 0
        said = time.monotonic()
        for key in sorted(wanted):
            self.buffers.load(key)
            if time.monotonic() - said > _ALIVE_S:
                said = time.monotonic()
                self._say({"kind": "alive"})
        self.windows.open(FOREVER)
        _LOG.info("GPU %d holds %d experts for generation %d", self.gpu, len(wanted), self._generation)
        self._say({"kind": "holds"})

    def _join(self) -> None:
        """Join the process group of the generation."""
        rows_bytes = self._options.kv_tokens * max(self.spec.top_k_L) * self.spec.hidden_size * 4  # float32, the widest
        try:
            mesh = Mesh(
                self._generation,
                self._members.index(self.gpu),
                [(gpu, self._peers[gpu]) for gpu in self._members],
                identity=self._identity,
                arrivals=self._arrivals,
                timeout_s=self._options.timeout_s,
                limit_bytes=rows_bytes + _MESSAGE_BYTES,
            )
        except LinkError as error:
            raise GroupBroken(f"generation {self._generation} lost a rank ({first_line(error)})") from None
        group = Group(mesh, store=self._store, device=self.loaded.device)
        self.experts.join(group, self._members, self._placed_GLE, self._in_halves)
        self._say({"kind": "formed"})

    def _on_forward(self, batch: Batch) -> None:
        self.experts.begin_forward(batch.info)

    def _say(self, message: dict[str, Any]) -> None:
        self._head.send({"generation": self._generation, **message})
