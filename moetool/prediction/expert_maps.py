"""Expert maps: gate distributions of earlier iterations, and the search for those most similar to the running one.

An iteration is one request in one forward: its prompt, or one new token. Its *map* holds a distribution over the
experts for each MoE layer, with the iteration's *embedding*, the mean output of the embedding layer. Two searches find
the stored iteration most similar to the running one: before the first gate by embedding (`MapSearch.by_embedding`),
then by the observed gates (`MapSearch.by_trajectory`).

Source: FineMoE (Yu et al., EuroSys 2026), sections 4.1 to 4.4; each function names its equation.

`einsum` sums in one order with any number of threads, so a replay finds the server's map. Ties go to the lower row.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from moetool.base.errors import UsageError

Sizing = int | Literal["2LJ", "LJlnLJ/2"]
"""A number of maps, or one of the paper's two sizings by the L * J experts of the model."""


def capacity_of(sizing: Sizing, num_layers: int, num_experts: int) -> int:
    """Return the capacity of a store in maps.

    Source: section 4.4: 2LJ maps "guarantee" a similarity of 75 % and LJ ln(LJ) / 2 one of 98 %. Both follow from
    covering a sphere of LJ points, unrelated to a model's maps; only the sizes are used.

    Raises:
        UsageError: the capacity is below one map.
    """
    product = num_layers * num_experts
    if sizing == "2LJ":
        return 2 * product
    if sizing == "LJlnLJ/2":
        return max(1, math.ceil(product * math.log(product) / 2))
    if sizing < 1:
        raise UsageError(f"a store of {sizing} expert maps is empty; give it at least 1, 2LJ or LJlnLJ/2")
    return sizing


def distribution(scores_TE: np.ndarray) -> np.ndarray:
    """Return P of section 4.1: a router's scores as probabilities; sigmoid scores are divided by their sum.

    Shapes: float32 [T, E] -> float32 [T, E]; rows of zeros become uniform.
    """
    total_T1 = scores_TE.sum(axis=1, keepdims=True, dtype=np.float32)
    uniform = np.float32(1 / scores_TE.shape[1])
    found: np.ndarray = np.where(total_T1 > 0, scores_TE / np.maximum(total_T1, np.float32(1e-30)), uniform)
    return found.astype(np.float32, copy=False)


def top_mass(experts_TK: np.ndarray, weights_TK: np.ndarray | None, num_experts: int) -> np.ndarray:
    """Return P from chosen experts only: their shares of the weights, or equal shares; 0 for others.

    Shapes: returns float32 [T, E].
    """
    mass_TE = np.zeros((len(experts_TK), num_experts), np.float32)
    weights_TK = np.ones(experts_TK.shape, np.float32) if weights_TK is None else np.abs(weights_TK)
    total_T1 = weights_TK.sum(axis=1, keepdims=True)
    shares_TK = np.where(total_T1 > 0, weights_TK / np.maximum(total_T1, 1e-30), 1 / experts_TK.shape[1])
    np.put_along_axis(mass_TE, experts_TK.astype(np.int64), shares_TK.astype(np.float32), axis=1)
    return mass_TE


def threshold(score: float) -> float:
    """Return δ of section 4.3, clip(1 - score, 0, 1): a worse match prefetches more probability mass."""
    return max(0.0, min(1.0 - score, 1.0))


def select(chance_E: np.ndarray, mass: float, at_least: int) -> list[int]:
    """Return the fewest experts that hold `mass` of the probability, at least K (Eqs. 6 to 8), likeliest first.

    All experts are selected if they hold less together. Ties go to the lower number.
    """
    order_E = np.argsort(-chance_E, kind="stable")
    held_E = np.cumsum(chance_E[order_E], dtype=np.float64)
    needed = int(np.searchsorted(held_E, mass - 1e-6)) + 1  # the sum of float32 shares may fall short of 1
    return order_E[: max(needed, at_least)].tolist()


class MapStore:
    """At most `capacity` maps, each with its embedding and the next iteration of its request.

    Args:
        width: width of the embeddings; 0 without embeddings, which disables the search by embedding.
        distance: d of RDY: number of layers searched by embedding.

    Attributes:
        size: number of stored maps.
        maps_LCE: float32, layer-major, so that a search reads one block per layer; rows from `size` on are unused.
        embedding_CD: float32, rows of length 1.
        next_C: int32, row of the same request's next iteration, or -1 if there is none or it was replaced.
        squares_LC: float32, squared norm of each map up to a layer.
    """

    def __init__(self, num_layers: int, num_experts: int, capacity: int, width: int, distance: int) -> None:
        self.capacity = capacity
        self.distance = min(distance, num_layers)
        self.size = 0
        self.maps_LCE = np.zeros((num_layers, 0, num_experts), np.float32)
        self.embedding_CD = np.zeros((0, width), np.float32)
        self.next_C = np.zeros(0, np.int32)
        self._last_C = np.zeros(0, np.int32)  # row of the previous iteration
        self.squares_LC = np.zeros((num_layers, 0), np.float32)

    @classmethod
    def of(
        cls, maps_LCE: np.ndarray, embedding_CD: np.ndarray, next_C: np.ndarray, *, capacity: int, distance: int
    ) -> "MapStore":
        """Return a store over these arrays without a copy (also of a memory-mapped file); `copy` it to add maps.

        Raises:
            ValueError: the arrays are inconsistent, or hold more than `capacity` maps.
        """
        if maps_LCE.ndim != 3 or embedding_CD.ndim != 2 or next_C.ndim != 1:
            raise ValueError(f"maps of shape {maps_LCE.shape}, {embedding_CD.shape}, {next_C.shape}")
        num_layers, size, num_experts = maps_LCE.shape
        if next_C.dtype.kind != "i":
            raise ValueError(f"next_C is {next_C.dtype}, expected whole numbers")
        if size > capacity or len(embedding_CD) != size or len(next_C) != size:
            raise ValueError(f"{size} maps, {len(embedding_CD)} embeddings, {len(next_C)} links, room for {capacity}")
        if size and not -1 <= int(next_C.min()) <= int(next_C.max()) < size:
            raise ValueError("links to missing maps")
        for name, array, dtype in (("maps_LCE", maps_LCE, np.float32), ("embedding_CD", embedding_CD, np.float32)):
            if array.dtype != dtype:
                raise ValueError(f"{name} is {array.dtype}, expected {np.dtype(dtype)}")
        made = cls(num_layers, num_experts, capacity, embedding_CD.shape[1], distance)
        made.size = size
        made.maps_LCE, made.embedding_CD, made.next_C = maps_LCE, embedding_CD, next_C.astype(np.int32)
        made._last_C = np.full(size, -1, np.int32)
        linked = np.flatnonzero(made.next_C >= 0)
        made._last_C[made.next_C[linked]] = linked
        made.squares_LC = np.cumsum(np.einsum("lce,lce->lc", maps_LCE, maps_LCE), axis=0, dtype=np.float32)
        if not (np.isfinite(made.squares_LC).all() and np.isfinite(embedding_CD).all()):
            raise ValueError("maps or embeddings that are not finite")
        return made

    def copy(self) -> "MapStore":
        """Return an independent copy of the store."""
        arrays = {name: array.copy() for name, array in self.arrays().items()}
        return MapStore.of(**arrays, capacity=self.capacity, distance=self.distance)

    def arrays(self) -> dict[str, np.ndarray]:
        """Return arguments of `of`: maps_LCE, embedding_CD and next_C of the stored maps."""
        size = self.size
        return {
            "maps_LCE": np.ascontiguousarray(self.maps_LCE[:, :size]),
            "embedding_CD": self.embedding_CD[:size],
            "next_C": self.next_C[:size],
        }

    def redundancy(self, searches: Sequence["MapSearch"]) -> np.ndarray:
        """Return RDY of section 4.4: the redundancy of each stored map with each new one, float64 [B, C].

        RDY = d/L * Eq. 4 + (L-d)/L * Eq. 5 over all layers. Without embeddings it is Eq. 5 alone.
        """
        num_layers = len(self.maps_LCE)
        share = self.distance / num_layers if self.embedding_CD.shape[1] else 0.0
        return np.stack([share * s.semantic_C() + (1 - share) * s.trajectory_C() for s in searches])

    def add(self, searches: Sequence["MapSearch"], after: Sequence[int]) -> list[int]:
        """Store the maps of complete iterations of one forward.

        Below the capacity, each gets a new row. At the capacity, each replaces the most redundant map, by RDY with the
        maps stored before this forward. No two iterations of a forward replace the same map.

        Args:
            searches: completely observed iterations, in this store.
            after: row of the same request's previous iteration for each, or -1.

        Effects: replaces maps, and cuts links to replaced maps.

        Returns:
            The rows; -1 for an iteration without a row, if a forward holds more than `capacity`.
        """
        num_new = len(searches)
        score_BC = self.redundancy(searches) if self.size + num_new > self.capacity else None
        rows: list[int] = []
        for b in range(num_new):
            if self.size < self.capacity:
                self._grow()
                row = self.size
                self.size += 1
            elif score_BC is not None and score_BC.shape[1] and float(score_BC[b].max()) > -math.inf:
                row = int(score_BC[b].argmax())
                score_BC[:, row] = -math.inf
            else:
                rows.append(-1)
                continue
            rows.append(row)
        taken = {row for row in rows if row >= 0}
        for row in taken:
            self._cut(row)
        for search, row, last in zip(searches, rows, after, strict=True):
            if row < 0:
                continue
            map_LE = search.map_LE
            self.maps_LCE[:, row] = map_LE
            self.squares_LC[:, row] = np.cumsum(np.einsum("le,le->l", map_LE, map_LE), dtype=np.float32)
            if self.embedding_CD.shape[1]:
                self.embedding_CD[row] = search.unit_D
            if last >= 0 and last not in taken:
                self.next_C[last], self._last_C[row] = row, last
        return rows

    def _cut(self, row: int) -> None:
        """Cut the links from and to a row's map."""
        before, after = int(self._last_C[row]), int(self.next_C[row])
        if before >= 0:
            self.next_C[before] = -1
        if after >= 0:
            self._last_C[after] = -1
        self.next_C[row] = self._last_C[row] = -1

    def _grow(self) -> None:
        """Make room for one more row, by doubling the arrays."""
        rows = self.maps_LCE.shape[1]
        if self.size < rows:
            return
        more = min(self.capacity, max(64, 2 * rows)) - rows
        self.maps_LCE = np.pad(self.maps_LCE, ((0, 0), (0, more), (0, 0)))
        self.embedding_CD = np.pad(self.embedding_CD, ((0, more), (0, 0)))
        self.squares_LC = np.pad(self.squares_LC, ((0, 0), (0, more)))
        self.next_C = np.pad(self.next_C, (0, more), constant_values=-1)
        self._last_C = np.pad(self._last_C, (0, more), constant_values=-1)


class MapSearch:
    """Incremental comparison of a running iteration with every map of a store.

    Each layer adds to dot products and norms, so earlier layers are not compared again. The store must not change
    during a search.

    Args:
        embedding_D: embedding of the iteration, float32; None if unknown.
        compare: whether to compare; otherwise the map is only collected.

    Attributes:
        map_LE: distributions of observed layers, float32; 0 for others.
        unit_D: embedding normalized to length 1.
    """

    __slots__ = ("_dots_C", "_semantic_C", "_size", "_square", "_store", "map_LE", "num_observed", "unit_D")

    def __init__(self, store: MapStore, embedding_D: np.ndarray | None = None, *, compare: bool = True) -> None:
        self._store = store
        self._size = store.size if compare else 0
        self.num_observed = 0
        self._square = np.float32(0)
        self._dots_C = np.zeros(self._size, np.float32)
        self._semantic_C: np.ndarray | None = None
        num_layers, _, num_experts = store.maps_LCE.shape
        self.map_LE = np.zeros((num_layers, num_experts), np.float32)
        self.unit_D = np.zeros(store.embedding_CD.shape[1], np.float32)
        if embedding_D is not None:
            norm = math.sqrt(float(np.einsum("d,d->", embedding_D, embedding_D)))
            self.unit_D = (embedding_D / np.float32(norm or 1.0)).astype(np.float32)

    @property
    def complete(self) -> bool:
        """Return whether every layer was observed."""
        return self.num_observed == len(self.map_LE)

    def observe(self, chance_E: np.ndarray) -> None:
        """Observe the distribution of the next layer."""
        layer, size = self.num_observed, self._size
        self.map_LE[layer, : len(chance_E)] = chance_E
        chance_E = self.map_LE[layer]
        if size:
            self._dots_C += np.einsum("ce,e->c", self._store.maps_LCE[layer, :size], chance_E)
        self._square += np.einsum("e,e->", chance_E, chance_E)
        self.num_observed += 1

    def semantic_C(self) -> np.ndarray:
        """Return score^sem, the cosine of the embedding with each stored one (Eq. 4)."""
        if self._semantic_C is None:
            self._semantic_C = np.einsum("cd,d->c", self._store.embedding_CD[: self._size], self.unit_D)
        return self._semantic_C

    def trajectory_C(self) -> np.ndarray:
        """Return score^traj, the cosine of the observed layers with the same layers of each stored map (Eq. 5)."""
        squares_C = self._store.squares_LC[self.num_observed - 1, : self._size] * self._square
        return self._dots_C / np.sqrt(np.maximum(squares_C, np.float32(1e-30)))

    def by_embedding(self) -> tuple[int, float] | None:
        """Return the stored iteration with the most similar embedding and its score; None for an empty store."""
        return _best(self.semantic_C()) if self._size and len(self.unit_D) else None

    def by_trajectory(self) -> tuple[int, float] | None:
        """Return the stored iteration with the most similar gates and its score; None before the first layer."""
        return _best(self.trajectory_C()) if self._size and self.num_observed else None


def _best(score_C: np.ndarray) -> tuple[int, float]:
    row = int(score_C.argmax())
    return row, float(score_C[row])


def check_state(state: Mapping[str, np.ndarray], names: Sequence[str]) -> None:
    """Raise ValueError unless the arrays are those of `names`."""
    if set(state) != set(names):
        raise ValueError(f"arrays {', '.join(sorted(state))}, expected {', '.join(sorted(names))}")
