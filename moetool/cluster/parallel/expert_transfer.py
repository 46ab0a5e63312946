"""Transfers of experts between ranks: the receiver pulls them piece by piece, in compute phases only."""

import logging
import queue
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from moetool.base.errors import MoetoolError, first_line
from moetool.base.types import ModelSpec
from moetool.cluster.certificates import Identity
from moetool.cluster.frames import FrameConnection, LinkError
from moetool.cluster.links import Bucket
from moetool.cluster.parallel.channel import RankChannel, connect, open_listener
from moetool.cluster.parallel.compute_windows import Windows
from moetool.cluster.parallel.expert_buffers import ExpertBuffers
from moetool.cluster.parallel.staged_migration import MigrationStage

_LOG = logging.getLogger(__name__)

_LEAST_BYTES, _MOST_BYTES = 16 * 1024, 1 << 20  # of a piece
_AGAIN_S = 0.0005  # before a source whose compute phase is over is asked again
_ANSWER_S = 5.0


@dataclass(slots=True, kw_only=True)
class TransferReport:
    """Experts copied to a rank.

    Attributes:
        experts: completed copies.
        bytes: bytes of these copies.
        during_exchange: part of these sent while either end was in an all-to-all.
        from_disk: experts read from the checkpoint because their source had ended.
        seconds: transfer time of the pieces.
    """

    experts: int = 0
    bytes: int = 0
    during_exchange: int = 0
    from_disk: int = 0
    seconds: float = 0.0


class ExpertTransfer:
    """Pulls a stage's experts to this rank, and serves experts to others.

    A piece is sent only while the compute phases of both ends are open (`Windows`). It is as large as fits in the
    predicted rest of the phase at the measured rate. The receiver holds its own phase open; the source answers at once
    with the piece, or that its phase is over. Both ends report whether an all-to-all ran or began meanwhile, to count
    those bytes.

    Args:
        gpu: this rank's number.
        host: address to listen on.
        link: delays what the rank sends.
        on_join: called with the connection, generation and GPU of a rank that joins a generation (`Arrivals.keep`).

    Attributes:
        address: address for requests of other ranks.
        arrived: version of the newest stage whose experts are all here.
        moved: transfers so far.

    Effects: starts a thread that pulls, and one for each rank that requests; `close` ends them.
    """

    def __init__(
        self,
        spec: ModelSpec,
        buffers: ExpertBuffers,
        gpu: int,
        *,
        host: str,
        identity: Identity,
        windows: Windows,
        link: Bucket,
        on_join: Callable[[FrameConnection, int, int], None],
    ) -> None:
        self._spec, self._buffers, self._gpu, self._identity = spec, buffers, gpu, identity
        self._windows, self._link, self._on_join = windows, link, on_join
        self._peers: list[tuple[str, int] | None] = []
        self._channels: dict[int, RankChannel] = {}
        self._stages: queue.Queue[tuple[int, MigrationStage] | None] = queue.Queue()  # with the epoch of the request
        self._failure: Exception | None = None
        self._epoch = 0
        self._rate = 50e6
        self._state = threading.Condition()
        self._in_force = 0
        self.arrived = 0
        self.moved = TransferReport()
        self._closed = False
        self._listener = open_listener(host, identity, self._serve)
        self.address = self._listener.address
        self._thread = threading.Thread(target=self._run, name=f"migration-{gpu}", daemon=True)
        self._thread.start()

    def begin(self, version: int, peers: Sequence[tuple[str, int] | None]) -> None:
        """Begin a generation with a placement of this version; running transfers are dropped."""
        with self._state:
            self._epoch += 1
            self._in_force = self.arrived = version
            self._peers = list(peers)
            while not self._stages.empty():
                self._stages.get_nowait()
            self._state.notify_all()
        self._hang_up()

    def ask(self, stage: MigrationStage) -> None:
        """Fetch this rank's share of a stage."""
        self._stages.put((self._epoch, stage))

    def require_well(self) -> None:
        """Require that experts can still be received. Raises: MoetoolError."""
        if self._failure is not None:
            raise MoetoolError(f"GPU {self._gpu} could not receive an expert ({first_line(self._failure)})")

    def switched(self, version: int) -> None:
        """Note that this version is in use, so that freed room may be used."""
        with self._state:
            self._in_force = version
            self._state.notify_all()

    def wait(self, version: int, timeout_s: float) -> bool:
        """Wait until the experts of a stage have arrived."""
        with self._state:
            return self._state.wait_for(lambda: self.arrived >= version or self._closed, timeout_s)

    def close(self) -> None:
        """End the threads."""
        with self._state:
            self._closed = True
            self._epoch += 1
            self._state.notify_all()
        self._stages.put(None)
        self._hang_up()
        self._listener.close()
        self._thread.join(timeout=10.0)

    def _run(self) -> None:
        try:
            self._fetch_stages()
        except Exception as error:  # such as a disk error; `require_well` raises it in the rank's own thread
            _LOG.warning("GPU %d stopped receiving experts: %s", self._gpu, error)
            self._failure = error

    def _fetch_stages(self) -> None:
        while not self._closed:
            asked = self._stages.get()
            if asked is None:
                return
            epoch, stage = asked
            with self._state:  # the previous stage's room is free once that stage is in use
                self._state.wait_for(lambda: self._in_force >= stage.version - 1 or self._epoch != epoch)  # noqa: B023
            for layer, expert, gpu, source in stage.copies:
                if gpu == self._gpu and self._epoch == epoch:
                    self._fetch(self._spec.expert_key(layer, expert), source, epoch)
            with self._state:
                if self._epoch == epoch:
                    _LOG.debug("GPU %d has the experts of placement %d", self._gpu, stage.version)
                    self.arrived = stage.version
                    self._state.notify_all()

    def _fetch(self, key: int, source: int, epoch: int) -> None:
        if key in self._buffers:
            return
        buffer = self._buffers.allocate()
        try:
            size = self._pull(key, source, buffer, epoch)
        except LinkError as error:
            _LOG.info("GPU %d cannot send expert %d: %s", source, key, error)
            if (channel := self._channels.pop(source, None)) is not None:
                channel.close()
            size = None
        if self._epoch != epoch:
            self._buffers.give_back(buffer)
            return
        if size is None:
            self._buffers.files.read_into(key, buffer)
            self.moved.from_disk += 1
        self._buffers.put(key, buffer)
        self.moved.experts += 1

    def _pull(self, key: int, source: int, buffer: torch.Tensor, epoch: int) -> int | None:
        """Pull an expert's bytes from another rank; None if that rank does not hold it."""
        view = memoryview(buffer.numpy().data)
        channel = self._channel(source)
        done = 0
        while done < len(view):
            if self._epoch != epoch:
                return None
            left_s = self._windows.hold(timeout_s=0.2)
            if left_s is None:
                continue
            exchanges, began = self._windows.exchanges, time.perf_counter()
            inside = self._windows.exchanging
            try:
                fits = _MOST_BYTES if left_s == float("inf") else int(left_s * self._rate)
                num = min(len(view) - done, max(_LEAST_BYTES, min(fits, _MOST_BYTES)))
                channel.send({"key": key, "offset": done, "bytes": num})
                answer, _ = channel.receive(view[done : done + num], _ANSWER_S)
                inside = inside or answer.get("inside", False) or self._windows.exchanges != exchanges
            finally:
                self._windows.release()
            if answer.get("state") == "later":
                time.sleep(_AGAIN_S)
                continue
            if answer.get("state") != "here" or zlib.crc32(view[done : done + num]) != answer.get("crc"):
                return None
            taken_s = time.perf_counter() - began
            self._rate += 0.3 * (num / max(taken_s, 1e-6) - self._rate)
            self.moved.seconds += taken_s
            self.moved.bytes += num
            self.moved.during_exchange += num * inside
            done += num
        return done

    def _serve(self, channel: RankChannel) -> None:
        """Serve one rank until it disconnects."""
        while True:
            match channel.receive()[0]:
                case {"generation": int(generation)}:
                    self._on_join(channel.connection, generation, channel.gpu)
                    return
                case {"key": int(key), "offset": int(offset), "bytes": int(num_bytes)}:
                    pass
                case asked:
                    raise LinkError(
                        f"rank {channel.gpu} sent neither a join nor a request for an expert: {str(asked)[:200]}"
                    )
            if not self._windows.try_hold():
                channel.send({"state": "later"})
                continue
            try:
                exchanges, inside = self._windows.exchanges, self._windows.exchanging
                piece = self._buffers.read(key, offset, num_bytes)
                if piece is None:
                    channel.send({"state": "gone"})
                    continue
                self._link.take(len(piece[0]))
                inside = inside or self._windows.exchanges != exchanges
                channel.send({"state": "here", "crc": piece[1], "inside": inside}, piece[0])
            finally:
                self._windows.release()

    def _channel(self, source: int) -> RankChannel:
        if source not in self._channels:
            address = self._peers[source] if source < len(self._peers) else None
            if address is None:
                raise LinkError(f"GPU {source} is not connected")
            self._channels[source] = connect(address, self._identity, f"rank-{source}")
        return self._channels[source]

    def _hang_up(self) -> None:
        for channel in list(self._channels.values()):
            channel.close()
        self._channels = {}
