"""Warm-start state in the user's cache folder: residents and policy statistics."""

import logging
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moetool.base import durable
from moetool.base.assets import cache_folder
from moetool.base.errors import MoetoolError
from moetool.base.types import ModelSpec
from moetool.runtime.policy_state import Learned, read_array, restore_state, save_state

_LOG = logging.getLogger(__name__)
MOST_BYTES = 1 << 30
"""Limit of all files together, prefixes apart; beyond it the oldest are removed."""
_SUFFIX = ".warm.safetensors"
PREFIXES_SUFFIX = ".prefixes"
_COSTS_SUFFIX = ".costs.json"


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


def kept_routes(spec: ModelSpec) -> np.ndarray | None:
    """Expert keys [N, sum of top-k] of the newest tokens that a server of the model kept; None if there are none."""
    routes_NP = read_array(_file(spec, "foresight"), "foresight", spec.revision, "path_RP")
    if routes_NP is None or routes_NP.shape[1:] != (sum(spec.top_k_L),) or routes_NP.dtype.kind != "i":
        return None
    layer_P = np.repeat(np.arange(spec.num_layers), spec.top_k_L)
    known = (routes_NP // spec.num_experts == layer_P).all(axis=1)
    return np.asarray(routes_NP[known])


def prefix_file(spec: ModelSpec, dtype: object, device: object) -> Path:
    """The file in the cache folder that keeps a model's prefixes of a data type and device.

    `moetool.runtime.kv.kept_prefixes` writes it. No limit applies: it is as large as the pages that a server kept.
    """
    kind = f"{dtype}-{device}".removeprefix("torch.").partition(":")[0]
    return cache_folder() / f"{_name(spec)}-{kind}{PREFIXES_SUFFIX}"


def costs_file(spec: ModelSpec, digest: str) -> Path:
    """The file in the cache folder that keeps costs measured with a model; `moetool.runtime.kept_costs` writes it."""
    return cache_folder() / f"{_name(spec)}-{digest}{_COSTS_SUFFIX}"


def _file(spec: ModelSpec, policy: str) -> Path:
    return cache_folder() / f"{_name(spec)}-{policy}{_SUFFIX}"


def _name(spec: ModelSpec) -> str:
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(spec.name).name).strip("-.") or "model"
    return f"{name}-{spec.revision[-12:]}"


class WarmStart:
    """State file of one checkpoint, by name and revision, and of one policy.

    Two servers of one model each replace the whole file; the later one wins.

    Args:
        learned: the policy, or those of several devices.
        residents: returns the keys with a slot, the longest resident first.
    """

    def __init__(
        self, spec: ModelSpec, policy: str, learned: Learned, residents: Callable[[], Collection[int]]
    ) -> None:
        self.path = _file(spec, policy)
        self._policy, self._learned, self._residents = policy, learned, residents
        self._warned = False

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
            save_state(self.path, self._policy, self._learned, list(self._residents()))
            total = 0
            for kept in kept_models([_SUFFIX]):
                total += kept.num_bytes
                if total > MOST_BYTES:
                    kept.path.unlink(missing_ok=True)
        except (MoetoolError, OSError) as error:
            if not self._warned:
                _LOG.warning("warm-start state not saved: %s", error)
            self._warned = True
