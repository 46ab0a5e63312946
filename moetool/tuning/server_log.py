"""Decisions by the manifest of a server's log, checked before a replay repeats them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moetool.base import validation as check
from moetool.base.config import parse
from moetool.base.errors import MismatchError
from moetool.base.types import ModelSpec
from moetool.caching.machine_split import SplitCosts
from moetool.trace.reader import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedDecisions:
    """Policy and settings that decided in a server with one device.

    Attributes:
        layer_slots: guaranteed slots of each layer; empty: none.
        reserved_slots: forwards, and the slots that hold no experts from there on.
        split: costs by which the host computed misses; None: the policy placed them.
        host_experts: experts that host memory held; None: all.
        split_changes: forwards, and whether the host computed misses from there on.
    """

    policy: str
    options: Mapping[str, Any]
    layer_slots: tuple[int, ...]
    reserved_slots: tuple[tuple[int, int], ...]
    split: SplitCosts | None
    host_experts: int | None
    split_changes: tuple[tuple[int, int], ...]


def read_decisions(trace: Trace) -> ServedDecisions:
    """Read what decided in the server that wrote a log.

    Raises:
        MismatchError: the trace is not a server's log, its server had several devices, or its manifest is damaged.
    """
    made = trace.manifest["provenance"]
    name, options, slots = made.get("policy"), made.get("options"), made.get("layer_slots")
    if trace.manifest["composition"]["kind"] != "log" or not isinstance(name, str) or made.get("devices") != 1:
        raise MismatchError(f"{trace.path} is not the log of a server with one device; name policies to replay instead")
    former = {"changes": "the policy changed while its server ran", "pinned": "its server pinned experts"}
    for key, what in former.items():
        if made.get(key):
            raise MismatchError(f"{trace.path}: {what}, as earlier versions could; name policies to replay")
    for key, value, kind in (("options", options, dict), ("layer_slots", slots, list)):
        check.require(isinstance(value, kind), f"manifest.provenance.{key}", value, kind.__name__)
    _check_slots(trace.spec, slots)
    split, host_experts = _split(made.get("host_compute"))
    changes = _by_forward("splits", made.get("splits", []), "0 or 1")
    check.require(split is not None or not changes, "manifest.provenance.splits", changes, "none without host_compute")
    return ServedDecisions(
        policy=name,
        options=options,
        layer_slots=tuple(slots),
        reserved_slots=tuple(_by_forward("lent", made.get("lent", []), "a number of slots")),
        split=split,
        host_experts=host_experts,
        split_changes=tuple(changes),
    )


def _split(found: Any) -> tuple[SplitCosts | None, int | None]:
    """Costs of link and host, and experts in host memory. Raises: MismatchError: the log is damaged."""
    if found is None:
        return None, None
    at = "manifest.provenance.host_compute"
    whole = isinstance(found, dict) and found.keys() == {"costs", "digest", "host_experts"}
    check.require(whole, at, found, "costs, digest and host_experts")
    costs, held = parse(SplitCosts, found["costs"], f"{at}.costs"), found["host_experts"]
    check.require(
        costs.digest == found["digest"], f"{at}.digest", found["digest"], f"that of the costs, {costs.digest}"
    )
    check.require(held is None or (type(held) is int and held > 0), f"{at}.host_experts", held, "a number of experts")
    return costs, held


def late_ends(trace: Trace) -> list[tuple[int, int]]:
    """Forwards of a server, and requests that ended after each without being in it: cancelled ones.

    Raises:
        MismatchError: the manifest is invalid.
    """
    return _by_forward("ends", trace.manifest["provenance"].get("ends", []), "a request")


def _by_forward(name: str, found: Any, what: str) -> list[tuple[int, int]]:
    """Rows of a log's manifest. Raises: MismatchError: they are not pairs of a forward and `what`, in order."""
    check.require(isinstance(found, list), f"manifest.provenance.{name}", found, "a list")
    made: list[tuple[int, int]] = []
    for i, row in enumerate(found):
        at = f"manifest.provenance.{name}.{i}"
        whole = isinstance(row, list) and len(row) == 2 and all(type(part) is int for part in row)
        check.require(whole, at, row, f"a forward and {what}")
        check.require_whole(f"{at}.0", row[0], made[-1][0] if made else 0)
        check.require_whole(f"{at}.1", row[1], 0)
        made.append((row[0], row[1]))
    return made


def _check_slots(spec: ModelSpec, layer_slots: list[Any]) -> None:
    """Raises: MismatchError where a log's guaranteed slots do not fit the model."""
    for i, value in enumerate(layer_slots):
        check.require(type(value) is int, f"manifest.provenance.layer_slots.{i}", value, "a whole number")
    if layer_slots:
        found, expected = len(layer_slots), spec.num_layers
        check.require_whole("manifest.provenance.layer_slots: layers", found, expected, expected)
    for layer, own in enumerate(layer_slots):
        check.require_whole(f"manifest.provenance.layer_slots.{layer}", own, 1, spec.num_experts_L[layer])


def measured_costs(trace: Trace) -> list[tuple[int, float, float]]:
    """Return a server's measurements (`moetool.runtime.recording.gate_log`): forwards, with seconds of a load and of
    the host.

    Raises:
        MismatchError: the manifest is invalid.
    """
    found = trace.manifest["provenance"].get("costs", [])
    check.require(isinstance(found, list), "manifest.provenance.costs", found, "a list")
    made: list[tuple[int, float, float]] = []
    for i, row in enumerate(found):
        at = f"manifest.provenance.costs.{i}"
        numbers = isinstance(row, list) and len(row) == 3 and all(type(part) in (int, float) for part in row)
        check.require(numbers, at, row, "a forward and two times")
        check.require_whole(f"{at}.0", row[0], 0)
        for part in (1, 2):
            check.require_positive(f"{at}.{part}", row[part])
        made.append((row[0], row[1], row[2]))
    return made
