"""The experts that a server of a cluster holds."""

import threading
from collections.abc import Callable, Collection, Iterator

import torch

from moetool.caching._residency import Residency
from moetool.errors import CapacityError, MoetoolError
from moetool.runtime.expert_store import ExpertStore
from moetool.types import ModelSpec


class Holding:
    """Experts in a pool that come and go while others are computed.

    Args:
        server: its number, for messages.
        held: (layer, expert) that are here from the start.
        capacity: how many may be. Those that the pool has no slot for are read from disk when they are needed.

    Attributes:
        computing: lock on pool and store, never held while waiting for another server.

    Effects: reads the held experts into the pool before it returns.

    Raises:
        CapacityError: more is held than the capacity.
        MoetoolError: an expert cannot be read.
    """

    def __init__(
        self,
        server: int,
        spec: ModelSpec,
        pool: Residency,
        store: ExpertStore,
        held: Collection[tuple[int, int]],
        capacity: int,
    ) -> None:
        if len(held) > capacity:
            raise CapacityError(
                f"server {server} is to hold {len(held)} experts and has room for {capacity}; plan again with: "
                "moetool plan placement"
            )
        self.capacity = capacity
        self.computing = threading.Lock()
        self._server, self._spec, self._pool, self._store = server, spec, pool, store
        self._changing = threading.Lock()
        self._held = frozenset(spec.expert_key(*at) for at in held)
        steps = [step for key in sorted(self._held) if (step := pool.bring(key)) is not None]
        for step in steps:
            store.load(step.key, step.slot, prefetch=False)
        for step in steps:
            store.ready(step.key, step.slot)

    def __contains__(self, key: int) -> bool:
        return key in self._held

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._held))

    def add(self, key: int, fetch: Callable[[], torch.Tensor | None]) -> tuple[bool, int]:
        """Hold an expert from now on.

        Args:
            fetch: gives its bytes from elsewhere, or None; they are then read from disk.

        Returns:
            Whether the bytes came from elsewhere, and how many there were: 0 where it is held already.

        Raises:
            CapacityError: no room.
            MoetoolError: it cannot be read.
        """
        with self._changing:
            if key in self._held:
                return False, 0
            if len(self._held) >= self.capacity:
                raise CapacityError(
                    f"server {self._server} holds {len(self._held)} experts and has room for {self.capacity}; drop one "
                    "first"
                )
            fetched = fetch()
            data = self._read(key) if fetched is None else fetched
            with self.computing:
                if (step := self._pool.bring(key)) is not None:
                    self._store.put(key, step.slot, data)
            self._held |= {key}
        return fetched is not None, data.numel()

    def remove(self, key: int) -> None:
        """Stop holding an expert, once no computation uses it."""
        with self._changing:
            self._held -= {key}
            with self.computing:
                self._pool.forget(key)

    def give_back(self, keys: Collection[int]) -> None:
        """Let go of experts that are in the pool and not held. The caller has the lock `computing`."""
        for key in keys:
            if key not in self._held:
                self._pool.forget(key)

    def bytes_of(self, key: int) -> torch.Tensor:
        """A copy of an expert, from the pool, or from disk if it is not in it. Raises: MoetoolError."""
        with self.computing:
            slot = self._pool.slot_of.get(key)
            if slot is not None:
                return self._store.bytes_of(key, slot)
        return self._read(key)

    def _read(self, key: int) -> torch.Tensor:
        """The bytes of an expert from the own disk. Raises: MoetoolError where that fails twice."""
        data = torch.zeros(self._store.files.slot_bytes, dtype=torch.uint8)
        try:
            self._store.files.read_into(key, data)
        except OSError:
            try:
                self._store.files.read_into(key, data)
            except OSError as error:
                layer, expert = self._spec.expert_of(key)
                raise MoetoolError(
                    f"cannot read expert {expert} of layer {self._spec.layer_ids_L[layer]}: {error}"
                ) from error
        return data
