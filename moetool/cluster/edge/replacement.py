"""Observations of an edge cluster for re-placement, and its servers' actual placements."""

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from itertools import combinations

import numpy as np

from moetool.base.errors import CapacityError
from moetool.base.types import Cluster, Gpu, ModelSpec, Server
from moetool.cluster.edge.load_statistics import Statistics
from moetool.placement.decide import InForce, Observed, ReplacementCosts
from moetool.placement.migration import order_moves
from moetool.placement.plan import Move, Place

_ROUND = 64
"""Limit of copies per round; servers receive the new placement between rounds."""
_ROUND_S = 0.5
"""Limit of a round's transfer seconds, by known link rates."""
_TRIALS = 8
"""Limit of trial copies over each link."""
_LINK_S = 0.1
"""Limit of their seconds, by the plan."""
_TRIAL_LINKS = 8
"""Limit of links that a server tries."""
_TRIAL_S = 0.05
"""Longest trial copy, by the plan."""


def pooled(spec: ModelSpec, cluster: Cluster, slots: Mapping[int, int]) -> Cluster:
    """Running servers for planners: one GPU each.

    A worker spreads its experts over its GPUs itself. Host memory does not count, because it computes only from pools.

    Args:
        slots: expert slots of each server, by number.
    """
    servers = []
    for n, room in sorted(slots.items()):
        own = cluster.servers[n]
        gpu = Gpu(
            memory_bytes=room * spec.slot_bytes,
            host_to_device_bytes_s=min(gpu.host_to_device_bytes_s for gpu in own.gpus),
            speed=sum(gpu.speed for gpu in own.gpus),
        )
        servers.append(Server(name=own.name, gpus=(gpu,), host_memory_bytes=0, disk_bytes_s=own.disk_bytes_s))
    there = {server.name for server in servers}
    links = tuple(link for link in cluster.links if {*link.between} <= there)
    return replace(cluster, servers=tuple(servers), links=links)


def observe(
    statistics: Statistics, cluster: Cluster, held: Mapping[int, Set[Place]], slots: Mapping[int, int], horizon_s: float
) -> tuple[Observed, InForce, ReplacementCosts] | None:
    """Inputs of a decision; None if too little was observed.

    Args:
        cluster: the plan's.
        held: experts of each running server; together they hold every expert.
        slots: expert slots of each running server.
    """
    servers = tuple(sorted(slots))
    tokens_NLE, folds = statistics.tokens_of(servers), statistics.folds(servers)
    if not folds or not statistics.tokens_s:
        return None
    spec = _in_slots(statistics.spec)
    machines = pooled(spec, statistics.measured(cluster), slots)
    placed_NLE = as_array(spec, [held[n] for n in servers])
    horizon_tokens = statistics.tokens_s * horizon_s
    return (
        Observed(tokens_GLE=tokens_NLE, held_out=tuple(folds), horizon_tokens=horizon_tokens, source="past"),
        InForce(spec=spec, cluster=machines, placed_GLE=placed_NLE),
        ReplacementCosts(
            latency=statistics.latency(machines, servers),
            call_s=statistics.call_s,
            control_s=lambda moves: statistics.round_s * len(round_transfers(by_server(moves, servers), held, slots)),
        ),
    )


def steps_to(
    spec: ModelSpec, cluster: Cluster, held: Mapping[int, Set[Place]], target: Mapping[int, Set[Place]]
) -> list[Move]:
    """Moves to an earlier decision's target; none if the capacity is too small.

    Args:
        cluster: result of `pooled` for the servers in `target`.
    """
    spec, servers = _in_slots(spec), sorted(target)
    old_NLE, new_NLE = (as_array(spec, [places.get(n, set()) for n in servers]) for places in (held, target))
    try:
        return by_server(order_moves(spec, cluster, old_NLE, new_NLE), servers)
    except CapacityError:
        return []


def next_round(
    steps: Sequence[Move],
    held: Mapping[int, Set[Place]],
    slots: Mapping[int, int],
    copies: int = _ROUND,
    seconds: float = _ROUND_S,
) -> tuple[list[Move], list[Move], int, int]:
    """Select the first moves that can run together: first all drops, then all copies.

    A drop of an expert whose only other holder gets it in the same round waits for the next round.

    Args:
        steps: moves in a valid order, with `gpu` as the server.
        held, slots: experts and slots of the running servers.
        copies, seconds: limits of a round; one copy is always allowed.

    Returns:
        Drops, copies, the number of steps used, and the number of these skipped for lack of capacity.
    """
    now = {n: set(places) for n, places in held.items()}
    room = {n: slots[n] - len(places) for n, places in now.items()}
    coming: dict[int, set[Place]] = {n: set() for n in now}
    made: tuple[list[Move], list[Move]] = [], []
    done = skipped = 0
    spent_s = 0.0
    for step in steps:
        n, at = step.gpu, step.place
        if step.kind == "copy":
            if made[1] and (len(made[1]) == copies or spent_s + step.seconds > seconds):
                break
            if at in coming[n]:
                skipped += 1
            elif at not in now[n] and room[n] > 0:
                room[n] -= 1
                spent_s += step.seconds
                coming[n].add(at)
                made[1].append(step)
            elif at not in now[n]:
                skipped += 1
        elif at in coming[n]:
            break
        elif at in now[n]:
            if any(at in coming[m] for m in now) and not any(at in now[m] for m in now if m != n):
                break
            if any(at in now[m] for m in now if m != n):  # otherwise the head refuses it
                now[n].discard(at)
                room[n] += 1
            made[0].append(step)
        done += 1
    return *made, done, skipped


def trial_copies(
    statistics: Statistics, cluster: Cluster, held: Mapping[int, Set[Place]]
) -> list[tuple[int, Place, int]]:
    """Copies (server, place, source) that would measure links between running servers not used since a decision.

    A link on which a copy takes long by the plan is left out: its rate outweighs everything else.

    Args:
        cluster: the plan's.
        held: experts of each running server.
    """
    known, copies, asked = statistics.moved_between, [], Counter[int]()
    for a, b in combinations(sorted(held), 2):
        bytes_s, latency_s = cluster.link(a, b)
        copy_s = latency_s + statistics.spec.slot_bytes / bytes_s
        server, source = (a, b) if (a + b) % 2 else (b, a)  # about equally many at each server
        if frozenset((a, b)) in known or copy_s > _TRIAL_S or asked[server] >= _TRIAL_LINKS:
            continue
        asked[server] += 1
        number = sum(n * copy_s <= _LINK_S for n in range(1, _TRIALS + 1))
        copies += [(server, place, source) for place in sorted(held[source])[:number]]
    return copies


def round_transfers(
    steps: Sequence[Move], held: Mapping[int, Set[Place]], slots: Mapping[int, int]
) -> list[Mapping[int, float]]:
    """Seconds of transfer to each server in each round that moves take (`next_round`)."""
    now, transfers_s = {n: set(places) for n, places in held.items()}, list[Mapping[int, float]]()
    while steps:
        drops, copies, done, _ = next_round(steps, now, slots)
        for step in drops:
            if any(step.place in places for n, places in now.items() if n != step.gpu):  # else the head refuses it
                now[step.gpu].discard(step.place)
        round_s = dict.fromkeys(now, 0.0)
        for step in copies:
            now[step.gpu].add(step.place)
            round_s[step.gpu] += step.seconds
        steps = steps[done:]
        transfers_s.append(round_s)
    return transfers_s


def migration_s(transfers_s: Sequence[Mapping[int, float]], round_s: float, share: float) -> float:
    """Expected seconds of a migration, with pauses between its rounds.

    Servers transfer at once, and a round begins when the one before has taken its share of time.

    Args:
        transfers_s: result of `round_transfers`.
        round_s: seconds of a round besides transfer.
        share: share of time in which migration may use links.
    """
    rounds_s = [round_s + max(one_s.values()) for one_s in transfers_s]
    paced_s = [max(took_s, sum(one_s.values()) / share) for took_s, one_s in zip(rounds_s, transfers_s, strict=True)]
    return sum(paced_s[:-1]) + sum(rounds_s[-1:])


def by_server(moves: Sequence[Move], servers: Sequence[int]) -> list[Move]:
    """The same moves, with the server's number in the plan as `gpu`.

    Args:
        servers: numbers of the running servers.
    """
    return [replace(move, gpu=servers[move.gpu]) for move in moves]


def as_array(spec: ModelSpec, held: Sequence[Set[Place]]) -> np.ndarray:
    """Convert places to a placement [N, L, E], bool."""
    placed_NLE = np.zeros((len(held), spec.num_layers, spec.num_experts), bool)
    for n, places in enumerate(held):
        for layer, expert in places:
            placed_NLE[n, layer, expert] = True
    return placed_NLE


def places_of(placed_LE: np.ndarray) -> list[Place]:
    """Convert one server's placement [L, E] to (layer, expert) pairs."""
    return [(layer, expert) for layer, expert in np.argwhere(placed_LE).tolist()]


def _in_slots(spec: ModelSpec) -> ModelSpec:
    """Return the spec with every expert as large as a slot."""
    return replace(spec, expert_bytes_L=(spec.slot_bytes,) * spec.num_layers)
