"""A memory of token routes: predicts each expert's next use from what followed the most similar tokens.

A token's window holds the experts that it has chosen so far and, for later layers, those of the previous token. The
similarity of two windows is their number of shared experts. For a stored token, an expert's value is `DISCOUNT` to the
power of the tokens until its next use, as far as known. The prediction is the mean over the most similar tokens,
weighted by similarity, and shrunk toward past use, more so with fewer of them. Nothing is trained.

With several requests, an expert has the highest value that any of them gives it. The probability that it stays unused
is the product over requests, as if independent. Past use counts whole forwards and is blended in once.

Shapes:
    A  experts of the model, L * E, by key     N  stored tokens     P  sum of top-k over the layers     L  layers
    W  windows, one per request     R  requests of a forward     M  most similar tokens used
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from struct import Struct

import numpy as np

from moetool.base.errors import MoetoolError, first_line
from moetool.base.tables import line_if_slow
from moetool.base.types import ModelSpec

DISCOUNT = 0.85
HORIZON = 24
"""Tokens without a use after which an expert counts as never needed again."""
SHARPNESS = 12.0
"""A stored token without shared experts weighs exp(-SHARPNESS) as much as an equal one (`bench policies`)."""
PRIOR = np.float32(3)
"""Weight of past use, as a number of tokens of full weight."""
RECALL = 0.9
"""Decay of past use per forward."""
COMPILING = "moetool: compiling or loading cache policies; compiling, once per installation, takes up to a minute"
_LEAST_WEIGHT = 1e-3
_VALUED = 2
"""Requests whose values one `value_all` updates, so that its time does not grow with the batch."""


@dataclass(slots=True, kw_only=True)
class RequestWindow:
    """One request's window in the arrays of a memory.

    Attributes:
        index: index along W.
        last, serial: index of its last token in the memory (-1: none), and that token's number.
    """

    index: int
    last: int = -1
    serial: int = -1


@dataclass(slots=True, kw_only=True)
class WindowBatch:
    """Tokens of a forward, for the compiled loops.

    Attributes:
        windows: windows of its requests, R.
        row_R3: int64: for each request the index of its window, the row of its last token, and the index of the stored
            token before it (-1: none, or several tokens at once).
        path_TP: int32, keys of the experts chosen so far (-1: not yet).
        path_bytes: the bytes of `path_TP`.
    """

    windows: Sequence[RequestWindow]
    row_R3: np.ndarray
    path_TP: np.ndarray
    path_bytes: memoryview


class TokenMemory:
    """The last tokens and what followed them.

    Args:
        size: tokens kept besides the fixed ones.
        neighbours: M, most similar tokens used.
        fixed: paths int32 [F, P] of tokens that are always kept, and the row [F] of the token before each (-1: none).

    Attributes:
        use_A: decayed share of the forwards that used each expert.
        columns: first column of each layer in a path, then P.
        table: sizes and addresses for compiled loops (`moetool.prediction.token_kernels`).
        key_E: experts that the last `expect` returned.
        unused_E: probability that no request uses each expert of the layer of the last `expect`.
        shared_WLN: uint8, experts of each layer shared by the last token of a window and each stored token.
        now_WN, old_WN: int16, sums over the window, of this token and of the last one.
    """

    def __init__(
        self, spec: ModelSpec, size: int, neighbours: int, fixed: tuple[np.ndarray, np.ndarray] | None = None
    ) -> None:
        # numba takes half a second to import, which commands without such a policy avoid.
        from moetool.prediction import token_kernels

        self._kernels = token_kernels
        self.spec, self._size = spec, size
        self._neighbours, self._stride = neighbours, spec.num_experts
        self.columns = list(itertools.accumulate(spec.top_k_L, initial=0))
        self._fixed = 0 if fixed is None else len(fixed[0])
        num_tokens, num = self._fixed + size, spec.num_layers * spec.num_experts
        self._path_NP = np.full((num_tokens, self.columns[-1]), -1, np.int32)
        self._uses_AB = np.zeros((num, (num_tokens + 7) // 8), np.uint8)
        self._soon_NA = np.zeros((num_tokens, num), np.uint8)
        self._before_N, self._after_N = (np.full(num_tokens, -1, np.int32) for _ in range(2))
        self._start_N = np.zeros(num_tokens + 1, np.int32)  # first token of each run of `find_runs`
        self._stored = 0  # tokens added so far, overwritten ones included
        self._count = self._fixed  # number of tokens
        self._worth_D = np.rint(255 * DISCOUNT ** np.arange(HORIZON)).astype(np.uint8)
        scale = SHARPNESS / self.columns[-1]
        width = int(-np.log(_LEAST_WEIGHT) / scale) + 1
        self._weight_D = np.exp(-scale * np.arange(width)).astype(np.float32)
        self._use_A = np.zeros(num, np.float32)
        self._passed_L = np.zeros(spec.num_layers, np.int64)  # forwards so far
        self._scale_F, self._weight_2 = _scales(), np.array([PRIOR, RECALL])
        self.use_A = np.zeros(num, np.float32)
        self.key_E = np.zeros(spec.num_experts, np.int64)
        self.unused_E = np.ones(spec.num_experts, np.float32)
        self._num_windows = 0
        self._value_WA = np.zeros((0, num), np.float32)
        self._valued_W = np.zeros(0, np.int64)
        self.shared_WLN = np.zeros((0, spec.num_layers, num_tokens), np.uint8)
        self.now_WN, self.old_WN = np.zeros((0, num_tokens), np.int16), np.zeros((0, num_tokens), np.int16)
        self.table = self._make_table()
        self._make_windows(1)
        self._batch = _make_batch(0, 0, 0)
        if fixed is not None:
            for item, (path_P, before) in enumerate(zip(*fixed, strict=True)):
                self._put(path_P, item, int(before))

    def open_window(self) -> RequestWindow:
        """Return the empty window of a new request."""
        if self._num_windows == len(self.now_WN):
            self._make_windows(2 * self._num_windows)
        self._num_windows += 1
        return RequestWindow(index=self._num_windows - 1)

    def begin(self, windows: Sequence[RequestWindow], rows: Sequence[Sequence[int]]) -> WindowBatch:
        """Begin a forward with the next tokens of these requests; `rows` are the rows of each one's tokens.

        The returned batch may be changed by the next call.
        """
        self.table[self._kernels.RUNS] = self._kernels.find_runs(self._before_N, self._count, self._start_N)
        for index in (window.index for window in windows):
            self.old_WN[index, : self._count] = self.now_WN[index, : self._count]
            self._kernels.begin(self._before_N, self.old_WN[index], self.now_WN[index], self._count)
            self._least_W[index] = 0
        lasts = [self._last(window) if len(mine) == 1 else -1 for window, mine in zip(windows, rows, strict=True)]
        batch, num_tokens = self._batch, sum(map(len, rows))
        if (len(batch.row_R3), len(batch.path_TP)) == (len(rows), num_tokens):
            batch.path_TP.fill(-1)  # faster than new arrays
        else:
            self._batch = batch = _make_batch(len(rows), num_tokens, self.columns[-1])
        batch.windows = windows
        for number, (window, mine, last) in enumerate(zip(windows, rows, lasts, strict=True)):
            batch.row_R3[number] = window.index, mine[-1], last
        return batch

    def observe(self, batch: WindowBatch, layer: int, experts_TK: Sequence[Sequence[int]]) -> None:
        """Record the experts that a layer's router has chosen for every token of the forward."""
        assert len(experts_TK) == len(batch.path_TP), "compiled code reads a path for every token of the forward"
        first, end = self.columns[layer], self.columns[layer + 1]
        width = min(end - first, len(experts_TK[0]))
        pack, offset = pack_ints(width), 4 * first
        for experts_K in experts_TK:  # faster than making an array of the lists
            pack(batch.path_bytes, offset, *experts_K[:width])
            offset += 4 * self.columns[-1]
        self._kernels.observe(self.table, batch.row_R3, batch.path_TP, layer, (first, first + width))

    def value(self, batch: WindowBatch, start: int, stop: int, value_A: np.ndarray) -> None:
        """Set `value_A` for keys `start` to `stop` - 1 to how soon a request needs each expert: 0 to 1."""
        self._kernels.value(self.table, batch.row_R3, start, stop, value_A)

    def value_all(self, batch: WindowBatch, value_A: np.ndarray) -> None:
        """Like `value` for all experts, with new values only for the requests valued longest ago."""
        self._kernels.value_all(self.table, batch.row_R3, value_A)

    def least_valued(self, value_A: np.ndarray, near_L: np.ndarray, resident_A: np.ndarray, key_M: np.ndarray) -> int:
        """Put the residents of lowest value times nearness into `key_M`, the lowest last; return their number."""
        return self._kernels.least_valued(value_A, near_L, self._stride, resident_A, key_M)

    def expect(self, batch: WindowBatch, layer: int, limit: np.float32, resident_A: np.ndarray) -> list[int]:
        """Set `unused_E`; return the layer's missing experts below `limit` in it, the most likely first."""
        columns, base = (self.columns[layer], self.columns[layer + 1]), layer * self._stride
        found: int = self._kernels.expect(self.table, batch.row_R3, columns, base, limit, resident_A)
        return self.key_E[:found].tolist()

    def store(self, window: RequestWindow, path_P: np.ndarray) -> None:
        """Store the request's next complete token."""
        last = self._last(window)
        window.last, window.serial = self._fixed + self._stored % self._size, self._stored
        self._put(path_P, window.last, -1 if last == window.last else last)
        self._stored += 1
        self._count = self.table[self._kernels.COUNT] = self._fixed + min(self._stored, self._size)

    def break_off(self, window: RequestWindow) -> None:
        """Make the next stored token begin a new sequence."""
        window.last = window.serial = -1

    def clear(self, window: RequestWindow) -> None:
        """Clear the request's window: its last token has routes in some layers only."""
        self.break_off(window)
        for array in (self.shared_WLN, self.now_WN, self.old_WN):
            array[window.index] = 0

    def uses(self) -> dict[int, float]:
        """Return the number of stored tokens that chose each expert, by key."""
        paths_NP = self._path_NP[: self._count]
        keys, counts = np.unique(paths_NP[paths_NP >= 0], return_counts=True)
        return dict(zip(keys.tolist(), map(float, counts), strict=True))

    def state(self) -> dict[str, np.ndarray]:
        """Return the stored tokens in order, the row before each, and past use."""
        kept = min(self._stored, self._size)
        kept_R = self._fixed + np.arange(self._stored - kept, self._stored) % self._size
        row_N = np.full(len(self._path_NP) + 1, -1, np.int32)
        row_N[kept_R] = np.arange(kept)
        return {
            "path_RP": self._path_NP[kept_R],
            "before_R": row_N[self._before_N[kept_R]],
            "past_use_A": self._use_A.copy(),
            "passed_L": self._passed_L.copy(),
        }

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Restore the output of `state`. Raises: ValueError: it is damaged or belongs to another model."""
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
        # The compiled loops check no bounds: an expert must belong to its column's layer.
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
        self._count = self.table[self._kernels.COUNT] = self._fixed + self._stored
        self._use_A[:] = state["past_use_A"]
        self._passed_L[:] = state["passed_L"]
        scale_L = 1 - RECALL ** np.maximum(state["passed_L"], 1)
        self.use_A[:] = self._use_A / np.repeat(scale_L, self.spec.num_experts)

    def _make_windows(self, number: int) -> None:
        """Allocate arrays for more windows; existing ones stay."""
        num_tokens, rows = len(self._path_NP), self._num_windows
        shared_WLN, now_WN, old_WN = self.shared_WLN, self.now_WN, self.old_WN
        self.shared_WLN = np.zeros((number, self.spec.num_layers, num_tokens), np.uint8)
        self.now_WN = np.zeros((number, num_tokens), np.int16)
        self.old_WN = np.zeros((number, num_tokens), np.int16)
        self.shared_WLN[:rows], self.now_WN[:rows], self.old_WN[:rows] = shared_WLN[:rows], now_WN[:rows], old_WN[:rows]
        item_WM = np.zeros((number, self._neighbours), np.int32)
        weight_WM = np.zeros((number, self._neighbours), np.float32)
        self._similar = (item_WM, weight_WM, np.zeros(number, np.int64))
        self._least_W = np.zeros(number, np.int64)
        value_WA, valued_W = self._value_WA, self._valued_W
        self._value_WA = np.zeros((number if number > 1 else 0, value_WA.shape[1]), np.float32)
        self._valued_W = np.full(number, -1, np.int64)
        self._value_WA[: len(value_WA)], self._valued_W[: len(valued_W)] = value_WA, valued_W
        k = self._kernels
        self.table[[k.SHARED_WLN, k.NOW_WN, k.LEAST_W, k.ITEM_WM, k.NEAR_WM, k.FOUND_W, k.VALUE_WA, k.VALUED_W]] = [
            array.ctypes.data
            for array in (
                *(self.shared_WLN, self.now_WN, self._least_W, *self._similar, self._value_WA, self._valued_W),
            )
        ]

    def _make_table(self) -> np.ndarray:
        """Return the sizes and addresses for the compiled loops, except those of the windows."""
        k = self._kernels
        sizes = {
            k.LAYERS: self.spec.num_layers,
            k.EXPERTS: self._stride,
            k.TOKENS: len(self._path_NP),
            k.COLUMNS: self.columns[-1],
            k.NEIGHBOURS: self._neighbours,
            k.WEIGHTS: len(self._weight_D),
            k.HORIZON: len(self._worth_D),
            k.COUNT: self._count,
            k.SCALES: len(self._scale_F),
            k.VALUED: _VALUED,
        }
        arrays = {
            k.USES_AB: self._uses_AB,
            k.BEFORE_N: self._before_N,
            k.START_N: self._start_N,
            k.SOON_NA: self._soon_NA,
            k.WORTH_D: self._worth_D,
            k.PATH_NP: self._path_NP,
            k.PAST_A: self._use_A,
            k.USE_A: self.use_A,
            k.WEIGHT_D: self._weight_D,
            k.UNUSED_E: self.unused_E,
            k.KEY_E: self.key_E,
            k.PASSED_L: self._passed_L,
            k.SCALE_F: self._scale_F,
            k.WEIGHT_2: self._weight_2,
        }
        table = np.zeros(k.TABLE_SIZE, np.int64)
        table[[*sizes, *arrays]] = [*sizes.values(), *(array.ctypes.data for array in arrays.values())]
        return table

    def _last(self, window: RequestWindow) -> int:
        """Return the index of the request's last token, or -1 if it was overwritten."""
        return window.last if window.serial >= max(0, self._stored - self._size) else -1

    def _put(self, path_P: np.ndarray, item: int, last: int) -> None:
        if last >= 0:
            self._kernels.record_use(path_P, last, self._before_N, self._soon_NA, self._worth_D)
        self._kernels.store(
            path_P, item, last, self._path_NP, self._uses_AB, self._soon_NA, self._before_N, self._after_N
        )


def _make_batch(num_requests: int, num_tokens: int, num_columns: int) -> WindowBatch:
    path_TP = np.full((num_tokens, num_columns), -1, np.int32)
    path_bytes = path_TP.data.cast("B") if path_TP.size else memoryview(b"")
    row_R3 = np.zeros((num_requests, 3), np.int64)
    return WindowBatch(windows=(), row_R3=row_R3, path_TP=path_TP, path_bytes=path_bytes)


@cache
def _scales() -> np.ndarray:
    """Return the scale of past use after each number of forwards, up to where it stays 1: float64 [F]."""
    scales = [1.0]
    while len(scales) < 2 or scales[-1] > 1:
        scales.append(1 / (1 - RECALL ** len(scales)))
    return np.array(scales)


@cache
def pack_ints(width: int) -> Callable[..., None]:
    """Return the function that writes `width` int32 into a buffer."""
    return Struct(f"{width}i").pack_into


def memory_bytes(spec: ModelSpec, size: int, num_windows: int = 8) -> int:
    """Return the bytes of the arrays of a `TokenMemory` of `size` tokens with `num_windows` concurrent requests."""
    num = spec.num_layers * spec.num_experts
    token = num + (num + 7) // 8 + 4 * sum(spec.top_k_L) + 12
    fixed = 8 * num + _scales().nbytes
    return fixed + size * token + num_windows * (size * (spec.num_layers + 4) + 4 * num)


@cache
@line_if_slow(COMPILING)
def compile_loops() -> None:
    """Compile the loops with numba, once per process, so that no request waits for it; say so if it takes long.

    Raises:
        MoetoolError: numba is missing or fails.
    """
    spec = ModelSpec(
        name="",
        revision="",
        layer_ids_L=(0, 1),
        num_experts_L=(2, 2),
        top_k_L=(1, 1),
        has_logits_L=(False, False),
        num_shared_experts=0,
        num_groups=1,
        hidden_size=1,
        expert_bytes_L=(1, 1),
        score_function="softmax",
        renormalize=False,
    )
    try:
        memory = TokenMemory(spec, 4, 2)
        windows = [memory.open_window(), memory.open_window()]
        near_L, resident_A, value_A = np.ones(2, np.float32), np.ones(4, bool), np.zeros(4, np.float32)
        for _ in range(2):
            batch = memory.begin(windows, [[0], [1]])
            for layer in range(2):
                memory.observe(batch, layer, [[0], [1]])
                memory.value(batch, 0, 2, value_A)
                memory.value_all(batch, value_A)
                memory.expect(batch, layer, np.float32(0.5), resident_A)
                memory.least_valued(value_A, near_L, resident_A, np.zeros(1, np.int64))
            for row, window in enumerate(windows):
                memory.store(window, batch.path_TP[row])
    except Exception as error:  # numba raises errors of many types
        raise MoetoolError(f"policy foresight needs numba, which fails here: {first_line(error)}") from error
