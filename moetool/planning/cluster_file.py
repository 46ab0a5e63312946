"""A cluster from its TOML file, checked field by field.

    link_bytes_s = "62.5MB"             # between servers, unless [[links]] says otherwise

    [[servers]]
    name = "clinic"
    [[servers.gpus]]
    memory_bytes = "16GiB"
    reserved_bytes = "3GB"
    count = 2                           # that many alike; 1, if not said

    [[links]]
    between = ["clinic", "lab"]
    bytes_s = "12.5MB"
    latency_s = 0.002

Other fields are those of `moetool.types.Cluster`; amounts of bytes are numbers or texts such as "16GiB".
"""

import math
import tomllib
from pathlib import Path
from typing import Any

from moetool.config import parse, parse_bytes
from moetool.errors import UsageError, first_line
from moetool.types import Cluster


def load_cluster(path: Path) -> Cluster:
    """Read and check a cluster file.

    Raises:
        UsageError: there is no such file, it is no TOML, or a field is unknown or wrong.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"cannot read the cluster file {path}: {error.strerror}; write it like recipes/reference/cluster.toml"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is no TOML ({first_line(error)}); correct it") from None
    for server in values.get("servers", ()) if isinstance(values.get("servers"), list) else ():
        if isinstance(server, dict) and isinstance(server.get("gpus"), list):
            server["gpus"] = [alike for gpu in server["gpus"] for alike in _repeat(gpu, path)]
    cluster = parse(Cluster, _amounts(values, path), str(path))
    check_cluster(cluster, str(path))
    return cluster


def check_cluster(cluster: Cluster, where: str) -> None:
    """Refuse a cluster that cannot be.

    Raises:
        UsageError: no server or GPU, a name twice, a link to nowhere, or a rate or size that is not above zero.
    """
    if not cluster.servers:
        raise UsageError(f"{where}: servers: found none, expected at least one [[servers]]")
    names = [server.name for server in cluster.servers]
    for n, server in enumerate(cluster.servers):
        at = f"{where}: servers.{n}"
        if not server.name or names.count(server.name) > 1:
            raise UsageError(f"{at}.name: found {server.name!r}, expected a name that no other server has")
        if not server.gpus:
            raise UsageError(f"{at}.gpus: server {server.name!r} has no GPU, expected at least one [[servers.gpus]]")
        _positive(f"{at}.disk_bytes_s", server.disk_bytes_s)
        _positive(f"{at}.gpu_link_bytes_s", server.gpu_link_bytes_s)
        _positive(f"{at}.cpu_threads", server.cpu_threads)
        if server.host_memory_bytes < 0:
            raise UsageError(f"{at}.host_memory_bytes: found {server.host_memory_bytes}, expected 0 or more")
        for g, gpu in enumerate(server.gpus):
            _positive(f"{at}.gpus.{g}.memory_bytes", gpu.memory_bytes)
            _positive(f"{at}.gpus.{g}.host_to_device_bytes_s", gpu.host_to_device_bytes_s)
            _positive(f"{at}.gpus.{g}.speed", gpu.speed)
            if not 0 <= gpu.reserved_bytes <= gpu.memory_bytes:
                raise UsageError(
                    f"{at}.gpus.{g}.reserved_bytes: found {gpu.reserved_bytes:,}, expected at most the "
                    f"{gpu.memory_bytes:,} bytes of its memory"
                )
    _positive(f"{where}: link_bytes_s", cluster.link_bytes_s)
    _latency(f"{where}: link_latency_s", cluster.link_latency_s)
    for i, link in enumerate(cluster.links):
        at = f"{where}: links.{i}"
        if unknown := [name for name in link.between if name not in names]:
            raise UsageError(f"{at}.between: found {unknown[0]!r}, expected two of the servers {', '.join(names)}")
        if link.between[0] == link.between[1]:
            raise UsageError(f"{at}.between: found {link.between[0]!r} twice, expected two servers")
        _positive(f"{at}.bytes_s", link.bytes_s)
        _latency(f"{at}.latency_s", link.latency_s)


def _positive(where: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise UsageError(f"{where}: found {value}, expected a number above 0")


def _latency(where: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise UsageError(f"{where}: found {value}, expected seconds, 0 or more")


def _repeat(gpu: Any, path: Path) -> list[Any]:
    if not isinstance(gpu, dict) or "count" not in gpu:
        return [gpu]
    one = {key: value for key, value in gpu.items() if key != "count"}
    if not isinstance(gpu["count"], int) or isinstance(gpu["count"], bool) or gpu["count"] < 1:
        raise UsageError(f"{path}: servers.gpus.count: found {gpu['count']!r}, expected a whole number above 0")
    return [one] * gpu["count"]


def _amounts(value: Any, path: Path, key: str = "") -> Any:
    """The same values, with texts for amounts of bytes made numbers."""
    if isinstance(value, dict):
        return {name: _amounts(item, path, name) for name, item in value.items()}
    if isinstance(value, list):
        return [_amounts(item, path, key) for item in value]
    if isinstance(value, str) and key.endswith(("_bytes", "bytes_s")):
        try:
            return parse_bytes(value)
        except UsageError as error:
            raise UsageError(f"{path}: {key}: {error}") from None
    return value
