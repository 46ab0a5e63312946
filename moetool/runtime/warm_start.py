"""Residents and statistics of the cache policy, kept in the user's cache folder from one server to the next."""

import logging
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from moetool.assets import cache_folder
from moetool.errors import MoetoolError
from moetool.runtime.policy_state import Learned, restore_state, save_state
from moetool.types import ModelSpec

_LOG = logging.getLogger(__name__)
MOST_BYTES = 1 << 30
"""All files together; beyond it the oldest go."""
_SUFFIX = ".warm.safetensors"


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


def kept_models() -> list[KeptModel]:
    """List the files of the cache folder, newest first."""
    found = []
    for path in cache_folder().glob(f"*{_SUFFIX}"):
        try:
            facts = path.stat()
        except OSError:  # another process has removed it
            continue
        name = path.name.removesuffix(_SUFFIX)
        found.append(KeptModel(model=name, path=path, num_bytes=facts.st_size, changed=facts.st_mtime))
    return sorted(found, key=lambda kept: -kept.changed)


class WarmStart:
    """The file of one checkpoint, by its name and revision, and one policy.

    Two servers of one model each replace the whole file; the later one counts.

    Args:
        learned: the policy, or those of several devices.
        residents: gives the keys that have a slot, the longest resident first.
    """

    def __init__(
        self, spec: ModelSpec, policy: str, learned: Learned, residents: Callable[[], Collection[int]]
    ) -> None:
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(spec.name).name).strip("-.") or "model"
        self.path = cache_folder() / f"{name}-{spec.revision[-12:]}-{policy}{_SUFFIX}"
        self._spec, self._policy, self._learned, self._residents = spec, policy, learned, residents
        self._warned = False

    def restore(self) -> Sequence[int]:
        """Give the policy what earlier runs learned.

        A file that cannot be used is left alone, with one warning; it is replaced when this run is saved.

        Returns:
            Keys of the experts that were resident, the longest resident first.
        """
        try:
            return restore_state(self.path, self._policy, self._learned) or []
        except MoetoolError as error:
            _LOG.warning("the server starts cold: %s", error)
            return []

    def save(self) -> None:
        """Replace the file, and keep the folder within its bound. A disk that fails costs a warning and no more."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            save_state(self.path, self._policy, self._learned, list(self._residents()))
            total = 0
            for kept in kept_models():
                total += kept.num_bytes
                if total > MOST_BYTES:
                    kept.path.unlink(missing_ok=True)
        except (MoetoolError, OSError) as error:
            if not self._warned:
                _LOG.warning("warm-start state not saved: %s", error)
            self._warned = True
