"""Measured costs in the user's cache folder, by model, machine and whatever else they depend on."""

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch

from moetool.base import durable
from moetool.base.config import parse
from moetool.base.errors import MismatchError, MoetoolError, UsageError, first_line
from moetool.base.json_files import read_json
from moetool.models.libraries import read_machine
from moetool.models.loading import LoadedModel
from moetool.runtime.warm_start import costs_file

_LOG = logging.getLogger(__name__)
T = TypeVar("T")


def kept_costs(loaded: LoadedModel, kind: type[T], facts: Mapping[str, Any], measure: Callable[[], T]) -> T:
    """Return the kept costs, or measure and keep them.

    A file that is damaged, or of another machine, is replaced, with a warning.

    Args:
        kind: dataclass of the costs.
        facts: values on which they depend, beside model, machine, device, threads and data type.

    Effects: writes a file of the cache folder.
    """
    facts = {**_facts(loaded), "costs": kind.__name__, **facts}
    path = costs_file(loaded.spec, hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12])
    try:
        return _read(path, kind, facts)
    except FileNotFoundError:
        pass
    except (MoetoolError, OSError) as error:
        _LOG.warning("costs are measured again: %s", first_line(error))
    costs = measure()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        values = asdict(costs)  # type: ignore[call-overload]
        durable.write_text(path, json.dumps({"measured_on": facts, "costs": values}, indent=1) + "\n")
    except (MoetoolError, OSError) as error:
        _LOG.warning("measured costs are not kept: %s", error)
    return costs


def _facts(loaded: LoadedModel) -> dict[str, Any]:
    assert loaded.files is not None
    device = loaded.device
    return {
        "machine": asdict(read_machine()),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "threads": torch.get_num_threads(),
        "dtype": str(loaded.model.dtype),
        "expert_bytes": [loaded.files.stored_bytes, loaded.files.slot_bytes],
    }


def _read(path: Path, kind: type[T], facts: Mapping[str, Any]) -> T:
    """Raises: MismatchError: the file is damaged, or was measured elsewhere; OSError."""
    kept = read_json(path, advice="it is replaced")
    if kept.get("measured_on") != facts:
        raise MismatchError(f"{path} was measured on another machine or with other experts")
    try:
        return parse(kind, kept.get("costs", {}), "costs")
    except UsageError as error:
        raise MismatchError(f"{path} is damaged ({first_line(error)})") from None
