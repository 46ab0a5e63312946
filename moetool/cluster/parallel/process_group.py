"""The collectives of one generation of ranks; a lost rank ends it, and the next generation gets a new group."""

import struct
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from moetool.base.errors import MoetoolError, first_line
from moetool.cluster.frames import LinkError
from moetool.cluster.parallel.rank_mesh import Mesh, Parts

_COUNT = np.dtype("<i4")
"""Counts of rows, as they travel."""


class GroupBroken(MoetoolError):
    """A collective failed: a rank has ended, or the group was aborted. The group cannot be reused."""


class Group:
    """Collectives of the ranks of a generation.

    Control messages, and the rows of ranks on CPUs, travel over a `Mesh`; rows of GPUs over NCCL, created directly
    rather than as torch's default group. NCCL neither authenticates nor encrypts: run such ranks in a trusted network.

    Args:
        mesh: connections to the other ranks; `abort` closes them.
        store: key-value store in which NCCL's ranks meet, shared by all generations; on a GPU only.
        device: device of the rows (default: CPU).

    Attributes:
        device: device for tensors of `exchange`.
        timeout_s: time limit of a collective in seconds.
        broken: the error that ended the group, or None.

    Raises:
        GroupBroken: NCCL did not connect.
    """

    def __init__(self, mesh: Mesh, *, store: Any = None, device: torch.device | None = None) -> None:
        self.rank, self.size, self.timeout_s = mesh.rank, mesh.size, mesh.timeout_s
        self.device = device or torch.device("cpu")
        self.broken: BaseException | None = None
        self._lock = threading.Lock()
        self._mesh = mesh
        self._options = dist.AllToAllOptions()
        self._beside = ThreadPoolExecutor(1, "exchange")  # starts its thread with the first exchange
        self._nccl: Any = None
        if self.device.type == "cuda":
            try:
                torch.cuda.set_device(self.device)
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = timedelta(seconds=self.timeout_s)
                options.is_high_priority_stream = True  # rows go before copies of experts
                mine = dist.PrefixStore(f"generation-{mesh.generation}", store)
                self._nccl = dist.ProcessGroupNCCL(mine, mesh.rank, mesh.size, options)
            except RuntimeError as error:
                mesh.close()
                raise self._failed(error) from None

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """Gather a few integers from each rank; returns them by rank. Raises: GroupBroken."""
        form = struct.Struct(f"<{len(numbers)}q")
        received = self._swap([[form.pack(*numbers)]] * self.size, form.size)
        return [list(form.unpack(part)) for (part,) in received]

    def counts(self, counts_RE: np.ndarray) -> np.ndarray:
        """Send row r to rank r; return one row from each rank. Raises: GroupBroken."""
        received = self._swap([[_bytes(row_E)] for row_E in counts_RE], counts_RE.shape[1] * _COUNT.itemsize)
        return np.stack([_numbers(part) for (part,) in received])

    def exchange(self, rows_XD: torch.Tensor, send_R: list[int], receive_R: list[int]) -> torch.Tensor:
        """All-to-all of rows.

        Args:
            rows_XD: rows to send, ordered by destination rank.
            send_R: number of rows for each rank.
            receive_R: number of rows from each rank.

        Returns:
            Rows [sum of `receive_R`, D], ordered by source rank.

        Raises:
            GroupBroken: a rank was lost.
        """
        if self.device.type == "cuda":
            return self.begin_exchange(rows_XD, send_R, receive_R)()
        received = self._swap([[part] for part in _split(rows_XD, send_R)])
        return self._joined(rows_XD, [part for (part,) in received], receive_R)

    def begin_exchange(
        self, rows_XD: torch.Tensor, send_R: list[int], receive_R: list[int], first: Callable[[], object] = lambda: None
    ) -> Callable[[], torch.Tensor]:
        """Begin an all-to-all of rows beside computation; begun ones run in their order.

        Args:
            rows_XD, send_R, receive_R: as for `exchange`.
            first: called before, on a CPU by the thread that exchanges.

        Returns:
            A function that waits for the rows and returns them; see `exchange`. Until it has returned for every begun
            exchange, no other collective may be called.

        Raises:
            GroupBroken: the group was aborted, or a rank was lost; the returned function raises it too.

        Effects: on a CPU the first call starts a thread, which ends with the group.
        """
        self._require_whole()
        if self.device.type == "cuda":
            first()
            got_YD, given_XD = rows_XD.new_empty(sum(receive_R), rows_XD.shape[1]), rows_XD.contiguous()
            finish = self._begin_all_to_all(got_YD, given_XD, receive_R, send_R)

            def arrived() -> torch.Tensor:
                finish()
                return got_YD

            return arrived

        def swap() -> list[Parts]:
            first()
            return self._swap([[part] for part in _split(rows_XD, send_R)])

        try:
            swapped = self._beside.submit(swap)
        except RuntimeError as error:  # aborted just now
            raise self._failed(error) from None
        return lambda: self._joined(rows_XD, [part for (part,) in swapped.result()], receive_R)

    def exchange_few(self, rows_XD: torch.Tensor, counts_RE: np.ndarray, most: int) -> tuple[torch.Tensor, np.ndarray]:
        """All-to-all of rows and their counts in one collective; over NCCL padded to `most` rows per rank pair.

        Args:
            rows_XD: rows to send, ordered by destination rank.
            counts_RE: number of rows for each rank and expert.
            most: largest number of rows that any rank sends to another; the same at all ranks.

        Returns:
            The received rows and their counts, like `exchange` and `counts`.

        Raises:
            GroupBroken: a rank was lost.
        """
        send_R = counts_RE.sum(axis=1).tolist()
        if self.device.type != "cuda":
            parts = zip(map(_bytes, counts_RE), _split(rows_XD, send_R), strict=True)
            both = self._swap([[*pair] for pair in parts], counts_RE.shape[1] * _COUNT.itemsize)
            theirs_RE = np.stack([_numbers(counts) for counts, _ in both])
            return self._joined(rows_XD, [rows for _, rows in both], theirs_RE.sum(axis=1).tolist()), theirs_RE
        width, item = rows_XD.shape[1], rows_XD.element_size()
        counts = torch.from_numpy(counts_RE.astype(np.int16)).view(torch.uint8)
        head = -(-counts.shape[1] // 16) * 16  # aligns the rows
        sent = torch.zeros(self.size, head + most * width * item, dtype=torch.uint8)
        sent[:, : counts.shape[1]] = counts
        sent = sent.to(rows_XD.device)
        start = 0
        for rank, rows in enumerate(send_R):
            part = rows_XD[start : start + rows].reshape(-1).view(torch.uint8)
            sent[rank, head : head + len(part)] = part
            start += rows
        got = torch.empty_like(sent)
        self._begin_all_to_all(got, sent, [], [])()
        theirs_RE = got[:, : counts.shape[1]].cpu().view(torch.int16).numpy().astype(np.int64)
        received = [
            got[rank, head : head + rows * width * item] for rank, rows in enumerate(theirs_RE.sum(axis=1).tolist())
        ]
        return torch.cat(received).view(rows_XD.dtype).view(-1, width), theirs_RE

    def abort(self) -> None:
        """Abort the group from any thread: running collectives fail here, and soon at every other rank."""
        with self._lock:
            # First, so that a new collective reports this error.
            self.broken = self.broken or GroupBroken("the group was aborted")
            nccl, self._nccl = self._nccl, None
        self._mesh.close()
        self._beside.shutdown(wait=False)
        if nccl is not None:
            try:
                nccl.abort()
            except RuntimeError:
                return  # it had failed already

    def _joined(self, like_XD: torch.Tensor, parts: Sequence[Any], rows_R: Sequence[int]) -> torch.Tensor:
        """Received rows as one tensor. Raises: GroupBroken: a rank sent another number of rows."""
        width, item = like_XD.shape[1], like_XD.element_size()
        if [len(part) for part in parts] != [rows * width * item for rows in rows_R]:
            raise self._failed(LinkError("a rank sent another number of rows than it announced"))
        rows = [torch.frombuffer(part, dtype=like_XD.dtype) for part in parts if len(part)]
        return torch.cat(rows).view(-1, width) if rows else like_XD.new_empty(0, width)

    def _swap(self, messages: Sequence[Parts], first_bytes: int | None = None) -> list[Parts]:
        """Swap messages of the same number of parts, the first of so many bytes. Raises: GroupBroken."""
        self._require_whole()
        try:
            received = self._mesh.swap(messages)
            for rank, parts in enumerate(received):
                if len(parts) != len(messages[rank]) or first_bytes not in (None, len(parts[0])):
                    raise LinkError(f"rank {rank} sent a message of another form")
        except LinkError as error:
            raise self._failed(error) from None
        return received

    def _begin_all_to_all(
        self, output: torch.Tensor, given: torch.Tensor, got: list[int], sent: list[int]
    ) -> Callable[[], None]:
        """Return a function that waits for it, and for the computation queued before the call of that function."""
        self._require_whole()
        try:
            work = self._nccl.alltoall_base(output, given, got, sent, self._options)
        except RuntimeError as error:
            raise self._failed(error) from None

        def finish() -> None:
            try:
                work.wait()
                torch.cuda.current_stream(output.device).synchronize()
            except RuntimeError as error:
                raise self._failed(error) from None

        return finish

    def _require_whole(self) -> None:
        if self.broken is not None:
            raise GroupBroken(f"generation {self._mesh.generation} is over ({first_line(self.broken)})")

    def _failed(self, error: BaseException) -> GroupBroken:
        self.broken = self.broken or error
        return GroupBroken(f"generation {self._mesh.generation} lost a rank ({first_line(error)})")


def _bytes(counts_E: np.ndarray) -> memoryview:
    return counts_E.astype(_COUNT).view(np.uint8).data


def _numbers(counts: Any) -> np.ndarray:
    return np.frombuffer(counts, _COUNT).astype(np.int64)


def _split(rows_XD: torch.Tensor, rows_R: Sequence[int]) -> list[memoryview]:
    """The bytes of each rank's rows."""
    data = rows_XD.contiguous().view(-1).view(torch.uint8).numpy().data
    row_bytes = rows_XD.shape[1] * rows_XD.element_size()
    parts, start = [], 0
    for rows in rows_R:
        parts.append(data[start : start + rows * row_bytes])
        start += rows * row_bytes
    return parts
