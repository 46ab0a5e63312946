"""A memory of token paths, searched layer by layer with the path of a running token.

A *path* holds a token's experts in each MoE layer, each with the root of its weight. The similarity of two paths after
layer l is their cosine, where layer j counts by FADE ** (l - j), since recent layers predict better. The most similar
paths vote for later layers.

Source: the trajectory search of FineMoE (section 4.2, Eq. 5). Deviations:
    - Roots of the weights instead of whole distributions, and fading layers.
    - Up to `NEIGHBOURS` paths vote, weighted by exp(SHARPNESS * cosine), instead of the one best map.
    - The previous token counts: `LAST` times its cosine with the token before the stored one.

A path is visible to all requests, unless its owner is a running request.

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
"""Owners of paths besides requests: visible to all, and to none."""
_NEAR = 0.25  # paths less similar than the best by more than this weigh below exp(-7.5)


class RouteMemory:
    """Fixed rows from training, then a ring of rows added at run time.

    Args:
        learned: experts [C, L, K] and weights [C, L, K] of the fixed rows, and the row [C] of each one's previous
            token, or -1.
        room: rows of the ring, which overwrites the oldest; 0 adds none.

    Attributes:
        size: rows in use.
        owner_C: owner of each row.
        experts_CLK: int16.
        before_C: row of the previous token of its request, or -1.
        mark_LEC: float32, root of the weight of each expert in a path; 0 if the path lacks it.
        inverse_norm_LC: float32, 1 / norm of a path up to a layer.
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
        self.mark_LEC = np.zeros((num_layers, num_experts, rows), np.float32)
        self.inverse_norm_LC = np.zeros((num_layers, rows), np.float32)
        self._layers_L1 = np.arange(num_layers)[:, None]
        step = 512  # rows at a time, which bounds the memory of their marks
        for start in range(0, rows, step):
            part = slice(start, min(start + step, rows))
            self._write(np.arange(rows)[part], experts_CLK[part], roots(weights_CLK[part]))

    def add(self, experts_TLK: np.ndarray, root_TLK: np.ndarray, owner: int, last: int) -> int:
        """Add the paths of a request's next tokens; of more than the ring holds, the last.

        Args:
            last: row of the token before them, or -1.

        Returns:
            Row of the last of them, or -1.
        """
        experts_TLK, root_TLK = experts_TLK[-self._room :], root_TLK[-self._room :]
        if not self._room or not len(experts_TLK):
            return -1
        rows = self.num_learned + (self._next + np.arange(len(experts_TLK))) % self._room
        self._next = (self._next + len(rows)) % self._room
        self.size = max(self.size, int(rows.max()) + 1)
        if self.size > (allocated := len(self.owner_C)):
            more = min(self.num_learned + self._room, max(64, self.size + self.size // 4)) - allocated
            self.experts_CLK = np.pad(self.experts_CLK, ((0, more), (0, 0), (0, 0)))
            self.owner_C = np.pad(self.owner_C, (0, more), constant_values=NOBODY)
            self.before_C = np.pad(self.before_C, (0, more), constant_values=-1)
            self.mark_LEC = np.pad(self.mark_LEC, ((0, 0), (0, 0), (0, more)))
            self.inverse_norm_LC = np.pad(self.inverse_norm_LC, ((0, 0), (0, more)))
        self._write(rows, experts_TLK, root_TLK)
        self.owner_C[rows] = owner
        self.before_C[np.isin(self.before_C, rows)] = -1  # their previous token is overwritten
        self.before_C[rows] = [-1 if last in rows else last, *rows[:-1].tolist()]
        return int(rows[-1])

    def release(self, owner: int) -> None:
        """Make the paths of a request visible to all."""
        self.owner_C[self.owner_C == owner] = EVERYONE

    def forget(self) -> None:
        """Empty the ring."""
        self.size, self._next = self.num_learned, 0
        self.owner_C[self.size :], self.before_C[self.size :] = NOBODY, -1

    def rows_of(self, owner: int) -> np.ndarray:
        """Return the rows of a request, ascending."""
        return np.flatnonzero(self.owner_C[: self.size] == owner)

    def _write(self, rows: np.ndarray, experts_TLK: np.ndarray, root_TLK: np.ndarray) -> None:
        self.mark_LEC[:, :, rows] = 0
        self.experts_CLK[rows] = experts_TLK
        for row, experts_LK, root_LK in zip(rows.tolist(), experts_TLK, root_TLK, strict=True):
            self.mark_LEC[self._layers_L1, experts_LK, row] = root_LK
        square_T = np.zeros(len(rows), np.float32)
        for layer in range(experts_TLK.shape[1]):
            square_T = square_T * np.float32(FADE) + np.square(root_TLK[:, layer]).sum(axis=1)
            self.inverse_norm_LC[layer, rows] = 1 / np.sqrt(np.maximum(square_T, 1e-30))


class RouteSearch:
    """Similarities of one request's running tokens to the stored paths.

    The memory must not change before their last layer.

    Args:
        own: the request's own rows.
        hidden: rows that the request may not find, ascending.
        last_C: similarities of the request's last token to the paths stored then.
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
        """Record the tokens' experts in the next layer."""
        self._layer += 1
        mark_EC = self._memory.mark_LEC[self._layer]
        self._dots_TC *= np.float32(FADE)
        for dots_C, experts, root_K in zip(self._dots_TC, experts_TK, root_TK, strict=True):
            for expert, root in zip(experts, root_K, strict=True):
                dots_C += mark_EC[expert, : self._size] * root
        self._square_T = self._square_T * np.float32(FADE) + np.square(root_TK).sum(axis=1)

    def similarities(self, token: int, *, alone: bool = False) -> np.ndarray:
        """Return the similarity of a token to each path, -1 for hidden ones: similarity_C.

        Args:
            alone: leave out the previous token.
        """
        similarity_C: np.ndarray = self._dots_TC[token] * self._memory.inverse_norm_LC[self._layer, : self._size]
        similarity_C *= np.float32(1) / np.sqrt(max(self._square_T[token], np.float32(1e-30)))
        if self._prior_C is not None and not alone:
            similarity_C += self._prior_C
        similarity_C[self._hidden] = -1
        return similarity_C


class Neighbours:
    """The paths most similar to a token's, weighted.

    Attributes:
        best: the highest cosine; 0 without paths.

    Shapes: rows_N int64; weight_N float32, of sum 1.
    """

    __slots__ = ("best", "rows_N", "weight_N")

    def __init__(self, rows: np.ndarray | None, similarity: np.ndarray) -> None:
        """Choose among the paths `rows` (None: all, in order) by their similarities `similarity`."""
        self.best = float(similarity.max()) if len(similarity) else 0.0
        near = np.flatnonzero(similarity > max(self.best - _NEAR, -0.5))
        if len(near) > NEIGHBOURS:
            near = near[np.argpartition(-similarity[near], NEIGHBOURS)[:NEIGHBOURS]]
        weight_N = np.exp(np.float32(SHARPNESS) * (similarity[near] - np.float32(self.best)))
        self.weight_N = weight_N / weight_N.sum() if len(near) else weight_N
        self.rows_N = near if rows is None else rows[near]

    def vote(self, memory: RouteMemory, layer: int, num_experts: int) -> np.ndarray:
        """Return the weight of the paths that used each expert of a layer: vote_E, float32."""
        if not len(self.rows_N):
            return np.zeros(num_experts, np.float32)
        used_NK = memory.experts_CLK[self.rows_N, layer]
        weight = np.repeat(self.weight_N, used_NK.shape[1])
        return np.bincount(used_NK.ravel(), weight, minlength=num_experts).astype(np.float32)


def roots(weights: np.ndarray) -> np.ndarray:
    """Return the root of each expert's weight, float32."""
    return np.sqrt(np.abs(weights).astype(np.float32))
