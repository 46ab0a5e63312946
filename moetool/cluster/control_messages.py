"""Control messages between a head and a worker process: JSON over an authenticated connection.

Besides JSON's types, values may be tuples, bytes, NumPy arrays, mappings with any keys, and moetool's dataclasses.
Nothing is unpickled.
"""

import base64
import importlib
import itertools
import json
import time
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from moetool.cluster.frames import FrameConnection, LinkError, pack

MOST_BYTES = 2**28
"""Size limit of a message in bytes."""
_TAKEN_S, _LEAST_BYTES_S = 10.0, 1e6
"""Seconds in which a peer must accept a message, and least rate in bytes per second for longer ones."""


def send_message(connection: FrameConnection, message: Mapping[str, Any], by: float | None = None) -> None:
    """Send a message.

    Args:
        by: deadline on the clock of `time.monotonic` (default: by the message's size).

    Raises:
        LinkError: the peer does not accept the message.
        TypeError: a value has an unsupported type.
    """
    text = json.dumps(to_plain(dict(message)), separators=(",", ":")).encode()
    if by is None:
        by = time.monotonic() + _TAKEN_S + len(text) / _LEAST_BYTES_S
    connection.send(pack({}, [text]), [text], by)


def receive_message(connection: FrameConnection, by: float | None = None) -> dict[str, Any]:
    """Receive the next message.

    Args:
        by: deadline on the clock of `time.monotonic`; None: no deadline.

    Raises:
        LinkError: the connection ended, the deadline passed, or the message is malformed.
    """
    frame = connection.receive(by, rest_s=_TAKEN_S + MOST_BYTES / _LEAST_BYTES_S)
    try:
        (text,) = frame.parts
        message = from_plain(json.loads(bytes(text)))
        if not isinstance(message, dict):
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError, ImportError, RecursionError):
        raise LinkError("the other end sent a message that cannot be read") from None
    return message


def to_plain(value: Any) -> Any:
    """Convert a value to JSON types. Raises: TypeError: unsupported type."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [to_plain(one) for one in value]
    if isinstance(value, tuple):
        if value and set(map(type, value)) == {tuple} and set(map(type, itertools.chain.from_iterable(value))) <= {int}:
            return {"tuples": value}  # faster for placements of large models, which are long lists
        return {"tuple": [to_plain(one) for one in value]}
    if isinstance(value, Mapping):
        return {"mapping": [[to_plain(key), to_plain(one)] for key, one in value.items()]}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        return {"array": data, "dtype": value.dtype.str, "shape": list(value.shape)}
    if is_dataclass(value) and not isinstance(value, type):
        kind = type(value)
        held = {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
        return {"dataclass": f"{kind.__module__}:{kind.__qualname__}", "fields": held}
    raise TypeError(f"{type(value).__name__} cannot be sent to a worker")


def from_plain(value: Any) -> Any:
    """Restore a value from the output of `to_plain`.

    Raises:
        ValueError, KeyError, TypeError, AttributeError, ImportError: the input is malformed or names an unknown class.
    """
    if isinstance(value, list):
        return [from_plain(one) for one in value]
    if not isinstance(value, dict):
        return value
    kind = str(next(iter(value), ""))
    content: Any = value.get(kind)
    if kind == "tuple":
        return tuple(from_plain(one) for one in content)
    if kind == "tuples":
        return tuple(map(tuple, content))
    if kind == "mapping":
        return {from_plain(key): from_plain(one) for key, one in content}
    if kind == "bytes":
        return base64.b64decode(content, validate=True)
    if kind == "array":
        return np.frombuffer(bytearray(base64.b64decode(content)), value["dtype"]).reshape(value["shape"])
    if kind != "dataclass":
        raise ValueError(f"unknown kind {kind}")
    module, _, name = content.partition(":")
    found = getattr(importlib.import_module(module), name) if module.startswith("moetool.") else None
    if not (isinstance(found, type) and is_dataclass(found)):
        raise ValueError(f"{content} is not one of moetool's value classes")
    return found(**{name: from_plain(one) for name, one in value["fields"].items()})
