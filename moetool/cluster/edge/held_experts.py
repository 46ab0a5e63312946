"""The experts that a server of a cluster holds."""

import threading
from collections.abc import Callable, Collection, Iterator

import torch

from moetool.base.errors import CapacityError, MoetoolError
from moetool.base.types import ModelSpec
from moetool.caching.devices import Pool
from moetool.runtime.experts.device_stores import Store


class LocalExperts:
    """Experts in a pool that can be added and removed while others are computed.

    Args:
        server: its number, for messages.
        held: (layer, expert) held from the start.
        capacity: limit of held experts, at least those of the start. Those without a slot are read from disk on demand.

    Attributes:
        computing: lock on pool and store, never held while waiting for another server.

    Effects: reads the held experts into the pool before it returns.

    Raises:
        MoetoolError: an expert cannot be read.
    """

    def __init__(
        self, server: int, spec: ModelSpec, pool: Pool, store: Store, held: Collection[tuple[int, int]], capacity: int
    ) -> None:
        assert len(held) <= capacity  # `worker_settings` checks the plan
        self.capacity = capacity
        self.computing = threading.Lock()
        self._server, self._spec, self._pool, self._store = server, spec, pool, store
        self._changing = threading.Lock()
        self._held = frozenset(spec.expert_key(*at) for at in held)
        steps = [step for key in sorted(self._held) if (step := pool.load_into_free_slot(key)) is not None]
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
            fetch: returns its bytes from another server, or None to read them from disk.

        Returns:
            Whether the bytes came from another server, and their number: 0 if it is held already.

        Raises:
            CapacityError: the capacity is used up.
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
                if (step := self._pool.load_into_free_slot(key)) is not None:
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
        """Evict experts from the pool that are not held. The caller has the lock `computing`."""
        for key in keys:
            if key not in self._held:
                self._pool.forget(key)

    def bytes_of(self, key: int) -> torch.Tensor:
        """Return a copy of an expert's bytes (uint8), from the pool, else from disk. Raises: MoetoolError."""
        with self.computing:
            slot = self._pool.slot(key)
            if slot is not None:
                return self._store.bytes_of(key, slot)
        return self._read(key)

    def _read(self, key: int) -> torch.Tensor:
        """Read an expert from the server's own disk. Raises: MoetoolError: the read failed twice."""
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
