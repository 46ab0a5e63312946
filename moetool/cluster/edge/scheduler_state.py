"""State of a scheduler in a file, from which the next one continues."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moetool.base import durable
from moetool.base.errors import MismatchError, MoetoolError, first_line
from moetool.base.json_files import read_json
from moetool.base.types import Cluster, ModelSpec
from moetool.base.validation import require, require_number, require_whole
from moetool.placement.plan import Place

_KIND, _SCHEMA_VERSION = "scheduler_state", 3
_ADVICE = "remove it or give another file"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerState:
    """The state of a scheduler.

    Attributes:
        decided_s: time of its last decision, in seconds since 1970.
        target: experts of each server after the running migration; None: none runs.
        held: experts of each server; None: unknown.
        statistics: state of `moetool.cluster.edge.load_statistics.Statistics`.
        decisions: the last ones, as JSON objects; with a target, the last one is under way.
    """

    decided_s: float
    target: Mapping[int, frozenset[Place]] | None
    held: Sequence[frozenset[Place]] | None
    statistics: dict[str, Any]
    decisions: list[dict[str, Any]]

    def save(self, path: Path, spec: ModelSpec, cluster: Cluster) -> None:
        """Write it atomically."""
        values = {
            "kind": _KIND,
            "schema_version": _SCHEMA_VERSION,
            "revision": spec.revision,
            "servers": [server.name for server in cluster.servers],
            "decided_s": self.decided_s,
            "target": None if self.target is None else {str(n): sorted(places) for n, places in self.target.items()},
            "held": None if self.held is None else [sorted(places) for places in self.held],
            "statistics": self.statistics,
            "decisions": self.decisions,
        }
        durable.write_text(path, json.dumps(values, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: Path, spec: ModelSpec, cluster: Cluster) -> "SchedulerState":
        """Read it. Call within `reading`.

        Raises:
            MismatchError: it is not a state, or belongs to another model or cluster.
        """
        values = read_json(path, advice=_ADVICE)
        found = values["kind"], values["schema_version"]
        if found != (_KIND, _SCHEMA_VERSION):
            expected = f"{_KIND} of version {_SCHEMA_VERSION}"
            raise MismatchError(f"{path} holds {found[0]} of version {found[1]}, expected {expected}; {_ADVICE}")
        if values["revision"] != spec.revision:
            raise MismatchError(f"{path} belongs to another model than {spec.name}; {_ADVICE}")
        if values["servers"] != [server.name for server in cluster.servers]:
            raise MismatchError(f"{path} belongs to the servers {', '.join(values['servers'])}; {_ADVICE}")
        target, held, servers = values["target"], values["held"], len(cluster.servers)
        require_number("decided_s", values["decided_s"])
        require(held is None or len(held) == servers, "held", held, f"the experts of {servers} servers")
        known = {str(n) for n in range(servers)}
        require(target is None or set(target) <= known, "target", target, f"the experts of {servers} servers")
        return cls(
            decided_s=float(values["decided_s"]),
            target=None if target is None else {int(n): _places(places, spec) for n, places in target.items()},
            held=None if held is None else [_places(places, spec) for places in held],
            statistics=values["statistics"],
            decisions=values["decisions"],
        )


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn any error of a damaged file into a `MismatchError`."""
    try:
        yield
    except MoetoolError as error:
        if str(path) in str(error):
            raise
        raise MismatchError(f"{path} is not a scheduler state ({first_line(error)}); {_ADVICE}") from None
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise MismatchError(f"{path} is not a scheduler state ({first_line(error)}); {_ADVICE}") from None


def _places(places: Any, spec: ModelSpec) -> frozenset[Place]:
    found = frozenset((layer, expert) for layer, expert in places)
    for layer, expert in found:
        require(type(layer) is type(expert) is int, "held", [layer, expert], "layer and expert")
        require_whole("held: layer", layer, 0, spec.num_layers - 1)
        require_whole("held: expert", expert, 0, spec.num_experts_L[layer] - 1)
    return found
