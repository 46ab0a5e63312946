"""The server's status line at the bottom of the terminal."""

import contextlib
import time
from collections import deque
from collections.abc import Iterator, Mapping
from threading import Event, Thread

from moetool.base.tables import percent, shows_progress
from moetool.runtime.request import EngineLike

_EVERY_S = 0.5
_WINDOW_S = 5.0
"""Rates are means over this time: a token that takes longer than `_EVERY_S` would make them jump to zero and back."""


class Rates:
    """Status text from readings of the engine's counters in the last seconds."""

    def __init__(self) -> None:
        self._read: deque[tuple[float, Mapping[str, float]]] = deque()

    def line(self, at: float, now: Mapping[str, float]) -> str:
        """Return the line about the last `_WINDOW_S` seconds.

        Args:
            at: seconds of a monotonic clock.
            now: values of `EngineLike.metrics`.
        """
        self._read.append((at, now))
        while len(self._read) > 2 and at - self._read[1][0] >= _WINDOW_S:
            self._read.popleft()
        then, before = self._read[0]
        seconds = max(at - then, 1e-9)

        def since(*names: str) -> float:
            return sum(now.get(name, 0) - before.get(name, 0) for name in names)

        hits, misses = since("hits_kept", "hits_prefetched", "hits_late"), since("misses", "hosted")
        rate = percent(hits / (hits + misses), ".0f") if hits + misses else "-"
        running, waiting = now.get("queue_running", 0), now.get("queue_waiting", 0)
        return (
            f"{since('tokens_generated') / seconds:.1f} tokens/s | hits {rate} | "
            f"{since('bytes_read') / seconds / 1e6:.0f} MB/s | {running:.0f} running, {waiting:.0f} waiting"
        )


@contextlib.contextmanager
def status_line(engine: EngineLike) -> Iterator[None]:
    """Keep the line on stderr up to date while the block runs; no line where stderr is not a terminal."""
    if not shows_progress():
        yield
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    over, rates = Event(), Rates()
    with Live(console=Console(stderr=True), auto_refresh=False, transient=True) as live:

        def show() -> None:
            while not over.wait(_EVERY_S):
                live.update(Text(rates.line(time.monotonic(), engine.metrics()), style="dim"), refresh=True)

        thread = Thread(target=show, name="status line", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
