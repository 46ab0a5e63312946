"""Access of web pages to the server: the Host and Origin of a request.

A browser lets any page send requests to a loopback address, and a page whose name has been rebound to 127.0.0.1 may
read the answers. Both show in headers that a page cannot change.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from moetool.serving.http_errors import error_object
from moetool.serving.server_options import ServerOptions
from moetool.serving.web_names import ANY, DEFAULT_PORTS, host_name, is_address, name_in, origin_name

CORS: dict[str, Any] = {
    "allow_methods": ("GET", "POST"),
    "allow_headers": ("*",),
    "expose_headers": ("x-request-id", "request-id", "retry-after"),
}
"""Rights of the pages in `OriginRules.origins`, for Starlette's CORSMiddleware."""


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
        shared = ANY in self.origins or origin in self.origins
        if origin is not None and self.keyless and not (shared or _same(origin, host)):
            return f"pages of {origin[:200]!r} may not use this server; allow them with --cors-origin ORIGIN"
        return None

    def _serves(self, host: str) -> bool:
        name = name_in(host)
        # An attacker rebinds a name. A page at an address was served by that address. The port proves nothing, and
        # tunnels change it.
        return name is not None and (ANY in self.hosts or name in self.hosts or name == "localhost" or is_address(name))


class Origins:
    """Middleware: applies `OriginRules`."""

    def __init__(self, app: ASGIApp, *, rules: OriginRules) -> None:
        self._app = app
        self._rules = rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        why = self._rules.refusal(Headers(scope=scope)) if scope["type"] == "http" else None
        if why is not None:
            await JSONResponse(error_object(why, 403, code="origin_refused", path=scope["path"]), 403)(
                scope, receive, send
            )
            return
        await self._app(scope, receive, send)


def _same(origin: str, host: str | None) -> bool:
    """Whether a page comes from the server itself. Its scheme may be that of a proxy in front of the server."""
    parts = urlsplit(origin.lower())
    given = (host or "").lower()
    port = DEFAULT_PORTS.get(parts.scheme)
    return bool(parts.netloc) and parts.netloc in (given, given.removesuffix(f":{port}"))
