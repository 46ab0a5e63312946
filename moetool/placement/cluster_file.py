"""A cluster from its TOML file, checked field by field.

    link_bytes_s = "62.5MB"             # between servers (default for pairs without [[links]])

    [[servers]]
    name = "clinic"
    [[servers.gpus]]
    memory_bytes = "16GiB"
    reserved_bytes = "3GB"
    count = 2                           # number of equal GPUs (default: 1)

    [[links]]
    between = ["clinic", "lab"]
    bytes_s = "12.5MB"
    latency_s = 0.002

Other fields are those of `moetool.base.types.Cluster`; amounts of bytes are numbers or strings such as "16GiB".
`8x80GB` instead of a file is one server of eight GPUs.
"""

import re
from pathlib import Path
from typing import Any

from moetool.base.bounded_read import read_toml
from moetool.base.config import parse, parse_bytes, parse_rate
from moetool.base.errors import MismatchError, Problems, UsageError, first_line
from moetool.base.types import Cluster
from moetool.base.validation import MAX_GPUS


def load_cluster(path: Path) -> Cluster:
    """Read and check a cluster file, or make one server of a number of GPUs and their memory.

    Raises:
        UsageError: there is no such file, it is not valid TOML, or a field is unknown or invalid.
    """
    said = None if path.exists() else re.fullmatch(r"(\d{1,6})x(\d.*)", str(path))
    try:
        gpus = said and {"memory_bytes": said[2], "count": int(said[1])}
        values: Any = {"servers": [{"name": "server", "gpus": [gpus]}]} if gpus else read_toml(path)
    except OSError as error:
        raise UsageError(
            f"cannot read the cluster file {path}: {error.strerror}; write it like recipes/reference/cluster.toml, or "
            "give one server's GPUs and their memory, such as 8x80GB"
        ) from None
    except ValueError as error:
        raise UsageError(f"{path} is not valid TOML ({first_line(error)}); correct it") from None
    with Problems() as problems:
        values = _amounts(values, problems, f"{path}: ")
        for server in values.get("servers", ()) if isinstance(values.get("servers"), list) else ():
            if isinstance(server, dict) and isinstance(server.get("gpus"), list):
                server["gpus"] = [alike for gpu in server["gpus"] for alike in _repeat(gpu, problems, path)]
        with problems.of():
            cluster = parse(Cluster, values, str(path))
    try:
        cluster.validate()
    except MismatchError as error:
        raise UsageError(f"{path}: {error}; correct it like recipes/reference/cluster.toml") from None
    return cluster


def _repeat(gpu: Any, problems: Problems, path: Path) -> list[Any]:
    if not isinstance(gpu, dict) or "count" not in gpu:
        return [gpu]
    one = {key: value for key, value in gpu.items() if key != "count"}
    count = gpu["count"]
    with problems.of():
        if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MAX_GPUS:
            raise UsageError(f"{path}: servers.gpus.count: found {count!r}, expected 1 to {MAX_GPUS:,}")
        return [one] * count
    return [one]


def _amounts(value: Any, problems: Problems, where: str, key: str = "") -> Any:
    """Return the values with amounts of bytes converted to numbers. Args: where: path of the value, with a point."""
    if isinstance(value, dict):
        return {name: _amounts(item, problems, f"{where}{name}.", name) for name, item in value.items()}
    if isinstance(value, list):
        return [_amounts(item, problems, f"{where}{number}.", key) for number, item in enumerate(value)]
    if isinstance(value, str) and key.endswith(("_bytes", "bytes_s")):
        with problems.of(f"{where.removesuffix('.')}: "):
            return (parse_rate if key.endswith("_s") else parse_bytes)(value)
        return 1  # for the checks of the other fields
    return value
