"""An MoE layer over ranks: rows go to their expert's rank, and products return for the sum."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch

from moetool.base.errors import MoetoolError, first_line
from moetool.base.types import ForwardInfo
from moetool.cluster.links import Bucket
from moetool.cluster.parallel.compute_windows import Windows
from moetool.cluster.parallel.expert_buffers import ExpertBuffers
from moetool.cluster.parallel.process_group import Group, GroupBroken
from moetool.models.experts.moe_layers import MoeLayer
from moetool.models.experts.stored_expert import Weight
from moetool.models.loading import LoadedModel
from moetool.placement.replica_routing import destinations
from moetool.runtime.experts.binding import bind_experts
from moetool.runtime.experts.grouping import ROWS_TOGETHER, ChoiceRows, weighted_sum

_FORGET = 0.5
"""Weight of the last phase in the prediction of the next one of its kind."""
_FEW_BYTES = 2**16
"""Bytes for each rank, padding included, up to which rows and counts share one all-to-all."""


@dataclass(slots=True, kw_only=True)
class DispatchTally:
    """Counters of a rank over a batch.

    Attributes:
        steps: steps in lockstep with the others, with or without own work.
        rows_SL: rows of experts computed here, by step and layer, from all ranks.
        tokens_LE: uses of experts by its own tokens.
        sent: bytes of rows sent to each GPU of the cluster, both ways of the all-to-all.
        expert_s: seconds of computing experts.
        dense_s: seconds of computing everything else.
        exchange_s: seconds in all-to-alls beside which nothing was computed, waiting for slower ranks included.
        wire: sums of 1, x, y, x x and x y over all-to-alls of rows without counts: x bytes leave this GPU, y seconds.
            All ranks enter these at once, since they have just exchanged counts.
    """

    tokens_LE: np.ndarray
    sent: list[int]
    steps: int = 0
    rows_SL: list[list[int]] = field(default_factory=list)
    expert_s: float = 0.0
    dense_s: float = 0.0
    exchange_s: float = 0.0
    wire: list[float] = field(default_factory=lambda: [0.0] * 5)


class RankExperts:
    """Computes a model's MoE layers together with other ranks.

    All ranks go through the layers in lockstep, each with the tokens of its own batch. One that has none takes part
    with no rows (`end_step`). A step's first layer takes an all-to-all of counts, one of rows with uneven splits, and
    one back. With the counts each rank sends its limit of rows for any other rank in this step. Where that is small
    for all, as in decode steps, the other layers take two all-to-alls: rows with their counts, and products back.
    Where it is not, and with `in_halves` (`join`), rows travel in two micro-batches: one while the other is computed.
    Experts then move beside the dense parts only.

    Rows of one rank and one expert form one product, wherever it is computed. The rank computes the weighted sum in
    the order of the token's top-k. Both are as in `ExpertRuntime`. So for one batch composition of a rank the result is
    bit-identical to a single machine's, under every placement and during migration.

    Args:
        buffers: the experts held here.
        gpu: this rank's number in the cluster.
        server_G: the server of each GPU.
        windows: called at the start of compute phases and all-to-alls.
        link: delays what the rank sends.

    Attributes:
        group: group of the running generation; None between generations.
        placed_GLE: the current placement.
        tally: counts since `count_anew`.

    Effects: computes the model's experts from now on (`bind_experts`).
    """

    def __init__(
        self,
        loaded: LoadedModel,
        buffers: ExpertBuffers,
        *,
        gpu: int,
        server_G: Sequence[int],
        windows: Windows,
        link: Bucket,
    ) -> None:
        bind_experts(loaded, self)
        self._in_halves = False
        self.buffers, self.windows = buffers, windows
        self._spec, self._layers = loaded.spec, loaded.layers
        self._gpu, self._server_G, self._link = gpu, tuple(server_G), link
        self._width = int(loaded.model.config.get_text_config().hidden_size)
        self._dtype = next(iter(loaded.model.parameters())).dtype
        self._device = loaded.device
        self._next = self._tokens = self._few = 0
        self._members: list[int] = []
        self._to_LE: np.ndarray | None = None
        self._half_GLE: np.ndarray  # experts of the second micro-batch
        self._row_s = 0.0
        self._dense_before_s: dict[int, float] = {}
        self._began = time.perf_counter()
        self.group: Group | None = None
        self.placed_GLE: np.ndarray
        self.tally: DispatchTally
        self.count_anew()

    def join(self, group: Group, members: Sequence[int], placed_GLE: np.ndarray, in_halves: bool) -> None:
        """Enter a new generation.

        Args:
            members: the GPU of each of the group's ranks.
            in_halves: whether steps with many rows use two micro-batches; the same at all ranks.
        """
        self._in_halves = in_halves
        self.group, self._members, self._next = group, list(members), 0
        self.place(placed_GLE)

    def place(self, placed_GLE: np.ndarray) -> None:
        """Switch to another placement at the next step; every rank must do so before the same step."""
        self.placed_GLE = placed_GLE
        self._to_LE = destinations(placed_GLE, self._server_G)[self._gpu]
        self._half_GLE = placed_GLE.cumsum(axis=2) % 2 == 0

    def count_anew(self) -> DispatchTally:
        """Begin a new tally; returns the old one."""
        old = getattr(self, "tally", None)
        shape = (self._spec.num_layers, self._spec.num_experts)
        self.tally = DispatchTally(tokens_LE=np.zeros(shape, np.int64), sent=[0] * len(self._server_G))
        return old or self.tally

    def begin_step(self) -> None:
        self._next = self._tokens = self._few = 0
        self._began = time.perf_counter()
        self.tally.steps += 1
        self.tally.rows_SL.append([0] * self._spec.num_layers)
        self.windows.open(self._dense_before_s.get(0, 0.0))

    def begin_forward(self, info: ForwardInfo) -> None:
        """Announce the next forward, this rank's part of the step."""
        self._tokens += len(info.request_T)

    def end_step(self) -> None:
        """Take part in layers without own rows, or after a failed forward. Raises: GroupBroken: a rank has ended."""
        while self._next < self._spec.num_layers:
            self._exchange(self._layers[self._next], {})

    def forward(
        self, layer: MoeLayer, hidden_TD: torch.Tensor, index_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> torch.Tensor:
        """See `ComputesExperts`."""
        products = self._products(layer, hidden_TD, index_TK, index_TK.shape[1])
        return weighted_sum(products, weights_TK).to(hidden_TD.dtype)

    def scaled_products(
        self, layer: MoeLayer, x: torch.Tensor, index_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> torch.Tensor:
        """See `ComputesExperts`."""
        return self._products(layer, x, index_TK, 1)

    def _products(self, layer: MoeLayer, x: torch.Tensor, index_TK: torch.Tensor, each: int) -> torch.Tensor:
        """Return the unweighted outputs [T * K, D] of each token's experts; choice r is of row r // `each` of `x`."""
        rows = ChoiceRows(tuple(map(tuple, index_TK.tolist())), x, each)
        if layer.index != self._next:
            raise RuntimeError(f"MoE layer {layer.index}, expected {self._next}: ranks run in lockstep")
        parts = {expert: rows.input(expert) for expert in rows.rows_of}
        identical = [expert for expert in parts if expert >= layer.form.num_experts]
        for expert in identical:
            rows.put(expert, parts.pop(expert))
        outputs = self._exchange(layer, parts)
        for expert, output in outputs.items():
            rows.put(expert, output if layer.form.finish is None else layer.form.finish(output))
        return rows.products()

    def _exchange(self, layer: MoeLayer, parts: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Compute each expert's output for this rank's rows, and the other ranks' rows."""
        group = self.group
        assert group is not None and self._to_LE is not None, "no generation runs"
        try:
            index = layer.index
            made_RE = np.zeros((group.size, self._spec.num_experts), np.int64)  # faster than torch for single numbers
            rank_of = {gpu: rank for rank, gpu in enumerate(self._members)}
            order = sorted((rank_of[int(self._to_LE[index, expert])], expert) for expert in parts)
            for rank, expert in order:
                made_RE[rank, expert] = parts[expert].shape[0]
            self.tally.tokens_LE[index] += made_RE.sum(axis=0)
            self._note_dense(index)
            self._begin_exchange(group)
            theirs_RE = None if self._few else self._tell_counts(group, made_RE, first=index == 0)
            if theirs_RE is None or self._few or not self._in_halves:
                outputs = self._exchange_whole(group, layer, parts, order, made_RE, theirs_RE)
            else:
                outputs = self._exchange_halves(group, layer, parts, order, made_RE, theirs_RE)
            self._end_exchange(self._dense_before_s.get((index + 1) % self._spec.num_layers, 0.0))
        except GroupBroken:
            raise
        except Exception as error:  # the others wait for missing rows, so the generation ends
            group.broken = group.broken or error
            group.abort()
            raise GroupBroken(f"GPU {self._gpu} cannot compute its part ({first_line(error)})") from error
        self._next = index + 1
        self._began = time.perf_counter()
        return outputs

    def _exchange_whole(
        self,
        group: Group,
        layer: MoeLayer,
        parts: Mapping[int, torch.Tensor],
        order: Sequence[tuple[int, int]],
        made_RE: np.ndarray,
        theirs_RE: np.ndarray | None,
    ) -> dict[int, torch.Tensor]:
        """Two all-to-alls, the first of which carries the counts too, if they are not known."""
        rows_XD, send_R = self._joined(parts, order), made_RE.sum(axis=1).tolist()
        began, away = time.perf_counter(), self._count_sent(send_R, rows_XD)
        self._link.take(away)
        if theirs_RE is None:
            got_YD, theirs_RE = group.exchange_few(rows_XD, made_RE, self._few)
        else:
            got_YD = group.exchange(rows_XD, send_R, theirs_RE.sum(axis=1).tolist())
            self._note_wire(away, time.perf_counter() - began)
        self._end_exchange(len(got_YD) * self._row_s)
        products_YD = self._compute_held(layer, got_YD, theirs_RE)
        self._begin_exchange(group)
        receive_R = theirs_RE.sum(axis=1).tolist()
        self._link.take(self._count_sent(receive_R, products_YD))
        return _by_expert(group.exchange(products_YD, receive_R, send_R), parts, order)

    def _exchange_halves(
        self,
        group: Group,
        layer: MoeLayer,
        parts: Mapping[int, torch.Tensor],
        order: Sequence[tuple[int, int]],
        made_RE: np.ndarray,
        theirs_RE: np.ndarray,
    ) -> dict[int, torch.Tensor]:
        """Rows in two micro-batches: one is exchanged while the other is computed.

        A micro-batch has every other expert of each GPU, so each product keeps its rows.
        """
        half_RE = self._half_GLE[self._members, layer.index]
        arriving, halves = [], []
        began = time.perf_counter()
        for half in (False, True):
            mine = [(rank, expert) for rank, expert in order if half_RE[rank, expert] == half]
            rows_XD = self._joined(parts, mine)
            send_R = np.where(half_RE == half, made_RE, 0).sum(axis=1).tolist()
            come_RE = np.where(half_RE[group.rank] == half, theirs_RE, 0)
            receive_R = come_RE.sum(axis=1).tolist()
            away = self._count_sent(send_R, rows_XD)
            arriving.append(group.begin_exchange(rows_XD, send_R, receive_R, partial(self._link.take, away)))
            halves.append((mine, send_R, come_RE, receive_R, away))
        returning = []
        for number, (_, send_R, come_RE, receive_R, away) in enumerate(halves):
            got_YD = arriving[number]()
            self.tally.exchange_s += time.perf_counter() - self._began
            if not number:
                self._note_wire(away, time.perf_counter() - began)
            products_YD = self._compute_held(layer, got_YD, come_RE)
            self._began = time.perf_counter()
            first = partial(self._link.take, self._count_sent(receive_R, products_YD))
            returning.append(group.begin_exchange(products_YD, receive_R, send_R, first))
        outputs: dict[int, torch.Tensor] = {}
        for (mine, *_), arrived in zip(halves, returning, strict=True):
            outputs |= _by_expert(arrived(), parts, mine)
        return outputs

    def _joined(self, parts: Mapping[int, torch.Tensor], order: Sequence[tuple[int, int]]) -> torch.Tensor:
        """Rows to send, by rank, then by expert."""
        if not order:
            return torch.empty(0, self._width, dtype=self._dtype, device=self._device)
        return torch.cat([parts[expert] for _, expert in order])

    def _tell_counts(self, group: Group, counts_RE: np.ndarray, first: bool) -> np.ndarray:
        """Exchange row counts; in a step's first layer, also each rank's limit of rows for another."""
        if not first:
            return group.counts(counts_RE)
        most = self._tokens * max(self._spec.top_k_L)
        told = group.counts(np.concatenate([counts_RE, np.full((group.size, 1), most)], axis=1))
        most = int(told[:, -1].max())
        row_bytes = self._width * torch.empty(0, dtype=self._dtype).element_size()
        self._few = most if most * row_bytes <= _FEW_BYTES else 0
        return told[:, :-1]

    def _compute_held(self, layer: MoeLayer, got_YD: torch.Tensor, theirs_RE: np.ndarray) -> torch.Tensor:
        """Products of the received rows, in their order: by rank, then by expert."""
        began = time.perf_counter()
        rows = len(got_YD)
        form = replace(layer.form, finish=None)
        ranks_N, experts_N = np.nonzero(theirs_RE)
        lengths = theirs_RE[ranks_N, experts_N].tolist()
        outputs: list[torch.Tensor] = []
        together: list[tuple[torch.Tensor, tuple[Weight, ...]]] = []
        num_rows = 0
        # One product per source and expert; new memory, aligned as on the source.
        for expert, x in zip(experts_N.tolist(), got_YD.split_with_sizes(lengths), strict=True):
            key = self._spec.expert_key(layer.index, expert)
            if key not in self.buffers:
                raise MoetoolError(f"expert {expert} of MoE layer {layer.index} is not on GPU {self._gpu}")
            if together and num_rows + x.shape[0] > ROWS_TOGETHER:
                outputs += form.compute_each(*zip(*together, strict=True))
                together, num_rows = [], 0
            together.append((x.clone(), self.buffers.weights(key)))
            num_rows += x.shape[0]
        if together:
            outputs += form.compute_each(*zip(*together, strict=True))
        out_YD = torch.cat(outputs) if outputs else torch.empty_like(got_YD)
        if out_YD.is_cuda:
            torch.cuda.current_stream(out_YD.device).synchronize()
        taken_s = time.perf_counter() - began
        self.tally.expert_s += taken_s
        self.tally.rows_SL[-1][layer.index] += rows
        if rows:
            self._row_s += _FORGET * (taken_s / rows - self._row_s)
        return out_YD

    def _note_dense(self, index: int) -> None:
        taken_s = time.perf_counter() - self._began
        self.tally.dense_s += taken_s
        before_s = self._dense_before_s.get(index, taken_s)
        self._dense_before_s[index] = before_s + _FORGET * (taken_s - before_s)

    def _note_wire(self, away: int, taken_s: float) -> None:
        wire = (1, away, taken_s, away**2, away * taken_s)
        self.tally.wire = [a + b for a, b in zip(self.tally.wire, wire, strict=True)]

    def _begin_exchange(self, group: Group) -> None:
        self.windows.close(group.timeout_s)
        self._began = time.perf_counter()

    def _end_exchange(self, next_s: float) -> None:
        self.tally.exchange_s += time.perf_counter() - self._began
        self.windows.open(next_s)

    def _count_sent(self, rows_R: Sequence[int], rows_XD: torch.Tensor) -> int:
        """Count and return the bytes that leave this GPU."""
        row_bytes = rows_XD.shape[1] * rows_XD.element_size()
        away = 0
        for rank, rows in enumerate(rows_R):
            gpu = self._members[rank]
            if gpu != self._gpu:
                self.tally.sent[gpu] += rows * row_bytes
                away += rows * row_bytes
        return away


def _by_expert(
    rows_XD: torch.Tensor, parts: Mapping[int, torch.Tensor], order: Sequence[tuple[int, int]]
) -> dict[int, torch.Tensor]:
    """Split returned products, in the order of the sent rows."""
    lengths = [parts[expert].shape[0] for _, expert in order]
    return dict(zip([expert for _, expert in order], rows_XD.split_with_sizes(lengths), strict=True)) if order else {}
