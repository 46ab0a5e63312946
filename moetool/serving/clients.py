"""Clients of the server, between whom it shares the engine."""

import hashlib
import ipaddress
from collections import Counter
from collections.abc import Hashable
from typing import NamedTuple

from starlette.datastructures import Headers
from starlette.types import Scope

_IPV6_PREFIX = 64
"""Bits of an IPv6 address that name a network; one host may use all addresses in it."""


class Client(NamedTuple):
    """One of those who share the server.

    Addresses come first: a client that invents keys shares with nobody but its own network.

    Attributes:
        network: IPv4 address, or network of an IPv6 address.
        key: digest of the sent API key (empty: none).
    """

    network: str
    key: str = ""


def client_of(scope: Scope) -> Client:
    peer = scope.get("client")
    network = peer[0] if peer else ""
    try:
        address = ipaddress.ip_address(network.partition("%")[0])
    except ValueError:  # a name that a proxy gave
        pass
    else:
        if address.version == 6 and address.ipv4_mapped is None:
            network = str(ipaddress.ip_network((int(address), _IPV6_PREFIX), strict=False))
    headers = Headers(scope=scope)
    key = headers.get("authorization") or headers.get("x-api-key", "")
    return Client(network, hashlib.sha256(key.encode()).hexdigest()[:16] if key else "")


class Load:
    """Number of choices by network and by client."""

    def __init__(self) -> None:
        self._counts: Counter[Hashable] = Counter()

    def add(self, client: Client, num: int) -> None:
        """Count `num` more choices of a client, or fewer if it is negative."""
        for name in (client.network, client):
            self._counts[name] += num
            if not self._counts[name]:
                del self._counts[name]

    def of(self, client: Client) -> tuple[int, int]:
        """Return the choices of a client's network, and its own."""
        return self._counts[client.network], self._counts[client]

    def excess(self, client: Client, over: Client) -> int:
        """Return how many more choices one client has than another, by networks if these differ."""
        level = int(client.network == over.network)
        return self.of(client)[level] - self.of(over)[level]
