"""Live ranks, and the formation of generations."""

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any, Protocol

from moetool.base.errors import CapacityError, first_line
from moetool.cluster.frames import LinkError
from moetool.cluster.parallel.channel import RankChannel

_LOG = logging.getLogger(__name__)

_ALIVE_S = 2.0
"""Seconds after which a rank that has not answered the call of a generation is killed."""
_FORM_S = 60.0
"""Seconds without a message after which a rank that has not joined is killed; one that reads experts sends messages."""
_TRIES = 5
"""Most restarts of a rank that never says hello."""
RETRY_S = 0.5
"""Seconds before the second try; doubled before each further one."""
MACHINE_S = 5.0
"""Seconds between searches for a machine for a rank without one."""


class Launcher(Protocol):
    """Starts the ranks' processes."""

    def launch(self, arguments: Sequence[Mapping[str, Any]], on_death: Callable[[int], None]) -> None:
        """Start all ranks, each with its arguments of `Rank`.

        Args:
            on_death: may be called when a rank has ended, from any thread; usually its connection reports it first.

        Raises:
            MoetoolError: one cannot be built.
        """

    def restart(self, gpu: int) -> None:
        """Start a new process for a rank whose process has ended. Raises: CapacityError: no machine is free for it."""

    def kill(self, gpu: int) -> None:
        """End a rank's process at once."""

    def release(self, gpu: int) -> None:
        """End a drained rank, and start none in its place until its machine has joined again."""

    def close(self) -> None:
        """End all."""


@dataclass(slots=True)
class _Rank:
    """A rank that has said hello.

    Attributes:
        channel: connection to it.
        peer: address where it serves experts to others.
        alive, holds, formed: the newest generation in which it answered, holds its experts, and has joined.
        heard_s: time of its last such message, or of its order to join.
    """

    channel: RankChannel
    peer: tuple[str, int]
    alive: int = 0
    holds: int = 0
    formed: int = 0
    heard_s: float = 0.0


class Members:
    """The ranks of a head; belongs to the head's thread.

    A generation begins with an order (`call`) to all live ranks. Each reports that it is alive; that it holds its
    experts; and, after all do and are told to join, that it has joined. A silent rank is ended. A lost rank is
    restarted and waits for the next call. If it ends before its hello, or cannot start, it is retried, five times in
    all. A rank without a machine waits for one. A rank that is leaving (SIGTERM) is not called; it is released once the
    others are complete, or no request waits if all leave, and waits for its machine to join again.

    Args:
        post: puts an event into the head's queue.
        names: names of the ranks, by GPU.
        narrate: called with a line about a rank that ends or returns.

    Attributes:
        ranks: live ranks, by GPU.
        members: ranks of the current generation.
        whole: whether all members have joined it.
        joined: time when each generation was complete.
        starting: ranks whose new process is not ready.
    """

    def __init__(
        self,
        num_gpus: int,
        launcher: Launcher,
        post: Callable[[str, Any], None],
        *,
        names: Sequence[str] = (),
        narrate: Callable[[str], object] = lambda line: None,
    ) -> None:
        self.ranks: dict[int, _Rank] = {}
        self.members: list[int] = []
        self.generation = 0
        self.whole = False
        self.joined: dict[int, float] = {}
        self._num_gpus, self._launcher, self._post = num_gpus, launcher, post
        self._names, self._narrate = tuple(names) or tuple(str(gpu) for gpu in range(num_gpus)), narrate
        self._served: frozenset[int] = frozenset()  # members of the last generation that was whole
        self._tries: dict[int, int] = {}  # failed starts of ranks that are being restarted
        self.starting: set[int] = set()
        self._leaving: set[int] = set()
        self._released: set[int] = set()  # leaving ranks that are told to end
        self._without_machine: set[int] = set()  # restarting ranks without a machine
        self._deadline: float | None = None
        self._over = threading.Event()

    @property
    def there(self) -> list[int]:
        """Live ranks that are not leaving, in this generation or not."""
        return sorted(self.ranks.keys() - self._leaving)

    def next_members(self, waits: bool) -> list[int]:
        """Return the ranks of the next generation: those that stay; if none does, all while requests wait."""
        return self.there or (sorted(self.ranks.keys() - self._released) if waits else [])

    @property
    def gone(self) -> bool:
        """Whether no rank is present and none is being restarted."""
        return not self.ranks and not self._tries.keys() - self._without_machine

    @property
    def without_machine(self) -> list[int]:
        """Ranks that wait for a machine."""
        return sorted(self._without_machine.copy())

    def greet(self, gpu: int, channel: RankChannel, peer: Sequence[Any]) -> None:
        """Record a rank's hello."""
        self._tries.pop(gpu, None)
        self.ranks[gpu] = _Rank(channel, (peer[0], peer[1]))
        _LOG.info("GPU %d joined; it serves experts at %s:%d", gpu, *self.ranks[gpu].peer)

    def knows(self, gpu: int | None, channel: RankChannel) -> bool:
        """Whether this is a live rank's connection."""
        return gpu in self.ranks and self.ranks[gpu].channel is channel

    def lose(self, gpu: int) -> bool:
        """Record that a rank has ended, and restart it. Returns whether it was a member."""
        del self.ranks[gpu]
        self._released.discard(gpu)
        then = "restarting it"
        if gpu in self._leaving:
            self._without_machine.add(gpu)
            then = "it returns when its machine joins again, or with the next head"
        self._narrate(f"rank {self._names[gpu]} left, {len(self.ranks)} of {self._num_gpus} remain; {then}")
        self._start_again(gpu)
        return gpu in self.members

    def leave(self, gpu: int) -> None:
        """Record that a rank is leaving: it is not called again."""
        self._leaving.add(gpu)
        self._narrate(f"rank {self._names[gpu]} is leaving, once the running requests have ended")

    def died(self, gpu: int) -> None:
        """Record that a process has ended, perhaps before its hello."""
        if gpu in self.ranks:
            self.ranks[gpu].channel.close()
        elif gpu in self._tries and gpu not in self.starting:  # otherwise it is the previous process
            self._start_again(gpu)

    def call(self, order: Mapping[str, Any], *, waits: bool = False) -> None:
        """Have all live ranks form the next generation.

        Args:
            order: further data for them: the placement and its version.
            waits: whether requests wait, as for `next_members`.
        """
        self.members, self.whole, self._deadline = self.next_members(waits), False, None
        if not self.members:
            self._release_leaving()
            return
        self.generation += 1
        self._deadline = monotonic() + _ALIVE_S
        _LOG.info("forming generation %d: GPUs %s", self.generation, self.members)
        peers = [list(self.ranks[g].peer) if g in self.ranks else None for g in range(self._num_gpus)]
        self.tell({**order, "kind": "form", "members": self.members, "peers": peers})

    def heard(self, gpu: int, kind: str, generation: int) -> bool:
        """Record a member's progress. Returns whether the generation is complete now."""
        rank = self.ranks[gpu]
        setattr(rank, kind, max(generation, getattr(rank, kind)))  # a message may be older than one of another thread
        rank.heard_s = monotonic()
        if generation != self.generation or kind == "alive":
            return False
        if not all(g in self.ranks and getattr(self.ranks[g], kind) == generation for g in self.members):
            return False
        if kind == "holds":
            for g in self.members:
                self.ranks[g].heard_s = rank.heard_s
            self.tell({"kind": "join"})
            return False
        self.whole, self._deadline = True, None
        self.joined[generation] = monotonic()
        _LOG.info("generation %d is complete", generation)
        if self._served and (come := sorted({*self.members} - self._served)):
            names = ", ".join(self._names[g] for g in come)
            self._narrate(f"rank {names} is back; {len(self.members)} of {self._num_gpus} ranks serve")
        elif self._served and len(self.members) < len(self._served):
            self._narrate(f"{len(self.members)} of {self._num_gpus} ranks serve, with all experts")
        self._served = frozenset(self.members)
        self._release_leaving()
        return True

    def end_silent(self) -> None:
        """End ranks that do not answer or join in time; their connections then report the loss."""
        now = monotonic()
        if self._deadline is None or now < self._deadline:
            return
        ranks = {gpu: self.ranks[gpu] for gpu in self.members if gpu in self.ranks}
        silent = [gpu for gpu, rank in ranks.items() if rank.alive < self.generation]
        if not silent:  # ranks that hold their experts wait for the order to join
            step = "formed" if all(rank.holds == self.generation for rank in ranks.values()) else "holds"
            late = {gpu: rank for gpu, rank in ranks.items() if getattr(rank, step) < self.generation}
            silent = [gpu for gpu, rank in late.items() if now - rank.heard_s > _FORM_S]
        self._deadline = now + _ALIVE_S
        for gpu in silent:
            self._narrate(f"rank {self._names[gpu]} does not answer: killing its process")
            with contextlib.suppress(Exception):
                self._launcher.kill(gpu)
            ranks[gpu].channel.close()

    def send(self, gpu: int, message: Mapping[str, Any]) -> None:
        """Send to one rank, if present, with the generation's number."""
        if gpu in self.ranks:
            with contextlib.suppress(LinkError):  # the thread that receives from it reports the loss
                self.ranks[gpu].channel.send({"generation": self.generation, **message})

    def tell(self, message: Mapping[str, Any]) -> None:
        """Send to all members."""
        for gpu in self.members:
            self.send(gpu, message)

    def dismiss(self) -> None:
        """End all ranks without restarts."""
        self._over.set()
        for gpu in self.ranks:
            self.send(gpu, {"kind": "stop"})

    def _release_leaving(self) -> None:
        """End the leaving ranks that are no members, each once."""
        for gpu in self._leaving & self.ranks.keys() - {*self.members} - self._released:
            self._released.add(gpu)
            threading.Thread(target=self._launcher.release, args=(gpu,), name=f"release-{gpu}", daemon=True).start()

    def _start_again(self, gpu: int) -> None:
        tries = self._tries.pop(gpu, 0)
        if tries == _TRIES:
            _LOG.error("rank %s failed to start %d times; continuing without it", self._names[gpu], tries)
            return
        self._tries[gpu] = tries + 1
        self.starting.add(gpu)
        wait_s = RETRY_S * 2 ** (tries - 1) if tries else 0.0
        threading.Thread(target=self._restart, args=(gpu, wait_s), name=f"restart-{gpu}", daemon=True).start()

    def _restart(self, gpu: int, wait_s: float) -> None:
        if gpu in self._leaving:
            self._launcher.release(gpu)  # if it ended by itself
            self._leaving.discard(gpu)
        while not self._over.wait(wait_s):
            try:
                self._launcher.restart(gpu)
            except CapacityError:
                if gpu not in self._without_machine:
                    self._without_machine.add(gpu)
                    self._narrate(f"rank {self._names[gpu]} waits for a machine")
                    self._post("waits", gpu)  # the head sees whether any rank is left
                wait_s = MACHINE_S
                continue
            except Exception as error:
                if self._over.is_set():
                    return
                self._narrate(f"rank {self._names[gpu]} could not be started: {first_line(error)}; trying again")
                self._without_machine.discard(gpu)
                self.starting.discard(gpu)
                self._post("died", gpu)
            else:
                self._without_machine.discard(gpu)
                self.starting.discard(gpu)
            return
