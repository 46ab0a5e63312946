"""A head's link to a worker process: liveness and method calls."""

import logging
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from moetool.base import errors
from moetool.base.errors import MoetoolError, first_line
from moetool.cluster.certificates import Identity
from moetool.cluster.control_messages import MOST_BYTES, receive_message, send_message
from moetool.cluster.frames import FrameConnection, LinkError, dial
from moetool.cluster.listener import HANDSHAKE_S
from moetool.cluster.worker_process import ProcessRecord

_LOG = logging.getLogger(__name__)

_NOTICE_S = 1.0
"""Seconds to notice that a process has ended, after a call of it has failed."""
_HELLO_S = 20.0
"""Seconds for a process to answer the next head; a busy or swapped-out process must not be killed."""
_REDIAL_S = 0.2


class WorkerDied(MoetoolError):
    """The process of a worker has ended, or its machine cannot be reached."""


class WorkerLink:
    """Link to one worker's process.

    One connection stays open as long as the process lives, so that each side notices the other's end. Every call has
    its own connection, so long calls delay no others.

    Args:
        name: the worker's name, for messages.
        head: this process, as workers know it.
        order: order to build the worker; None: an earlier head had it built.

    Effects: starts a thread; `close` ends it.
    """

    def __init__(self, name: str, record: ProcessRecord, head: Identity, order: Mapping[str, Any] | None) -> None:
        self.name, self.record = name, record
        self._order, self._context = order, head.calling(record.certificate)
        self._lock = threading.Lock()
        self._built: Future[None] = Future()
        self._ended = threading.Event()
        self._on_end: list[Callable[[], None]] = []
        self._why = ""
        self._held: FrameConnection | None = None
        self._thread = threading.Thread(target=self._hold, name=f"worker-{name}", daemon=True)
        self._thread.start()

    def call(self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], timeout_s: float) -> Any:
        """As `Workers.call`."""
        by = time.monotonic() + timeout_s
        try:
            self._built.result(timeout_s)
        except TimeoutError:
            raise self._late(method, timeout_s) from None
        if self._ended.is_set():
            raise self._died()
        message = {"do": "call", "method": method, "args": args, "kwargs": dict(kwargs)}
        try:
            return _ask(self.record, self._context, message, by)
        except LinkError as error:
            if time.monotonic() >= by and not self._ended.is_set():
                raise self._late(method, timeout_s) from None
            if self._ended.wait(_NOTICE_S):
                raise self._died() from None
            raise MoetoolError(f"server {self.name} did not answer {method} ({error})") from None

    def end(self, timeout_s: float) -> None:
        """Close the worker and end its process. Raises: MoetoolError: it does not confirm."""
        self._forget_ends()
        _ask(self.record, self._context, {"do": "end"}, time.monotonic() + timeout_s)

    def wait(self, timeout_s: float) -> None:
        """Wait until the process has ended, or for this long."""
        self._ended.wait(timeout_s)

    def when_ended(self, told: Callable[[], None]) -> None:
        """Call `told` once when the process ends unexpectedly, in this class's thread."""
        with self._lock:
            if not self._ended.is_set():
                self._on_end.append(told)
                return
        threading.Thread(target=told, name=f"ended-{self.name}", daemon=True).start()

    def close(self, why: str) -> None:
        """Release the process without notice to waiters; later calls fail with this reason."""
        self._forget_ends()
        with self._lock:
            self._why = self._why or why
            held, self._held = self._held, None
            self._ended.set()
        self._fail_to_build()
        if held is not None:
            held.close()

    def _forget_ends(self) -> None:
        with self._lock:
            self._on_end.clear()

    def _hold(self) -> None:
        """Stay connected until the process has ended."""
        while not self._ended.is_set():
            try:
                connection = _dial(self.record, self._context, time.monotonic() + HANDSHAKE_S)
            except MoetoolError as error:
                self._gone(f"its process has ended: {error}")
                return
            with self._lock:
                if self._ended.is_set():
                    connection.close()
                    return
                self._held = connection
            try:
                if not self._built.done():
                    self._build(connection)
                receive_message(connection)
            except LinkError as error:
                connection.close()
                if not self._built.done():  # another order would build it twice
                    self._gone(f"it could not be built: {first_line(error)}")
                    return
                self._ended.wait(_REDIAL_S)  # perhaps only this connection was lost
            except Exception as error:  # of any kind: waiting threads need an outcome
                connection.close()
                self._gone(first_line(error))
                return

    def _build(self, connection: FrameConnection) -> None:
        if self._order is not None:
            send_message(connection, self._order)
            _value(receive_message(connection))
        with self._lock:
            if not self._built.done():
                self._built.set_result(None)

    def _gone(self, why: str) -> None:
        with self._lock:
            self._why = self._why or why
            told, self._on_end = self._on_end, []
            self._ended.set()
        self._fail_to_build()
        for one in told:
            _LOG.info("the process of %s has ended", self.name)
            one()

    def _fail_to_build(self) -> None:
        with self._lock:
            if not self._built.done():
                self._built.set_exception(self._died())

    def _died(self) -> WorkerDied:
        return WorkerDied(f"server {self.name} has ended ({self._why})")

    def _late(self, method: str, timeout_s: float) -> MoetoolError:
        _LOG.info("%s did not answer %s in %g s", self.name, method, timeout_s)
        return MoetoolError(f"server {self.name} did not answer {method} in {timeout_s:g} s")


def serves(record: ProcessRecord, head: Identity) -> bool:
    """Whether a process answers, and has its worker. Args: as of `WorkerLink`."""
    try:
        found = _ask(record, head.calling(record.certificate), {"do": "hello"}, time.monotonic() + _HELLO_S)
    except MoetoolError:
        return False
    return bool(found)


def _dial(record: ProcessRecord, context: ssl.SSLContext, by: float) -> FrameConnection:
    return dial((record.host, record.port), context, record.mark, by, MOST_BYTES)


def _ask(record: ProcessRecord, context: ssl.SSLContext, message: Mapping[str, Any], by: float) -> Any:
    """Call a process. Raises: LinkError, or the error that the process raised."""
    connection = _dial(record, context, by)
    try:
        send_message(connection, message, by)
        return _value(receive_message(connection, by))
    finally:
        connection.close()


def _value(answer: Mapping[str, Any]) -> Any:
    if (name := answer.get("raised")) is None:
        return answer["value"]
    kind = getattr(errors, str(name), MoetoolError)
    is_ours = isinstance(kind, type) and issubclass(kind, MoetoolError)
    raise (kind if is_ours else MoetoolError)(str(answer["text"]))
