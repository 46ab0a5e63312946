"""Access of web pages to the server: the Host and Origin of a request, and CORS.

A browser lets any page send requests to a loopback address, and a page whose name has been rebound to 127.0.0.1 may
read the answers. Both show in headers that a page cannot change.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Self
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moetool.serving.http_errors import error_object
from moetool.serving.server_options import ServerOptions
from moetool.serving.web_names import ANY, DEFAULT_PORTS, host_name, is_address, name_in, origin_name

_METHODS = "GET, POST"
_EXPOSED = "x-request-id, retry-after"
_PREFLIGHT_AGE_S = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class OriginRules:
    """Accepted host names and web pages.

    Attributes:
        hosts: accepted names in a Host header, in addition to `localhost` and IP addresses; `*` allows every name.
        origins: pages that may read answers, such as `https://chat.example`; `*` allows every page.
        keyless: the server has no key, so any page that can send a request could use it.
    """

    hosts: Collection[str] = ()
    origins: Collection[str] = ()
    keyless: bool = True

    @classmethod
    def of(cls, options: ServerOptions, *, keyless: bool) -> Self:
        """Return the rules of a server's options."""
        hosts = frozenset(filter(None, map(host_name, options.allowed_hosts)))
        origins = frozenset(filter(None, map(origin_name, options.cors_origins)))
        return cls(hosts=hosts, origins=origins, keyless=keyless)

    def refusal(self, headers: Headers) -> str | None:
        """Return why a request with these headers is refused; None where it is accepted.

        With a key, foreign pages are not refused: they lack the key, and browsers let them send it only where
        `origins` has them. Hosts are then checked only where `hosts` has any.
        """
        host, origin = headers.get("host"), headers.get("origin")
        # Every browser sends a Host, so a client without one is not a browser.
        if host is not None and (self.keyless or self.hosts) and not self._serves(host):
            return f"this server does not answer for the host {host[:200]!r}; allow its name with --allowed-host NAME"
        if origin is not None and self.keyless and not (self.shares_with(origin) or _same(origin, host)):
            return f"pages of {origin[:200]!r} may not use this server; allow them with --cors-origin ORIGIN"
        return None

    def shares_with(self, origin: str) -> bool:
        """Whether pages of an origin may read answers."""
        return ANY in self.origins or origin.lower() in self.origins

    def _serves(self, host: str) -> bool:
        name = name_in(host)
        # An attacker rebinds a name. A page at an address was served by that address. The port proves nothing, and
        # tunnels change it.
        return name is not None and (ANY in self.hosts or name in self.hosts or name == "localhost" or is_address(name))


class Origins:
    """Middleware: applies `OriginRules`, answers preflights, and lets allowed pages read answers."""

    def __init__(self, app: ASGIApp, *, rules: OriginRules) -> None:
        self._app = app
        self._rules = rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        if (why := self._rules.refusal(headers)) is not None:
            await JSONResponse(error_object(why, 403, code="origin_refused"), 403)(scope, receive, send)
            return
        if origin is None or not self._rules.shares_with(origin):
            await self._app(scope, receive, self._varied(send))
            return
        allowed = {"Access-Control-Allow-Origin": origin}
        if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            # A preflight carries no key, so it is answered before the key is checked.
            allowed |= {
                "Access-Control-Allow-Methods": _METHODS,
                "Access-Control-Allow-Headers": headers.get("access-control-request-headers", "authorization"),
                "Access-Control-Max-Age": str(_PREFLIGHT_AGE_S),
                "Vary": "Origin",
            }
            await Response(status_code=204, headers=allowed)(scope, receive, send)
            return
        await self._app(scope, receive, self._varied(send, {**allowed, "Access-Control-Expose-Headers": _EXPOSED}))

    def _varied(self, send: Send, extra: dict[str, str] | None = None) -> Send:
        if not self._rules.origins:
            return send

        async def varied(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(extra or {})
                headers.add_vary_header("Origin")
            await send(message)

        return varied


def _same(origin: str, host: str | None) -> bool:
    """Whether a page comes from the server itself. Its scheme may be that of a proxy in front of the server."""
    parts = urlsplit(origin.lower())
    given = (host or "").lower()
    port = DEFAULT_PORTS.get(parts.scheme)
    return bool(parts.netloc) and parts.netloc in (given, given.removesuffix(f":{port}"))
