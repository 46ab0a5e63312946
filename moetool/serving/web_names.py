"""Names of hosts and web origins in the form that browsers send."""

import ipaddress
import re
from urllib.parse import urlsplit

ANY = "*"
"""Stands for every name."""
DEFAULT_PORTS = {"http": 80, "https": 443}
_HOST = re.compile(r"[^\s/?#@\\]+")


def host_name(text: str) -> str | None:
    """Return a name for `--allowed-host`, lower-cased; None where it is invalid (a URL, a port, spaces)."""
    name = name_in(text)
    return name if text == ANY or (name is not None and name == text.lower().strip("[]")) else None


def origin_name(text: str) -> str | None:
    """Return an origin as browsers send it, lower-cased; None where it is invalid."""
    if text in (ANY, "null"):
        return text
    try:
        parts = urlsplit(text.rstrip("/").lower())
        port = parts.port
    except ValueError:
        return None
    if not parts.scheme or not parts.hostname or parts.path or parts.query or parts.fragment or "@" in parts.netloc:
        return None
    usual = port is None or port == DEFAULT_PORTS.get(parts.scheme)
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}" if usual else f"{parts.scheme}://{host}:{port}"


def name_in(host: str) -> str | None:
    """Return the name in a Host header, lower-cased, without port, brackets and final dot; None where it has none."""
    try:
        parts = urlsplit(f"//{host}")
        _ = parts.port
    except ValueError:
        return None
    whole = _HOST.fullmatch(host) and not host.endswith(":")
    return parts.hostname.rstrip(".") or None if whole and parts.hostname else None


def is_address(name: str) -> bool:
    """Whether a name is an IP address."""
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True
