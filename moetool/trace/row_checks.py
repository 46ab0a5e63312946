"""Checks of a trace's rows beyond their types, during reading.

Each check is a few NumPy passes over a batch in the CPU cache. tests/bench/test_row_checks.py measures their share of
the reading time.
"""

from pathlib import Path

import numpy as np

from moetool.base.errors import MismatchError
from moetool.base.types import ModelSpec, Phase
from moetool.trace.rows import COLUMNS, SIGNALS, TokenBatch

_INF_16 = 0x7C00  # float16 infinity as an integer: positive finite numbers are below it, NaN above
_MINUS_INF_16 = 0xFC00
_MINUS_ZERO_16 = 0x8000
_NUMBERS = {name: column for name, column in COLUMNS.items() if name in ("weights", *SIGNALS)}
_LOGITS = ("logits", "ahead", "resident", "logits32")


class RowChecks:
    """Checks of one pass over the rows of a trace, batch after batch.

    Args:
        path: path of the trace, for messages.
        requests_R: numbers of the trace's requests, ascending.
        tokens_R: number of rows of each.

    Checks: known requests; forwards in order; phases, iterations and positions that never go back within a request;
    experts of the model; finite weights of 0 or more; finite signals. A logit may be -inf, which masks its expert, but
    no router masks every expert.
    """

    def __init__(self, path: Path, spec: ModelSpec, requests_R: np.ndarray, tokens_R: np.ndarray) -> None:
        self._path = path
        self._spec = spec
        self._requests_R, self._tokens_R = requests_R, tokens_R
        count = len(requests_R)
        self._dense = count > 0 and int(requests_R[-1]) - int(requests_R[0]) == count - 1  # consecutive
        self._key = np.uint16 if count <= 2**16 else np.int64  # NumPy sorts 16-bit keys by radix
        self._seen_R = np.zeros(count, np.int64)
        self._position_R = np.full(count, -1, np.int64)
        self._iteration_R = np.zeros(count, np.int64)
        self._forward = 0
        self._bound_S = np.repeat(np.array(spec.num_experts_L), spec.top_k_L)
        self._equal = len(set(spec.num_experts_L)) == 1

    def check(self, rows: TokenBatch) -> None:
        """Raise MismatchError for the first invalid row."""
        if not len(rows):
            return
        index_T = self._index(rows.request_T)
        self._check_order(rows, index_T)
        if int(rows.phase_T.max()) > Phase.DECODE:
            raise self._wrong(rows, rows.phase_T > Phase.DECODE, "phase", rows.phase_T, "0 (prefill) or 1 (decode)")
        if int(rows.token_id_T.min()) < -1:
            raise self._wrong(rows, rows.token_id_T < -1, "token id", rows.token_id_T, "-1 or more")
        self._check_experts(rows)
        for name, field in _NUMBERS.items():
            if (values := getattr(rows, field)) is not None and values.size:
                self._check_numbers(rows, name, values)

    def finish(self) -> None:
        """Raise MismatchError if a request has more or fewer rows than requests.parquet says."""
        if (wrong_R := self._seen_R != self._tokens_R).any():
            at = int(wrong_R.argmax())
            raise MismatchError(
                f"{self._path} holds {self._seen_R[at]:,} of the {self._tokens_R[at]:,} tokens of request "
                f"{self._requests_R[at]}; capture again"
            )

    def _index(self, request_T: np.ndarray) -> np.ndarray:
        requests_R = self._requests_R
        if not len(requests_R):
            raise MismatchError(f"{self._path} has rows but no requests, expected a request for each; capture again")
        index_T = request_T - requests_R[0] if self._dense else np.searchsorted(requests_R, request_T)
        if int(index_T.min()) < 0 or int(index_T.max()) >= len(requests_R):
            known_T = (index_T >= 0) & (index_T < len(requests_R))
        elif self._dense:
            return index_T
        else:
            known_T = requests_R[index_T] == request_T
        if not known_T.all():
            request = int(request_T[int(known_T.argmin())])
            raise MismatchError(f"{self._path} has rows of request {request}, which it does not list; capture again")
        return index_T

    def _check_order(self, rows: TokenBatch, index_T: np.ndarray) -> None:
        if int(rows.forward_T[0]) < self._forward or (rows.forward_T[1:] < rows.forward_T[:-1]).any():
            raise MismatchError(
                f"{self._path}: forwards go back near forward {int(rows.forward_T.max())}, expected rows in the order "
                f"of their forwards; capture again"
            )
        self._forward = int(rows.forward_T[-1])
        order_T: np.ndarray | slice = slice(None)
        if (index_T[1:] < index_T[:-1]).any():
            order_T = np.argsort(index_T.astype(self._key), kind="stable")
        index_T, position_T, iteration_T = index_T[order_T], rows.position_T[order_T], rows.iteration_T[order_T]
        first_T = np.empty(len(index_T), bool)  # whether a row is the first of its request in this batch
        first_T[0] = True
        np.not_equal(index_T[1:], index_T[:-1], out=first_T[1:])
        starts = np.flatnonzero(first_T)
        mine = index_T[starts]
        before = np.empty(len(index_T), np.int64)
        for name, values_T, last_R, least in (
            ("positions", position_T, self._position_R, 1),
            ("iterations", iteration_T, self._iteration_R, 0),
        ):
            before[1:] = values_T[:-1]
            before[starts] = last_R[mine]
            back_T = values_T < before + least
            if back_T.any():
                at = int(back_T.argmax())
                raise MismatchError(
                    f"{self._path}: {name} of request {self._requests_R[index_T[at]]} go from {before[at]} to "
                    f"{values_T[at]}, expected them to rise; capture again"
                )
            last_R[mine] = values_T[np.append(starts[1:], len(index_T)) - 1]
        self._seen_R[mine] += np.diff(np.append(starts, len(index_T)))

    def _check_experts(self, rows: TokenBatch) -> None:
        if self._equal:
            if int(rows.experts_TS.max(initial=0)) < self._spec.num_experts_L[0]:
                return
        elif (rows.experts_TS.max(axis=0) < self._bound_S).all():
            return
        at, column = (int(i[0]) for i in np.nonzero(rows.experts_TS >= self._bound_S))
        layer = int(np.searchsorted(np.cumsum(self._spec.top_k_L), column, side="right"))
        raise MismatchError(
            f"{self._path}: request {rows.request_T[at]} uses expert {rows.experts_TS[at, column]} of MoE layer "
            f"{layer} at position {rows.position_T[at]}, expected 0 to {self._bound_S[column] - 1}; capture again"
        )

    def _check_numbers(self, rows: TokenBatch, name: str, values: np.ndarray) -> None:
        """Check numbers; float16 is compared as integers, since NumPy has no vector code for it."""
        if values.dtype != np.float16:
            wrong = np.isnan(values) | (values == np.inf)
            if wrong.any():
                raise self._no_number(rows, name, values, wrong, "a finite number")
            self._check_masks(rows, name, values == -np.inf)
            return
        bits = values.view(np.uint16)
        highest = int(bits.max())
        if name == "weights":
            if highest < _INF_16:
                return
            wrong = (bits >= _INF_16) & (bits != _MINUS_ZERO_16)
            expected = "a finite number of 0 or more"
        else:
            bound = _MINUS_INF_16 + (name in _LOGITS)
            if int(values.view(np.int16).max()) < _INF_16 and highest < bound:
                if highest == _MINUS_INF_16:
                    self._check_masks(rows, name, bits == _MINUS_INF_16)
                return
            wrong = ((bits >= _INF_16) & (bits < _MINUS_ZERO_16)) | (bits >= bound)
            expected = "a finite number"
        if wrong.any():
            raise self._no_number(rows, name, values, wrong, expected)

    def _check_masks(self, rows: TokenBatch, name: str, masked: np.ndarray) -> None:
        """Check that no router's logits are -inf throughout: its scores would be NaN."""
        if name in ("ahead", "resident"):
            starts = np.arange(0, masked.shape[1], self._spec.num_experts)
        else:
            starts = np.cumsum((0, *self._spec.num_experts_L[:-1]))
        all_T = np.logical_and.reduceat(masked, starts, axis=1).any(axis=1)
        if all_T.any():
            at = int(all_T.argmax())
            raise MismatchError(
                f"{self._path}: the column {name} masks every expert of a layer for request {rows.request_T[at]} at "
                f"position {rows.position_T[at]}, expected a finite logit; capture again"
            )

    def _no_number(
        self, rows: TokenBatch, name: str, values: np.ndarray, wrong: np.ndarray, expected: str
    ) -> MismatchError:
        at, column = (int(i[0]) for i in np.nonzero(wrong))
        return MismatchError(
            f"{self._path}: the column {name} holds {values[at, column]} for request {rows.request_T[at]} at "
            f"position {rows.position_T[at]}, expected {expected}; capture again"
        )

    def _wrong(
        self, rows: TokenBatch, wrong_T: np.ndarray, name: str, values_T: np.ndarray, expected: str
    ) -> MismatchError:
        at = int(wrong_T.argmax())
        return MismatchError(
            f"{self._path}: the {name} of request {rows.request_T[at]} at position {rows.position_T[at]} is "
            f"{values_T[at]}, expected {expected}; capture again"
        )


def check_whole(spec: ModelSpec, rows: TokenBatch, path: Path) -> None:
    """Raise MismatchError if a token uses an expert twice in a layer; expensive."""
    start = 0
    for layer, top_k in enumerate(spec.top_k_L):
        ranked_TK = np.sort(rows.experts_TS[:, start : start + top_k], axis=1)
        start += top_k
        twice_TK = ranked_TK[:, 1:] == ranked_TK[:, :-1]
        if twice_TK.any():
            at, column = (int(i[0]) for i in np.nonzero(twice_TK))
            raise MismatchError(
                f"{path}: request {rows.request_T[at]} uses expert {ranked_TK[at, column]} of MoE layer {layer} twice "
                f"at position {rows.position_T[at]}, expected different ones; capture again"
            )
