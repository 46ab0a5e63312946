"""Warm-start state in the user's cache folder: residents, policy statistics and the policy in force."""

import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moetool.base import durable
from moetool.base.assets import cache_folder
from moetool.base.errors import MoetoolError
from moetool.base.types import ModelSpec
from moetool.caching.policy_changes import CombinedPolicyState, PolicyChanges, PolicyChoice
from moetool.runtime.policy_state import Learned, read_array, read_facts, restore_state, save_state
from moetool.runtime.recording.live_oracle import CANDIDATES

_LOG = logging.getLogger(__name__)
MOST_BYTES = 1 << 30
"""Limit of all files together, prefixes apart; beyond it the oldest are removed."""
_SUFFIX = ".warm.safetensors"
PREFIXES_SUFFIX = ".prefixes"
_COSTS_SUFFIX = ".costs.json"
_ALL = "auto"
"""Policy name in a file with the state of all policies that may take over, and the one in force at the end."""
_REMEMBERED = (*CANDIDATES, PolicyChoice("lru"))
_LEAST_RATIO = 0.8
"""Smallest ratio of two pool sizes for which one policy is assumed best for both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptModel:
    """One file of the cache folder.

    Attributes:
        model: its name, which `remove` takes.
        changed: seconds since 1970.
    """

    model: str
    path: Path
    num_bytes: int
    changed: float


def kept_models(
    suffixes: Sequence[str] = (_SUFFIX, PREFIXES_SUFFIX, PREFIXES_SUFFIX + durable.PARTIAL, _COSTS_SUFFIX),
) -> list[KeptModel]:
    """List the files of the cache folder, newest first, with what a killed server left of its prefixes."""
    found = []
    for path in (path for suffix in suffixes for path in cache_folder().glob(f"*{suffix}")):
        try:
            facts = path.stat()
        except OSError:  # another process removed it
            continue
        name = path.name.removesuffix(_SUFFIX)
        found.append(KeptModel(model=name, path=path, num_bytes=facts.st_size, changed=facts.st_mtime))
    return sorted(found, key=lambda kept: -kept.changed)


def policy_in_force(spec: ModelSpec, num_slots: int) -> PolicyChoice | None:
    """The policy in force at the end of the model's last server, among those that may take over.

    None if none is kept, its file is damaged, or its pool had another size.
    """
    facts = read_facts(_file(spec, _ALL), _ALL, spec.revision)
    slots = int(text) if (text := facts.get("slots", "")).isdecimal() else 0
    if not _LEAST_RATIO <= num_slots / max(slots, 1) <= 1 / _LEAST_RATIO:
        return None
    kept = (facts.get("in_force"), facts.get("pool"))
    return next((choice for choice in _REMEMBERED if (choice.policy, choice.pool) == kept), None)


def kept_routes(spec: ModelSpec) -> np.ndarray | None:
    """Expert keys [N, sum of top-k] of the newest tokens that a server of the model kept; None if there are none."""
    for policy, array_name in ((_ALL, "foresight/path_RP"), ("foresight", "path_RP")):
        routes_NP = read_array(_file(spec, policy), policy, spec.revision, array_name)
        if routes_NP is not None and routes_NP.shape[1:] == (sum(spec.top_k_L),) and routes_NP.dtype.kind == "i":
            layer_P = np.repeat(np.arange(spec.num_layers), spec.top_k_L)
            known = (routes_NP // spec.num_experts == layer_P).all(axis=1)
            return np.asarray(routes_NP[known])
    return None


def prefix_file(spec: ModelSpec, dtype: object, device: object) -> Path:
    """The file in the cache folder that keeps a model's prefixes of a data type and device.

    `moetool.runtime.kv.kept_prefixes` writes it. No limit applies: it is as large as the pages that a server kept.
    """
    kind = f"{dtype}-{device}".removeprefix("torch.").partition(":")[0]
    return cache_folder() / f"{_name(spec)}-{kind}{PREFIXES_SUFFIX}"


def costs_file(spec: ModelSpec, digest: str) -> Path:
    """The file in the cache folder that keeps costs measured with a model; `moetool.runtime.split_costs` writes it."""
    return cache_folder() / f"{_name(spec)}-{digest}{_COSTS_SUFFIX}"


def _file(spec: ModelSpec, policy: str) -> Path:
    return cache_folder() / f"{_name(spec)}-{policy}{_SUFFIX}"


def _name(spec: ModelSpec) -> str:
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(spec.name).name).strip("-.") or "model"
    return f"{name}-{spec.revision[-12:]}"


class WarmStart:
    """State file of one checkpoint, by name and revision, and of one policy or all that may take over.

    Two servers of one model each replace the whole file; the later one wins.

    Args:
        learned: the policy, or those of several devices.
        residents: returns the keys with a slot, the longest resident first.
        facts: returns values kept with it.
    """

    def __init__(
        self,
        spec: ModelSpec,
        policy: str,
        learned: Learned,
        residents: Callable[[], Collection[int]],
        facts: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        self.path = _file(spec, policy)
        self._policy, self._learned, self._residents, self._facts = policy, learned, residents, facts
        self._warned = False

    @classmethod
    def of_all(cls, changes: PolicyChanges, residents: Callable[[], Collection[int]], num_slots: int) -> "WarmStart":
        """The file of all policies that may take over, and of the one in force (`policy_in_force`)."""
        known = {changes.current.policy, *(choice.policy for choice in _REMEMBERED)}

        def facts() -> dict[str, str]:
            now = changes.current
            return {"in_force": now.policy, "pool": now.pool, "slots": str(num_slots)}

        return cls(changes.spec, _ALL, CombinedPolicyState(changes, known), residents, facts)

    def restore(self) -> Sequence[int]:
        """Restore the policy's state from earlier runs.

        An unusable file causes one warning; `save` replaces it.

        Returns:
            Keys of the experts that were resident, the longest resident first.
        """
        try:
            return restore_state(self.path, self._policy, self._learned) or []
        except MoetoolError as error:
            _LOG.warning("the server starts without warm state: %s", error)
            return []

    def save(self) -> None:
        """Replace the file, and keep the folder's warm state within its limit. A disk failure only causes a warning."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            save_state(self.path, self._policy, self._learned, list(self._residents()), self._facts())
            total = 0
            for kept in kept_models([_SUFFIX]):
                total += kept.num_bytes
                if total > MOST_BYTES:
                    kept.path.unlink(missing_ok=True)
        except (MoetoolError, OSError) as error:
            if not self._warned:
                _LOG.warning("warm-start state not saved: %s", error)
            self._warned = True
