"""Experts on their way between ranks, when something goes wrong: nobody waits for what will not come."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from moetool.base.errors import MoetoolError
from moetool.cluster.frames import LinkError
from moetool.cluster.links import Bucket
from moetool.cluster.parallel import expert_buffers
from moetool.cluster.parallel.channel import connect
from moetool.cluster.parallel.compute_windows import Windows
from moetool.cluster.parallel.expert_transfer import ExpertTransfer
from moetool.cluster.parallel.rank_mesh import Arrivals
from moetool.cluster.parallel.staged_migration import MigrationStage
from moetool.models.checkpoint import Checkpoint
from tests.identities import identity
from tests.refusals import refused
from tests.servers import eventually
from tests.synthetic import make_spec

SPEC = make_spec(1, 4)


class Kept:
    """Stands in for expert buffers; its disk may fail."""

    def __init__(self, *, fails: bool = False) -> None:
        self.held: dict[int, torch.Tensor] = {}
        self.files = self
        self._fails = fails

    def __contains__(self, key: int) -> bool:
        return key in self.held

    def allocate(self) -> torch.Tensor:
        return torch.zeros(8, dtype=torch.uint8)

    def give_back(self, buffer: torch.Tensor) -> None:
        pass

    def read_into(self, key: int, buffer: torch.Tensor) -> None:
        if self._fails:
            raise OSError(5, "Input/output error")

    def read(self, key: int, offset: int, num_bytes: int) -> None:
        return None

    def put(self, key: int, buffer: torch.Tensor) -> None:
        self.held[key] = buffer


class Device:
    """A device that is filled by copies from host memory; counts what is asked of it."""

    def __init__(self) -> None:
        self.buffers = self.slots = 0

    def device_memory(self, num_bytes: int) -> torch.Tensor:
        self.slots += 1
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        self.buffers += 1
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def copy(self, source: torch.Tensor, target: torch.Tensor, after: Any) -> None:
        target.copy_(source)

    def finish(self, mark: Any) -> None:
        pass

    def close(self) -> None:
        pass


@contextmanager
def opened(buffers: Any, arrivals: Arrivals | None = None) -> Iterator[ExpertTransfer]:
    made = ExpertTransfer(
        SPEC,
        buffers,
        0,
        host="127.0.0.1",
        identity=identity("rank-0"),
        windows=Windows(),
        link=Bucket(float("inf")),
        on_join=(arrivals or Arrivals()).keep,
    )
    made.begin(1, [None, None])
    try:
        yield made
    finally:
        made.close()


def stage(version: int, expert: int) -> MigrationStage:
    """One that brings an expert from a rank that is not there, so from disk."""
    return MigrationStage(version=version, copies=((0, expert, 0, 1),), changes=((0, expert, (0,)),))


def test_a_disk_that_fails_is_told_to_who_waits_for_the_expert() -> None:
    with opened(Kept(fails=True)) as migration:
        migration.ask(stage(2, 3))
        deadline = time.monotonic() + 10
        with refused(MoetoolError, "GPU 0"):
            while time.monotonic() < deadline:
                migration.require_well()
                time.sleep(0.001)
        assert migration.arrived == 1


def test_stages_of_a_generation_that_is_over_bring_nothing() -> None:
    buffers = Kept()
    with opened(buffers) as migration:
        migration.ask(stage(3, 3))  # waits for version 2, which never is in force
        migration.ask(stage(4, 2))
        migration.begin(4, [None, None])
        migration.ask(stage(5, 1))
        assert migration.wait(5, 10.0)
        assert buffers.held.keys() == {SPEC.expert_key(0, 1)} and migration.moved.from_disk == 1


def test_host_buffers_are_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    monkeypatch.setattr(expert_buffers, "open_copies", lambda where: device)
    checkpoint = Checkpoint.open("reference")
    files = checkpoint.expert_files()
    buffers = expert_buffers.ExpertBuffers(files, torch.device("cpu"))
    for key in range(16):
        buffers.load(key)
    for turn in range(1, 11):
        for key in range(16):
            buffers.drop(key + 16 * (turn - 1))
            buffers.load(key + 16 * turn)
    buffers.give_back(buffers.allocate())
    assert (device.buffers, device.slots, len(buffers.keys)) == (1, 16, 16)
    expected = torch.empty(files.slot_bytes, dtype=torch.uint8)
    files.read_into(165, expected)
    assert buffers.read(165, 0, files.slot_bytes)[0] == expected.numpy().tobytes()  # type: ignore[index]
    buffers.close()
    checkpoint.close()


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"generation": "first"},
        {"key": 0, "offset": 0},
        {"key": [0], "offset": 0, "bytes": 1},
        {"key": 0, "offset": None, "bytes": 8},
    ],
    ids=str,
)
def test_a_malformed_message_of_a_rank_ends_its_link_in_one_line(
    message: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with opened(Kept()) as migration, caplog.at_level(logging.WARNING):
        channel = connect(migration.address, identity("rank-1"), "rank-0")
        channel.send(message)
        with pytest.raises(LinkError):
            channel.receive(timeout_s=10.0)
        eventually(lambda: caplog.messages)
        (line,) = caplog.messages
        assert line.startswith("ended the connection of peer 1 on port")
        assert f"rank 1 sent neither a join nor a request for an expert: {message}" in line
        other = connect(migration.address, identity("rank-1"), "rank-0")
        other.send({"key": 0, "offset": 0, "bytes": 8})
        assert other.receive(timeout_s=10.0)[0]["state"] in ("gone", "later")
        other.close()


def test_a_rank_joins_by_the_number_of_its_certificate() -> None:
    arrivals = Arrivals()
    with opened(Kept(), arrivals) as migration:
        channel = connect(migration.address, identity("rank-1"), "rank-0")
        channel.send({"generation": 1, "gpu": 2})
        with refused(LinkError, "GPU 2"):
            arrivals.take(1, [2], time.monotonic() + 0.2)
        assert arrivals.take(1, [1], time.monotonic() + 10)[0].number == 1
        arrivals.close()
        channel.close()
