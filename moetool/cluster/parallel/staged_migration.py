"""Migration in stages: experts are copied while the old placement serves, then switched to at once."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationStage:
    """Experts that change their holders together.

    Attributes:
        version: of the placement that this leads to.
        copies: (layer, expert, GPU that gets it, GPU that it is copied from).
        changes: (layer, expert, its holders from now on).
        at_batch: switched when the next batch begins, and not before.
    """

    version: int
    copies: tuple[tuple[int, int, int, int], ...]
    changes: tuple[tuple[int, int, tuple[int, ...]], ...]
    at_batch: bool = True

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "MigrationStage":
        """From its fields, as JSON has brought them."""
        return cls(
            version=data["version"],
            copies=tuple((a, b, c, d) for a, b, c, d in data["copies"]),
            changes=tuple((layer, expert, tuple(holders)) for layer, expert, holders in data["changes"]),
            at_batch=data["at_batch"],
        )

    def apply(self, placed_GLE: np.ndarray) -> None:
        """Switch."""
        for layer, expert, holders in self.changes:
            placed_GLE[:, layer, expert] = False
            placed_GLE[list(holders), layer, expert] = True


def plan_stages(
    old_GLE: np.ndarray, new_GLE: np.ndarray, slots_G: Sequence[int], *, version: int, server_G: Sequence[int]
) -> list[MigrationStage]:
    """Stages after each of which every expert has a place.

    A GPU holds its old experts and those of a stage until the switch: the double buffer is its room beyond the
    placement. Where that is enough there is one stage, and it is switched when the next batch
    begins. Otherwise stages but the last are switched as they arrive, which frees the room for the next.

    Where no expert that is left fits (replicas have taken the room that others need to pass), the one that exceeds it
    least goes all the same: a GPU then holds more than `slots_G` for one stage.

    Args:
        slots_G: experts that each GPU has room for, all layers together.
        version: of the first stage; they count up.
        server_G: the server of each GPU; copies come from the own one where they can.
    """
    changed = [(int(layer), int(expert)) for layer, expert in np.argwhere((old_GLE != new_GLE).any(axis=0))]
    # Those that only free room come first.
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
