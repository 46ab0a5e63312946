"""Limits of the HTTP server."""

from dataclasses import dataclass

from moetool.config import Span, require_within
from moetool.errors import UsageError, unknown_name
from moetool.serving.tool_calls import FORMATS
from moetool.serving.web_names import host_name, origin_name

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
    """Settings of `moetool serve --set server.NAME=VALUE`.

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
        allowed_hosts: names that a request's Host may have besides `localhost` and IP addresses (`*`: any). With an
            API key the Host is checked only where this has names.
        cors_origins: web pages that may use the server, such as `https://chat.example` (`*`: any). Without an API key
            the requests of other pages are refused.
        default_max_tokens: of a chat answer whose request names no limit, as far as the context has room.
        drop_oldest_turns: a chat that outgrows the context loses its oldest turns instead of being refused; the answer
            says how many messages, in `usage` and in the header `X-Dropped-Messages`.
        tool_format: how the model writes tool calls (empty: by its chat template).
        ssl_certfile: certificates in PEM, for HTTPS.
        ssl_keyfile: the private key of the first, where it is in a file of its own.
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
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    default_max_tokens: int = 4096
    drop_oldest_turns: bool = False
    tool_format: str = ""
    ssl_certfile: str = ""
    ssl_keyfile: str = ""

    def __post_init__(self) -> None:
        require_within(self, max_queue=Span(0), default_max_tokens=Span(1), max_connections=Span(1))
        require_within(self, drain_timeout_s=Span(0), **dict.fromkeys(_ABOVE_ZERO, Span(0, above=True)))
        if self.tool_format and self.tool_format not in FORMATS:
            raise unknown_name("tool_format", self.tool_format, FORMATS)
        if self.ssl_keyfile and not self.ssl_certfile:
            raise UsageError("a TLS key without a certificate; give that too, with --ssl-certfile FILE")
        for name in self.allowed_hosts:
            if host_name(name) is None:
                raise UsageError(f"allowed host {name!r} is not a host name; write it like lab.example, without a port")
        for origin in self.cors_origins:
            if origin_name(origin) is None:
                raise UsageError(
                    f"CORS origin {origin!r} is not an origin; write scheme, host and port, like https://a.example"
                )
