"""The paths of earlier tokens, searched by the path of a running one as its layers arrive.

A *path* is what a token used in each MoE layer, each expert with the root of its weight. How alike two paths are after
layer l is the cosine of both, layer j counting by FADE ** (l - j): what was chosen lately says more of what comes.
The most alike ones vote for the layers to come.

Source: the trajectory search of FineMoE (section 4.2, Eq. 5), with deviations: roots of the weights instead of whole
distributions, fading layers, and a vote of up to `NEIGHBOURS` paths that weigh exp(SHARPNESS * cosine) instead of the
one best map. On DeepSeek-V2-Lite routes that matches 0.04 more on a task that was not stored. What came before counts:
`LAST` times the cosine of the request's last token with the token before the stored one.

A path belongs to everyone, or to one running request that alone may find it.

Shapes:
    C  paths, by row     N  neighbours     T, L, K, E as everywhere
"""

import numpy as np

FADE = 0.8
NEIGHBOURS = 64
SHARPNESS = 30.0
LAST = 0.2
EVERYONE = -1
NOBODY = -2
"""Owners of paths besides requests: found by all, and by none."""
_NEAR = 0.25  # less alike than the best by more than this weighs below exp(-7.5)


class RouteMemory:
    """Fixed rows that were learned, then a ring of rows that come while it is asked.

    Args:
        learned: experts [C, L, K] and weights [C, L, K] of the fixed rows, and the row [C] of the token before each,
            or -1.
        room: rows of the ring; the oldest is overwritten. At 0 nothing is ever added.

    Attributes:
        size: rows in use.
        owner_C: whose each row is.
        experts_CLK: int16.
        before_C: the row of the token before each in its request, or -1.
    """

    def __init__(self, learned: tuple[np.ndarray, np.ndarray, np.ndarray], num_experts: int, room: int) -> None:
        experts_CLK, weights_CLK, before_C = learned
        self.num_learned = self.size = len(experts_CLK)
        self._room, self._next = room, 0
        _, num_layers, top_k = experts_CLK.shape
        rows = self.num_learned
        self.experts_CLK = np.zeros((rows, num_layers, top_k), np.int16)
        self.owner_C = np.full(rows, EVERYONE, np.int64)
        self.before_C = before_C.astype(np.int64)
        self._mark_LEC = np.zeros((num_layers, num_experts, rows), np.float32)
        self._unlength_LC = np.zeros((num_layers, rows), np.float32)  # one over the length of a path up to a layer
        self._layers_L1 = np.arange(num_layers)[:, None]
        step = 512  # rows at a time, so that their marks are no second index
        for start in range(0, rows, step):
            part = slice(start, min(start + step, rows))
            self._write(np.arange(rows)[part], experts_CLK[part], roots(weights_CLK[part]))

    def add(self, experts_TLK: np.ndarray, root_TLK: np.ndarray, owner: int, last: int) -> int:
        """Keep the paths of the next tokens of a request, of which the ring holds the last.

        Args:
            last: the row of the token before them, or -1.

        Returns:
            The row of the last of them, or -1.
        """
        experts_TLK, root_TLK = experts_TLK[-self._room :], root_TLK[-self._room :]
        if not self._room or not len(experts_TLK):
            return -1
        rows = self.num_learned + (self._next + np.arange(len(experts_TLK))) % self._room
        self._next = (self._next + len(rows)) % self._room
        self.size = max(self.size, int(rows.max()) + 1)
        if self.size > (places := len(self.owner_C)):
            more = min(self.num_learned + self._room, max(64, self.size + self.size // 4)) - places
            self.experts_CLK = np.pad(self.experts_CLK, ((0, more), (0, 0), (0, 0)))
            self.owner_C = np.pad(self.owner_C, (0, more), constant_values=NOBODY)
            self.before_C = np.pad(self.before_C, (0, more), constant_values=-1)
            self._mark_LEC = np.pad(self._mark_LEC, ((0, 0), (0, 0), (0, more)))
            self._unlength_LC = np.pad(self._unlength_LC, ((0, 0), (0, more)))
        self._write(rows, experts_TLK, root_TLK)
        self.owner_C[rows] = owner
        self.before_C[np.isin(self.before_C, rows)] = -1  # those came before what is no more
        self.before_C[rows] = [-1 if last in rows else last, *rows[:-1].tolist()]
        return int(rows[-1])

    def release(self, owner: int) -> None:
        """The paths of a request become everyone's."""
        self.owner_C[self.owner_C == owner] = EVERYONE

    def forget(self) -> None:
        """Empty the ring."""
        self.size, self._next = self.num_learned, 0
        self.owner_C[self.size :], self.before_C[self.size :] = NOBODY, -1

    def rows_of(self, owner: int) -> np.ndarray:
        """The rows of a request, ascending."""
        return np.flatnonzero(self.owner_C[: self.size] == owner)

    def _write(self, rows: np.ndarray, experts_TLK: np.ndarray, root_TLK: np.ndarray) -> None:
        self._mark_LEC[:, :, rows] = 0
        self.experts_CLK[rows] = experts_TLK
        for row, experts_LK, root_LK in zip(rows.tolist(), experts_TLK, root_TLK, strict=True):
            self._mark_LEC[self._layers_L1, experts_LK, row] = root_LK
        square_T = np.zeros(len(rows), np.float32)
        for layer in range(experts_TLK.shape[1]):
            square_T = square_T * np.float32(FADE) + np.square(root_TLK[:, layer]).sum(axis=1)
            self._unlength_LC[layer, rows] = 1 / np.sqrt(np.maximum(square_T, 1e-30))


class RouteSearch:
    """The running tokens of one request in a forward, compared with every path that the request may find.

    The memory must not change before their last layer.

    Args:
        own: the request's own rows.
        hidden: rows that are not the request's to find, ascending.
        last_C: how alike the paths were to that of the request's last token, as far as they were there then.
    """

    __slots__ = ("_dots_TC", "_hidden", "_layer", "_memory", "_prior_C", "_size", "_square_T", "own")

    def __init__(
        self, memory: RouteMemory, num_tokens: int, own: np.ndarray, hidden: np.ndarray, last_C: np.ndarray | None
    ) -> None:
        self._memory, self._size = memory, memory.size
        self.own, self._hidden = own, hidden
        self._prior_C: np.ndarray | None = None
        if last_C is not None and len(last_C):
            before_C = memory.before_C[: self._size]
            known_C = (before_C >= 0) & (before_C < len(last_C))
            self._prior_C = np.where(known_C, np.maximum(last_C[np.where(known_C, before_C, 0)], 0), 0)
            self._prior_C *= np.float32(LAST)
        self._dots_TC = np.zeros((num_tokens, self._size), np.float32)
        self._square_T = np.zeros(num_tokens, np.float32)
        self._layer = -1

    def observe(self, experts_TK: list[list[int]], root_TK: np.ndarray) -> None:
        """Take in what the tokens use in the next layer."""
        self._layer += 1
        mark_EC = self._memory._mark_LEC[self._layer]
        self._dots_TC *= np.float32(FADE)
        for dots_C, experts, root_K in zip(self._dots_TC, experts_TK, root_TK, strict=True):
            for expert, root in zip(experts, root_K, strict=True):
                dots_C += mark_EC[expert, : self._size] * root
        self._square_T = self._square_T * np.float32(FADE) + np.square(root_TK).sum(axis=1)

    def alike(self, token: int, *, alone: bool = False) -> np.ndarray:
        """alike_C: the cosine with each path, and what came before, -1 for those that are hidden.

        Args:
            alone: whether what came before is left out.
        """
        alike_C: np.ndarray = self._dots_TC[token] * self._memory._unlength_LC[self._layer, : self._size]
        alike_C *= np.float32(1) / np.sqrt(max(self._square_T[token], np.float32(1e-30)))
        if self._prior_C is not None and not alone:
            alike_C += self._prior_C
        alike_C[self._hidden] = -1
        return alike_C


class Neighbours:
    """The paths most like a token's, weighted.

    Attributes:
        best: the highest cosine; 0 where there is no path.

    Shapes: rows_N int64; weight_N float32, of sum 1.
    """

    __slots__ = ("best", "rows_N", "weight_N")

    def __init__(self, rows: np.ndarray | None, alike: np.ndarray) -> None:
        """Choose among the paths `rows` (None: all, in order) by their similarities `alike`."""
        self.best = float(alike.max()) if len(alike) else 0.0
        near = np.flatnonzero(alike > max(self.best - _NEAR, -0.5))
        if len(near) > NEIGHBOURS:
            near = near[np.argpartition(-alike[near], NEIGHBOURS)[:NEIGHBOURS]]
        weight_N = np.exp(np.float32(SHARPNESS) * (alike[near] - np.float32(self.best)))
        self.weight_N = weight_N / weight_N.sum() if len(near) else weight_N
        self.rows_N = near if rows is None else rows[near]

    def vote(self, memory: RouteMemory, layer: int, num_experts: int) -> np.ndarray:
        """vote_E float32: the weight of the paths that used each expert of a layer."""
        if not len(self.rows_N):
            return np.zeros(num_experts, np.float32)
        used_NK = memory.experts_CLK[self.rows_N, layer]
        weight = np.repeat(self.weight_N, used_NK.shape[1])
        return np.bincount(used_NK.ravel(), weight, minlength=num_experts).astype(np.float32)


def roots(weights: np.ndarray) -> np.ndarray:
    """Root of each expert's weight, float32."""
    counts: np.ndarray = np.sqrt(np.abs(weights).astype(np.float32))
    return counts
