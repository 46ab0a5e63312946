"""The ranks of one generation: whenever a rank has died, a new process group is made under a new number."""

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from moetool.errors import MoetoolError, first_line


class GroupBroken(MoetoolError):
    """A collective did not complete: a rank has ended, or the group was aborted. The group cannot be used again."""


class Group:
    """A process group of torch.distributed, made directly and not as the process's only one.

    Agreements and counts of a CPU go over gloo; rows over gloo on CPUs and NCCL on GPUs. gloo authenticates nobody and
    encrypts nothing: ranks belong in a trusted network.

    Args:
        store: that all generations share; each has a prefix of its own.
        generation: of the group. Ranks of different generations never meet.
        rank: in this generation, 0 to `size` - 1.
        device: where the rows are.
        timeout_s: a collective that takes longer has failed.
        host: this machine's address, as the other ranks reach it.

    Attributes:
        device: where tensors of `exchange` belong.
        broken: the error that ended it, or None.

    Effects: waits until all ranks of the generation are there.

    Raises:
        GroupBroken: they are late.
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
        """Gather a few numbers of each rank, by rank. Raises: GroupBroken."""
        mine = torch.tensor(list(numbers), dtype=torch.int64)
        all_of = torch.empty(self.size * len(mine), dtype=torch.int64)
        self._all_to_all(self._control, all_of, mine.repeat(self.size), [], [])
        gathered: list[list[int]] = all_of.view(self.size, -1).tolist()
        return gathered

    def counts(self, counts_RE: torch.Tensor) -> torch.Tensor:
        """Row r goes to rank r; gives one row from each. int64 on the CPU. Raises: GroupBroken."""
        theirs_RE = torch.empty_like(counts_RE)
        self._all_to_all(self._control, theirs_RE, counts_RE.contiguous(), [], [])
        return theirs_RE

    def exchange(self, rows_XD: torch.Tensor, send_R: list[int], receive_R: list[int]) -> torch.Tensor:
        """Rows to each rank, in the order of the ranks, and rows from each. Raises: GroupBroken: a rank is gone."""
        got_YD = rows_XD.new_empty(sum(receive_R), rows_XD.shape[1])
        self._all_to_all(self._data, got_YD, rows_XD.contiguous(), receive_R, send_R)
        return got_YD

    def exchange_few(
        self, rows_XD: torch.Tensor, counts_RE: torch.Tensor, most: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows and their counts in one all-to-all, which sends `most` rows to each rank, zeros where fewer are.

        Args:
            rows_XD: in the order of the ranks.
            counts_RE: how many of them are for each rank and expert; on the CPU.
            most: rows that any rank of the group sends to another; the same at all ranks.

        Returns:
            The rows from each rank, and their counts, as `exchange` and `counts` give them.

        Raises:
            GroupBroken: a rank is gone.
        """
        width, item = rows_XD.shape[1], rows_XD.element_size()
        counts = counts_RE.to(torch.int16).view(torch.uint8)
        head = -(-counts.shape[1] // 16) * 16  # so that rows are aligned
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
        """End it, from any thread: a collective that is under way fails here, and soon at every other rank."""
        with self._lock:
            self.broken = self.broken or GroupBroken("the group was aborted")  # before a collective finds no group
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
