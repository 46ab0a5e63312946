"""Learned policy state between runs of a server: one safetensors file."""

import glob
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import psutil
import safetensors
import safetensors.numpy

from moetool.base.bounded_read import require_regular
from moetool.base.errors import MismatchError, MoetoolError, first_line
from moetool.base.types import ModelSpec

_KIND = "moetool_policy_state"
_RESIDENTS = "residents"


class Learned(Protocol):
    """A `moetool.caching.policy.Policy`, or `moetool.caching.devices.DevicePolicies`."""

    spec: ModelSpec

    def state(self) -> dict[str, np.ndarray]: ...
    def restore(self, state: Mapping[str, np.ndarray]) -> None: ...


def save_state(path: Path, name: str, policy: Learned, residents: Sequence[int] | None = None) -> None:
    """Write the learned state of policy `name` atomically; write nothing if it has none.

    Args:
        residents: keys of resident experts, stored too.

    Raises:
        MoetoolError: the disk failed. The previous file stays intact.
    """
    arrays = policy.state()
    if residents is not None:
        arrays = {**arrays, _RESIDENTS: np.asarray(residents, np.int64)}
    if not arrays:
        return
    metadata = {"kind": _KIND, "policy": name, "revision": policy.spec.revision}
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        safetensors.numpy.save_file(arrays, partial, metadata)
        with partial.open("rb+") as stream:
            os.fsync(stream.fileno())
        partial.replace(path)
        _remove_left(path)
    except (OSError, safetensors.SafetensorError) as error:
        partial.unlink(missing_ok=True)
        raise MoetoolError(f"cannot save the state of {name} to {path}: {first_line(error)}") from error


def _remove_left(path: Path) -> None:
    """Remove incomplete files of killed processes beside `path`."""
    for partial in path.parent.glob(f"{glob.escape(path.name)}*.partial"):
        owner = partial.name.removeprefix(path.name).removesuffix(".partial").removeprefix(".")
        if not owner or (owner.isdigit() and not psutil.pid_exists(int(owner))):
            partial.unlink(missing_ok=True)


def read_array(path: Path, name: str, revision: str, array_name: str) -> np.ndarray | None:
    """One array of the state that `save_state` kept for policy `name`; None if it or the file is missing or damaged."""
    try:
        require_regular(path)
        with safetensors.safe_open(path, framework="numpy") as file:
            expected = {"kind": _KIND, "policy": name, "revision": revision}
            if not expected.items() <= (file.metadata() or {}).items():
                return None
            found: np.ndarray = file.get_tensor(array_name)
    except (OSError, ValueError, safetensors.SafetensorError, MoetoolError):
        return None
    return found


def restore_state(path: Path, name: str, policy: Learned) -> list[int] | None:
    """Restore the learned state of policy `name` from an earlier run.

    Returns:
        The residents kept with it; None if there is no file.

    Raises:
        MismatchError: the file belongs to another policy or model, or is damaged.
    """
    if not path.exists():
        return None
    advice = "remove it to start without learned state"
    try:
        require_regular(path)
        with safetensors.safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
        arrays = safetensors.numpy.load_file(path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, safetensors.SafetensorError) as error:
        raise MismatchError(f"{path} is damaged ({first_line(error)}); {advice}") from None
    found = (metadata.get("kind"), metadata.get("policy"), metadata.get("revision"))
    expected = (_KIND, name, policy.spec.revision)
    if found != expected:
        raise MismatchError(
            f"{path} holds the state of {found[1] or 'another policy'} for model {str(found[2])[:12]}, expected {name} "
            f"and {expected[2][:12]}; {advice}"
        )
    try:
        for array_name, array in arrays.items():
            if array.dtype.kind == "f" and not (array < np.inf).all():  # -inf is a valid trust: none
                raise ValueError(f"{array_name} has values that are not finite")
        residents = _residents(arrays, policy.spec) if _RESIDENTS in arrays else []
        if arrays:
            policy.restore(arrays)
    except (ValueError, KeyError) as error:
        raise MismatchError(f"{path} does not fit these options of {name} ({first_line(error)}); {advice}") from None
    return residents


def _residents(arrays: dict[str, np.ndarray], spec: ModelSpec) -> list[int]:
    """Remove the residents from a file's arrays. Raises: ValueError: they are not experts of the model."""
    found = arrays.pop(_RESIDENTS)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise ValueError(f"residents is {found.dtype} of shape {found.shape}, expected a list of keys")
    keys: list[int] = found.tolist()
    if len(set(keys)) != len(keys) or not all(0 <= key < spec.total_experts for key in keys):
        raise ValueError("residents has a key that is not an expert of the model, or a duplicate")
    return keys
