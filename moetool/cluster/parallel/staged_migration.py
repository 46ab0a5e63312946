"""Migration in stages: experts are copied while the old placement serves, then all ranks switch at once."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationStage:
    """Experts whose holders change together.

    Attributes:
        version: version of the placement after this stage.
        copies: (layer, expert, destination GPU, source GPU).
        changes: (layer, expert, new holders).
        at_batch: whether to switch only when the next batch begins.
    """

    version: int
    copies: tuple[tuple[int, int, int, int], ...]
    changes: tuple[tuple[int, int, tuple[int, ...]], ...]
    at_batch: bool = True

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "MigrationStage":
        """Read from JSON fields."""
        return cls(
            version=data["version"],
            copies=tuple((a, b, c, d) for a, b, c, d in data["copies"]),
            changes=tuple((layer, expert, tuple(holders)) for layer, expert, holders in data["changes"]),
            at_batch=data["at_batch"],
        )

    def apply(self, placed_GLE: np.ndarray) -> None:
        """Apply the changes to a placement in place."""
        for layer, expert, holders in self.changes:
            placed_GLE[:, layer, expert] = False
            placed_GLE[list(holders), layer, expert] = True


def plan_stages(
    old_GLE: np.ndarray, new_GLE: np.ndarray, slots_G: Sequence[int], *, version: int, server_G: Sequence[int]
) -> list[MigrationStage]:
    """Plan stages that keep every expert available.

    Until the switch a GPU holds its old experts and those of the stage: the double buffer is its room beyond the
    placement. If that suffices, there is one stage, switched when the next batch begins. Otherwise all stages but the
    last are switched as they arrive, which frees room for the next.

    If no remaining expert fits (replicas occupy the room), the one that exceeds the room least goes anyway. A GPU then
    holds more than `slots_G` for one stage.

    Args:
        old_GLE, new_GLE: placements before and after, bool.
        slots_G: expert slots of each GPU, all layers together.
        version: version of the first stage; the others count up.
        server_G: the server of each GPU; copies prefer a source on the same server.
    """
    changed = [(int(layer), int(expert)) for layer, expert in np.argwhere((old_GLE != new_GLE).any(axis=0))]
    # First those that only free room.
    changed.sort(key=lambda place: bool((new_GLE[:, *place] & ~old_GLE[:, *place]).any()))
    held_G = old_GLE.sum(axis=(1, 2))
    pulls_G = np.zeros(len(held_G), np.int64)
    stages: list[MigrationStage] = []
    while changed:
        taken: list[tuple[int, int]] = []
        room_G = np.array(slots_G) - held_G
        for place in changed:
            adds_G = new_GLE[:, *place] & ~old_GLE[:, *place]
            if (room_G[adds_G] >= 1).all():
                room_G -= adds_G
                taken.append(place)
        if not taken:
            room = np.array(slots_G) - held_G
            taken = [max(changed, key=lambda place: room[new_GLE[:, *place] & ~old_GLE[:, *place]].min())]
        copies = []
        for place in taken:
            holders = np.flatnonzero(old_GLE[:, *place]).tolist()
            for g in np.flatnonzero(new_GLE[:, *place] & ~old_GLE[:, *place]).tolist():
                source = min(holders, key=lambda h: (server_G[h] != server_G[g], pulls_G[h], h))
                pulls_G[source] += 1
                copies.append((*place, g, source))
            held_G = held_G + new_GLE[:, *place] - old_GLE[:, *place].astype(np.int64)
        changes = tuple((*place, tuple(np.flatnonzero(new_GLE[:, *place]).tolist())) for place in taken)
        stages.append(
            MigrationStage(version=version + len(stages), copies=tuple(copies), changes=changes, at_batch=False)
        )
        done = set(taken)
        changed = [place for place in changed if place not in done]
    if stages:
        stages[-1] = replace(stages[-1], at_batch=True)
    return stages
