"""The process group of one generation of ranks; a lost rank ends it, and the next generation gets a new one."""

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from moetool.errors import MoetoolError, first_line


class GroupBroken(MoetoolError):
    """A collective failed: a rank has ended, or the group was aborted. The group cannot be reused."""


class Group:
    """A torch.distributed process group, created directly rather than as the default group.

    Control messages use gloo; rows use gloo on CPUs and NCCL on GPUs. gloo neither authenticates nor encrypts: run
    ranks in a trusted network.

    Args:
        store: key-value store shared by all generations, each with its own prefix.
        generation: number of the group. Ranks of different generations never meet.
        rank: 0 to `size` - 1 in this generation.
        size: number of ranks.
        device: device of the rows (default: CPU).
        timeout_s: time limit of a collective in seconds.
        host: address at which the other ranks reach this machine.

    Attributes:
        device: device for tensors of `exchange`.
        broken: the error that ended the group, or None.

    Effects: waits until all ranks of the generation have connected.

    Raises:
        GroupBroken: not all ranks connected in time.
    """

    def __init__(
        self,
        store: Any,
        generation: int,
        rank: int,
        size: int,
        *,
        device: torch.device | None = None,
        timeout_s: float = 5.0,
        host: str = "127.0.0.1",
    ) -> None:
        self.generation, self.rank, self.size, self.timeout_s = generation, rank, size, timeout_s
        self.device = device or torch.device("cpu")
        self.broken: BaseException | None = None
        self._lock = threading.Lock()
        self._options = dist.AllToAllOptions()
        self._control: Any = None
        self._data: Any = None
        timeout = timedelta(seconds=timeout_s)
        try:
            mine = dist.PrefixStore(f"generation-{generation}", store)
            gloo: Any = dist.ProcessGroupGloo
            options = gloo._Options()
            options._devices = [gloo.create_device(hostname=host)]
            options._timeout = timeout
            self._control = self._data = gloo(mine, rank, size, options)
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)
                nccl = dist.ProcessGroupNCCL.Options()
                nccl._timeout = timeout
                self._data = dist.ProcessGroupNCCL(dist.PrefixStore("nccl", mine), rank, size, nccl)
        except RuntimeError as error:
            raise self._failed(error) from None

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """Gather a few integers from each rank; returns them by rank. Raises: GroupBroken."""
        mine = torch.tensor(list(numbers), dtype=torch.int64)
        all_of = torch.empty(self.size * len(mine), dtype=torch.int64)
        self._all_to_all(self._control, all_of, mine.repeat(self.size), [], [])
        gathered: list[list[int]] = all_of.view(self.size, -1).tolist()
        return gathered

    def counts(self, counts_RE: torch.Tensor) -> torch.Tensor:
        """Send row r (int64, on the CPU) to rank r; return one row from each rank. Raises: GroupBroken."""
        theirs_RE = torch.empty_like(counts_RE)
        self._all_to_all(self._control, theirs_RE, counts_RE.contiguous(), [], [])
        return theirs_RE

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
        got_YD = rows_XD.new_empty(sum(receive_R), rows_XD.shape[1])
        self._all_to_all(self._data, got_YD, rows_XD.contiguous(), receive_R, send_R)
        return got_YD

    def exchange_few(
        self, rows_XD: torch.Tensor, counts_RE: torch.Tensor, most: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All-to-all of rows and their counts in one collective, padded to `most` rows per rank pair.

        Args:
            rows_XD: rows to send, ordered by destination rank.
            counts_RE: number of rows for each rank and expert; on the CPU.
            most: largest number of rows that any rank sends to another; the same at all ranks.

        Returns:
            The received rows and their counts, like `exchange` and `counts`.

        Raises:
            GroupBroken: a rank was lost.
        """
        width, item = rows_XD.shape[1], rows_XD.element_size()
        counts = counts_RE.to(torch.int16).view(torch.uint8)
        head = -(-counts.shape[1] // 16) * 16  # aligns the rows
        sent = torch.zeros(self.size, head + most * width * item, dtype=torch.uint8)
        sent[:, : counts.shape[1]] = counts
        sent = sent.to(rows_XD.device)
        start = 0
        for rank, rows in enumerate(counts_RE.sum(dim=1).tolist()):
            part = rows_XD[start : start + rows].reshape(-1).view(torch.uint8)
            sent[rank, head : head + len(part)] = part
            start += rows
        got = torch.empty_like(sent)
        self._all_to_all(self._data, got, sent, [], [])
        theirs_RE = got[:, : counts.shape[1]].cpu().view(torch.int16).to(torch.int64)
        parts = [
            got[rank, head : head + rows * width * item] for rank, rows in enumerate(theirs_RE.sum(dim=1).tolist())
        ]
        return torch.cat(parts).view(rows_XD.dtype).view(-1, width), theirs_RE

    def abort(self) -> None:
        """Abort the group from any thread: running collectives fail here, and soon at every other rank."""
        with self._lock:
            # First, so that a new collective reports this error.
            self.broken = self.broken or GroupBroken("the group was aborted")
            groups, self._control, self._data = {self._control, self._data} - {None}, None, None
        for group in groups:
            try:
                group.abort()
            except RuntimeError:
                continue  # it had failed already

    def _all_to_all(
        self, group: Any, output: torch.Tensor, given: torch.Tensor, got: list[int], sent: list[int]
    ) -> None:
        if self.broken is not None:
            raise GroupBroken(f"generation {self.generation} is over ({first_line(self.broken)})")
        try:
            group.alltoall_base(output, given, got, sent, self._options).wait()
            if output.is_cuda:
                torch.cuda.current_stream(output.device).synchronize()
        except RuntimeError as error:
            raise self._failed(error) from None

    def _failed(self, error: BaseException) -> GroupBroken:
        self.broken = error
        return GroupBroken(f"generation {self.generation} lost a rank ({first_line(error)})")
