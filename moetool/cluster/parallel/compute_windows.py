"""Compute phases, in which experts may move, and all-to-alls, in which they may not."""

import threading
import time

from moetool.base.errors import MoetoolError

MIGRATIONS = ("overlap", "pipelined", "stop")
"""Migration modes (DIRECTOR, Figure 6): in compute phases only; whenever experts are available; while nothing runs."""


class Windows:
    """The compute phases of one rank.

    The rank's own thread opens and closes them. A transfer holds the open phase while a piece is on its way. `close`
    waits for it as long as the other ranks wait for this one. A piece is sized to the predicted rest of the phase.

    Args:
        strict: whether pieces wait for a compute phase. Otherwise they are sent at any time: the pipelined migration of
            DIRECTOR's Figure 6 b.

    Attributes:
        exchanges: number of all-to-alls begun.
        exchanging: whether an all-to-all is running.
        waited_s: seconds that `close` waited for pieces.

    Source: DIRECTOR § V-B.
    """

    def __init__(self, strict: bool = True) -> None:
        self.strict = strict
        self.exchanges = 0
        self.exchanging = False
        self.waited_s = 0.0
        self._changed = threading.Condition()
        self._open = True
        self._holders = 0
        self._end = float("inf")
        self._used = False

    def open(self, seconds: float) -> None:
        """Begin a compute phase of about so many seconds."""
        with self._changed:
            self.exchanging = False
            self._open, self._used = True, False
            self._end = time.perf_counter() + seconds
            self._changed.notify_all()

    def close(self, timeout_s: float) -> None:
        """Begin an all-to-all; return once no piece is in transfer.

        Args:
            timeout_s: time after which the other ranks, already in the all-to-all, have given up on this one.

        Raises:
            MoetoolError: a transfer takes longer.
        """
        with self._changed:
            self._open = False
            if self.strict and self._holders:
                began = time.perf_counter()
                free = self._changed.wait_for(lambda: not self._holders, timeout_s)
                self.waited_s += time.perf_counter() - began
                if not free:
                    raise MoetoolError(f"an expert transfer took {timeout_s:g} s while an all-to-all waited")
            self.exchanging = True
            self.exchanges += 1

    def hold(self, timeout_s: float) -> float | None:
        """Keep the phase open for a piece.

        Returns:
            Seconds left in the phase; 0 for a first piece of any size; None if no phase began in time or this one is
            over.
        """
        deadline = time.perf_counter() + timeout_s
        with self._changed:
            while True:
                left_s = float("inf") if not self.strict else self._end - time.perf_counter()
                if not self.strict or (self._open and (left_s > 0 or not self._used)):
                    self._holders += 1
                    self._used = True
                    return max(0.0, left_s)
                wait_s = deadline - time.perf_counter()
                if wait_s <= 0 or not self._changed.wait(wait_s):
                    return None

    def try_hold(self) -> bool:
        """Like `hold`, for a piece that another rank requests now; that rank has checked the time."""
        with self._changed:
            if self.strict and not self._open:
                return False
            self._holders += 1
            return True

    def release(self) -> None:
        """Release the hold: the piece has arrived."""
        with self._changed:
            self._holders -= 1
            self._changed.notify_all()
