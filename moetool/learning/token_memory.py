"""A memory of token routes: predicts from what followed the most similar tokens, without training.

A token's window is the experts that it has chosen so far, and in the layers to come those of the token before. Two
windows are as similar as the number of experts that they share. The stored tokens that are most similar say how soon
each expert is needed again: `DISCOUNT` to the power of the tokens that passed it by, as far as that is known. Their
mean, by weights that fall with the difference in similarity, is shrunk to past use, the more so the fewer they are.

Shapes:
    A  experts of the model, L * E, by key     N  stored tokens     P  sum of top-k over the layers     L  layers
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from moetool.types import ModelSpec

DISCOUNT = 0.85
HORIZON = 24
"""An expert that is not needed for so many tokens counts as never needed again."""
SHARPNESS = 12.0
"""A stored token that shares nothing has exp(-SHARPNESS) of the weight of one that shares all (`bench policies`)."""
PRIOR = np.float32(3)
"""Tokens of full weight that past use counts as."""
RECALL = 0.9
"""Share of past use that is left after a forward."""
_LEAST_WEIGHT = 1e-3


@dataclass(slots=True, kw_only=True)
class Walk:
    """Similarity of one request's window to each stored token.

    Attributes:
        shared_LN: uint8, experts of each layer that its last token there shares with each.
        now_N, old_N: int32, sums over the window, of this token and of the last one.
        last, serial: place of its last token in the memory (-1: none), and its number.
        similar_M, weight_M, found: the most similar tokens with their weights, and how many there are.
    """

    shared_LN: np.ndarray
    now_N: np.ndarray
    old_N: np.ndarray
    similar_M: np.ndarray
    weight_M: np.ndarray
    last: int = -1
    serial: int = -1
    found: int = -1


class TokenMemory:
    """The last tokens and what followed them.

    Args:
        size: tokens kept.
        neighbours: M, most similar tokens that are asked.
        fixed_FP: paths of tokens that are kept for good, and `fixed_before_F`, the row of the token before each.

    Attributes:
        use_A: decayed share of the forwards that used each expert.
    """

    def __init__(
        self,
        spec: ModelSpec,
        size: int,
        neighbours: int,
        fixed: tuple[np.ndarray, np.ndarray] | None = None,
    ) -> None:
        # numba takes half a second to import, which commands that use no such policy need not wait for.
        from moetool.learning import token_kernels

        self._kernels = token_kernels
        self.spec, self._size = spec, size
        self._neighbours = neighbours
        self.columns = list(itertools.accumulate(spec.top_k_L, initial=0))
        self._fixed = 0 if fixed is None else len(fixed[0])
        num_places, num = self._fixed + size, spec.num_layers * spec.num_experts
        self._path_NP = np.full((num_places, self.columns[-1]), -1, np.int32)
        self._uses_AN = np.zeros((num, num_places), np.uint8)
        self._soon_NA = np.zeros((num_places, num), np.uint8)
        self._before_N, self._after_N = (np.full(num_places, -1, np.int32) for _ in range(2))
        self._stored = 0  # beside the fixed ones, overwritten ones included
        self._worth_D = np.rint(255 * DISCOUNT ** np.arange(HORIZON)).astype(np.uint8)
        scale = SHARPNESS / self.columns[-1]
        width = int(-np.log(_LEAST_WEIGHT) / scale) + 1
        self._weight_W = np.exp(-scale * np.arange(width)).astype(np.float32)
        self._use_A = np.zeros(num, np.float32)
        self._passed_L = [0] * spec.num_layers  # forwards
        self.use_A = np.zeros(num, np.float32)
        self._key_E = np.zeros(spec.num_experts, np.int64)
        if fixed is not None:
            for item, (path_P, before) in enumerate(zip(*fixed, strict=True)):
                self._put(path_P, item, int(before))

    def walk(self) -> Walk:
        """A request without a past."""
        places = len(self._path_NP)
        return Walk(
            shared_LN=np.zeros((self.spec.num_layers, places), np.uint8),
            now_N=np.zeros(places, np.int32),
            old_N=np.zeros(places, np.int32),
            similar_M=np.zeros(self._neighbours, np.int32),
            weight_M=np.zeros(self._neighbours, np.float32),
        )

    def begin(self, walk: Walk) -> None:
        """A token of the request begins."""
        walk.now_N, walk.old_N = walk.old_N, walk.now_N
        walk.found = -1
        self._kernels.begin(self._before_N, walk.old_N, walk.now_N, self._count)

    def use(self, layer: int, keys: np.ndarray) -> None:
        """A forward has used `keys` of a layer, each named once."""
        start = layer * self.spec.num_experts
        self._passed_L[layer] += 1
        scale = 1 / (1 - RECALL ** self._passed_L[layer])
        self._kernels.note_use(keys, start, start + self.spec.num_experts, RECALL, scale, self._use_A, self.use_A)

    def follow(self, walk: Walk, layer: int, keys: np.ndarray, *, settle: bool) -> None:
        """The request's token has chosen `keys` in a layer; `settle`: it is the one after the last stored."""
        walk.found = -1
        last = self._last(walk) if settle else -1
        stored = (self._uses_AN, self._before_N, self._soon_NA, self._worth_D)
        self._kernels.follow(keys, walk.shared_LN[layer], walk.now_N, self._count, last, stored)

    def raise_values(self, walk: Walk, start: int, stop: int, value_A: np.ndarray) -> None:
        """Raise `value_A` from key `start` to before `stop` to how soon the request needs each expert: 0 to 1."""
        similar = self._similar(walk)
        self._kernels.weigh(similar, self._soon_NA, self.use_A, PRIOR, start, stop, value_A)

    def least_valued(self, value_A: np.ndarray, near_L: np.ndarray, resident_A: np.ndarray, key_M: np.ndarray) -> int:
        """Put the keys of the residents of least value times nearness into `key_M`, the least last; their number."""
        found: int = self._kernels.least_valued(value_A, near_L, self.spec.num_experts, resident_A, key_M)
        return found

    def leave_unused(self, walk: Walk, layer: int, unused_E: np.ndarray) -> None:
        """Multiply `unused_E` by the probability that the request's token does not use each expert of a layer."""
        columns = (self.columns[layer], self.columns[layer + 1])
        base = layer * self.spec.num_experts
        self._kernels.leave_unused(self._similar(walk), self._path_NP, columns, self.use_A, PRIOR, base, unused_E)

    def likely(self, unused_E: np.ndarray, layer: int, limit: float, resident_A: np.ndarray) -> list[int]:
        """Keys of the absent experts of a layer that stay unused with less than `limit`, the likeliest first."""
        base = layer * self.spec.num_experts
        found: int = self._kernels.likely(unused_E, resident_A, base, np.float32(limit), self._key_E)
        keys: list[int] = self._key_E[:found].tolist()
        return keys

    def store(self, walk: Walk, path_P: np.ndarray) -> None:
        """Keep a whole token of the request, the next after the last one stored."""
        last = self._last(walk)
        walk.last, walk.serial = self._fixed + self._stored % self._size, self._stored
        self._put(path_P, walk.last, -1 if last == walk.last else last)
        self._stored += 1

    def break_off(self, walk: Walk) -> None:
        """The next token that is stored follows none."""
        walk.last = walk.serial = -1

    def clear(self, walk: Walk) -> None:
        """Begin the request's window anew: its last token has routes in some layers only."""
        self.break_off(walk)
        walk.found = -1
        for array in (walk.shared_LN, walk.now_N, walk.old_N):
            array[:] = 0

    def state(self) -> dict[str, np.ndarray]:
        """The stored tokens in order, the row of the one before each, and past use."""
        kept = min(self._stored, self._size)
        place_R = self._fixed + np.arange(self._stored - kept, self._stored) % self._size
        row_N = np.full(len(self._path_NP) + 1, -1, np.int32)
        row_N[place_R] = np.arange(kept)
        return {
            "path_RP": self._path_NP[place_R],
            "before_R": row_N[self._before_N[place_R]],
            "past_use_A": self._use_A.copy(),
            "passed_L": np.array(self._passed_L),
        }

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Take what `state` gave. Raises: ValueError where it is of another model."""
        path_RP, before_R = state["path_RP"], state["before_R"]
        rows = np.arange(len(path_RP) if path_RP.ndim else 0)
        right = (
            path_RP.shape == (len(rows), self._path_NP.shape[1])
            and path_RP.dtype.kind == before_R.dtype.kind == "i"
            and before_R.shape == rows.shape
            and state["past_use_A"].shape == self._use_A.shape
            and state["passed_L"].shape == (self.spec.num_layers,)
        )
        if not right:
            raise ValueError(f"path_RP is {path_RP.shape}, expected rows of {self._path_NP.shape[1]} experts")
        spans = {
            "path_RP": (-1, len(self._use_A) - 1),
            "before_R": (-1, rows - 1),
            "past_use_A": (0, 1),
            "passed_L": (0, np.inf),
        }
        for name, (least, most) in spans.items():
            if not ((state[name] >= least) & (state[name] <= most)).all():
                raise ValueError(f"{name} has values out of range")
        # The compiled loops check no bounds: an expert must be one of its column's layer.
        layer_P = np.repeat(np.arange(self.spec.num_layers), self.spec.top_k_L)
        if not ((path_RP == -1) | (path_RP // self.spec.num_experts == layer_P)).all():
            raise ValueError("path_RP has experts of another layer")
        start = max(0, len(rows) - self._size)
        for row in range(start, len(rows)):
            before = int(before_R[row]) - start
            self._put(
                path_RP[row].astype(np.int32), self._fixed + row - start, self._fixed + before if before >= 0 else -1
            )
        self._stored = len(rows) - start
        self._use_A[:] = state["past_use_A"]
        self._passed_L = state["passed_L"].tolist()
        scale_L = 1 - RECALL ** np.maximum(state["passed_L"], 1)
        self.use_A[:] = self._use_A / np.repeat(scale_L, self.spec.num_experts)

    @property
    def _count(self) -> int:
        return self._fixed + min(self._stored, self._size)

    def _similar(self, walk: Walk) -> tuple[np.ndarray, np.ndarray, int]:
        """Places and weights of the most similar tokens, and their number."""
        if walk.found < 0:
            arrays = (self._weight_W, walk.similar_M, walk.weight_M)
            walk.found = self._kernels.nearest(walk.now_N, self._count, *arrays)
        return walk.similar_M, walk.weight_M, walk.found

    def _last(self, walk: Walk) -> int:
        """Place of the request's last token, or -1 where another has taken it."""
        return walk.last if walk.serial >= max(0, self._stored - self._size) else -1

    def _put(self, path_P: np.ndarray, item: int, last: int) -> None:
        if last >= 0:
            self._kernels.settle(path_P, last, self._before_N, self._soon_NA, self._worth_D)
        self._kernels.store(
            path_P, item, last, self._path_NP, self._uses_AN, self._soon_NA, self._before_N, self._after_N
        )
