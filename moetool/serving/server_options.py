"""Limits of the HTTP server."""

from dataclasses import dataclass

from moetool.base.config import Span, require_within
from moetool.base.errors import UsageError, unknown_name
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
    "unread_timeout_s",
)


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Settings of `moetool serve --set server.NAME=VALUE`.

    Attributes:
        max_queue: most waiting choices over all clients; more get 429.
        preempt_after_s: seconds that a client waits for its share of the running requests. Then a request of a client
            with more is preempted: it waits, and goes on later from its last token. One client alone may run all; of
            its requests, those that wait so long take turns of 256 tokens with the running ones, the newest first
            every other time (0: nothing is preempted, as with `deterministic=true`). Clients differ by address (IPv6:
            the first 64 bits), and at one address by the API key that they send.
        request_timeout_s: limit of a request's seconds, after which it ends with an error. A client may set less in the
            header `X-Request-Timeout` (seconds).
        stuck_after_s: seconds of a single forward after which the server reports `stuck` and refuses requests until it
            ends.
        max_body_bytes: limit of one request's body, beyond which it gets 413. All bodies in memory together may have 16
            times as many; more get 503.
        body_timeout_s: seconds for a body to arrive, after which its request gets 408.
        max_connections: most open connections. For one more, the longest idle one is closed; if none has been idle for
            a second, the new one gets 503.
        idle_timeout_s: seconds that a connection may be idle.
        head_timeout_s: seconds for a request's head to arrive, from its first byte, after which it gets 408.
        send_timeout_s: seconds without a byte read after which a client is disconnected. They begin when 64 KiB or
            more are unread.
        unread_timeout_s: the same while other requests wait.
        drain_timeout_s: seconds for running requests to finish at shutdown.
        access_log: file for one line of JSON per request (empty: none; `-`: stderr), with lengths of prompts and
            answers only.
        allowed_hosts: accepted Host names in addition to `localhost` and IP addresses (`*`: any). With an API key the
            Host is checked only if this has names.
        cors_origins: web pages that may use the server, e.g. `https://chat.example` (`*`: any). Without an API key,
            requests of other pages are refused.
        default_max_tokens: limit of a chat answer without a limit in its request, within the context.
        drop_oldest_turns: drop the oldest turns of a chat that outgrows the context, instead of refusing it. `usage`
            and the header `X-Dropped-Messages` give the number of dropped messages.
        tool_format: format of the model's tool calls (empty: by its chat template).
        ssl_certfile: certificates in PEM, for HTTPS.
        ssl_keyfile: private key of the first certificate, if in a separate file.
    """

    max_queue: int = 256
    preempt_after_s: float = 2.0
    request_timeout_s: float = 600.0
    stuck_after_s: float = 120.0
    max_body_bytes: int = 2 * 2**20
    body_timeout_s: float = 30.0
    max_connections: int = 1024
    idle_timeout_s: float = 60.0
    head_timeout_s: float = 10.0
    send_timeout_s: float = 30.0
    unread_timeout_s: float = 5.0
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
        require_within(
            self, drain_timeout_s=Span(0), preempt_after_s=Span(0), **dict.fromkeys(_ABOVE_ZERO, Span(0, above=True))
        )
        if self.tool_format and self.tool_format not in FORMATS:
            raise unknown_name("tool_format", self.tool_format, FORMATS)
        if self.ssl_keyfile and not self.ssl_certfile:
            raise UsageError("a TLS key needs a certificate; give it with --ssl-certfile FILE")
        for name in self.allowed_hosts:
            if host_name(name) is None:
                raise UsageError(f"allowed host {name!r} is not a host name; write it like lab.example, without a port")
        for origin in self.cors_origins:
            if origin_name(origin) is None:
                raise UsageError(
                    f"CORS origin {origin!r} is not an origin; write scheme, host and port, like https://a.example"
                )
