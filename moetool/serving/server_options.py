"""What the HTTP half of the server allows."""

from dataclasses import dataclass

from moetool.errors import UsageError

_ABOVE_ZERO = (
    "request_timeout_s",
    "stuck_after_s",
    "max_body_bytes",
    "body_timeout_s",
    "idle_timeout_s",
    "head_timeout_s",
    "send_timeout_s",
)


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """What `moetool serve --set server.NAME=VALUE` sets.

    Attributes:
        max_queue: choices that may wait for a place in the engine, over all clients; more are answered with 429.
        request_timeout_s: a request that takes longer is ended with an error. A client may ask for less, in the header
            `X-Request-Timeout` (seconds).
        stuck_after_s: when a single forward has run for so long, the server calls itself stuck and takes no requests
            until it is over.
        max_body_bytes: of one request; more is answered with 413. All bodies that are held at one time have at
            most 16 times as many; what comes on top is answered with 503.
        body_timeout_s: a request whose body takes longer to come is answered with 408.
        max_connections: that are open at one time. For one more, the one that has waited longest without a request is
            closed; where none has waited for a second, it is answered with 503.
        idle_timeout_s: how long a connection may be without a request.
        head_timeout_s: a request whose head takes longer to come, from its first byte, is answered with 408.
        send_timeout_s: a client that takes no byte of its answer for so long is cut off.
        drain_timeout_s: how long running requests may take to finish when the server is told to stop.
        access_log: file for one line of JSON a request (empty: none; `-`: stderr). Of prompts and answers it has only
            the lengths.
    """

    max_queue: int = 256
    request_timeout_s: float = 600.0
    stuck_after_s: float = 120.0
    max_body_bytes: int = 2 * 2**20
    body_timeout_s: float = 30.0
    max_connections: int = 1024
    idle_timeout_s: float = 60.0
    head_timeout_s: float = 10.0
    send_timeout_s: float = 30.0
    drain_timeout_s: float = 30.0
    access_log: str = ""

    def __post_init__(self) -> None:
        if self.max_queue < 0:
            raise UsageError(f"max_queue is {self.max_queue}, expected at least 0")
        if self.max_connections < 1:
            raise UsageError(f"max_connections is {self.max_connections}, expected at least 1")
        for name in _ABOVE_ZERO:
            if not getattr(self, name) > 0:
                raise UsageError(f"{name} is {getattr(self, name)}, expected more than 0")
        if not self.drain_timeout_s >= 0:
            raise UsageError(f"drain_timeout_s is {self.drain_timeout_s}, expected at least 0")
