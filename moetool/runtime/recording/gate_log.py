"""A server's own trace: the routing of every forward, and a digest of the cache decisions.

`moetool replay` reads it like any other trace, in the recorded order, and takes the same decisions. The exception is a
failed forward: it leaves no rows, although decisions were taken in it. The manifest counts such forwards. Under a
policy that substitutes experts, rows hold the router's choice, and a replay substitutes the same ones.

Tokens of a prompt that were in the KV cache are not forwarded and have no rows: the first row of a request has the
position after them. The manifest counts them.

The trace can be read at any time, also after its server was killed. It then ends with the newest segment
(`moetool.trace.segments`), and its manifest holds the digest of the decisions up to there.
"""

import contextlib
import logging
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.hooks import RemovableHandle

from moetool.base import durable
from moetool.base.errors import MoetoolError
from moetool.caching.decision_digest import DecisionDigest
from moetool.caching.residency import Step
from moetool.models.loading import LoadedModel
from moetool.runtime.decoding import Batch
from moetool.runtime.experts.signals import request_means
from moetool.runtime.recording.recorder import GateRecorder
from moetool.trace.reader import MANIFEST, Trace
from moetool.trace.segments import SegmentLimits, SegmentStatus, SegmentWriter

_LOG = logging.getLogger(__name__)


class ServeLog:
    """Writes a trace of kind `log` into `out` while the engine runs.

    A disk that fails does not end the server: see `SegmentWriter`.

    Args:
        keep: columns besides the experts, as in `moetool capture --keep`.
        ahead: number of layers that the column `ahead` looks ahead, if it is kept.
        facts: other inputs that a replay needs for the same decisions: policy, options, slots, devices, learned state.

    Effects: `attach` hooks the model and makes `out`. A killed server's log there is renamed to `out.1`, or the next
    free number.

    Raises:
        UsageError: `out` exists and is not a killed server's log.
    """

    def __init__(
        self,
        out: Path,
        keep: Collection[str] = ("topk",),
        ahead: int = 1,
        facts: Mapping[str, Any] | None = None,
        limits: SegmentLimits | None = None,
    ) -> None:
        if not _left_open(out):
            durable.require_absent(out, None)
        self._out, self._keep, self._ahead, self._limits = out, keep, ahead, limits
        self._facts = dict(facts or {})
        self._stack = contextlib.ExitStack()
        self._writer: SegmentWriter | None = None
        self._recorder: GateRecorder | None = None
        self._batch: Batch | None = None
        self._digest = DecisionDigest()
        self._costs: list[tuple[int, float, float]] = []
        self._splits: list[tuple[int, int]] = []
        self._reserved_slots: list[tuple[int, int]] = []
        self._ends: list[tuple[int, int]] = []
        self._last: dict[int, int] = {}  # running requests, and the last forward of each
        self._forward = -1  # newest forward
        self._failed_forwards = 0
        self._reused_tokens = 0
        self._unseen: set[int] = set()  # requests without a forward so far

    @property
    def path(self) -> Path:
        return self._out

    def attach(self, loaded: LoadedModel, watch_partial: Callable[..., RemovableHandle] | None = None) -> None:
        """Start recording the model; `watch_partial` as for `GateRecorder`.

        Raises:
            UsageError: another process writes there.
            MoetoolError: the folder cannot be written.
        """
        with contextlib.ExitStack() as stack:
            stack.enter_context(durable.alone(self._out))
            if _left_open(self._out):
                kept = durable.set_aside(self._out)
                _LOG.warning("renamed the gate log %s of a killed server to %s", self._out, kept)
            durable.require_absent(self._out, None)
            try:
                self._out.mkdir()
                self._writer = SegmentWriter(
                    self._out,
                    loaded.spec,
                    self._keep,
                    self._ahead,
                    provenance={"model": str(loaded.checkpoint.path), **self._facts, **self._decided()},
                    limits=self._limits,
                )
            except (OSError, MoetoolError) as error:
                shutil.rmtree(self._out, ignore_errors=True)
                if isinstance(error, MoetoolError):
                    raise
                raise MoetoolError(f"cannot write the gate log {self._out}: {error.strerror or error}") from error
            self._recorder = GateRecorder(
                loaded.model, loaded.layers, self._keep, self._ahead, watch_partial=watch_partial
            )
            self._stack = stack.pop_all()

    def add_request(self, request: int, prompt_tokens: int) -> None:
        assert self._writer is not None
        self._writer.add_request(request, prompt_tokens)
        self._unseen.add(request)

    def begin_forward(self, batch: Batch) -> None:
        self._batch, self._forward = batch, batch.info.forward_id
        self._last |= dict.fromkeys(batch.info.request_T, self._forward)
        for request, position in zip(batch.info.request_T, batch.info.position_T, strict=True):
            if request in self._unseen:
                self._unseen.discard(request)
                self._reused_tokens += position

    def on_step(self, forward: int, layer: int, step: Step) -> None:
        self._digest(forward, layer, step)

    def on_costs(self, forward: int, load_s: float, host_s: float) -> None:
        """Record measured costs that apply from a forward on (`Policy.take_costs`)."""
        self._costs.append((forward, load_s, host_s))

    def on_split(self, forward: int, splits: bool) -> None:
        """Record whether the host computes some misses from a forward on (`moetool.caching.machine_split`)."""
        self._splits.append((forward, int(splits)))

    def on_reserved_slots(self, forward: int, slots: int) -> None:
        """Record the number of expert slots reserved from a forward on (`Residency.reserve_slots`)."""
        self._reserved_slots.append((forward, slots))

    def end_forward(self, failed: bool) -> None:
        """Write the finished forward; a failed one leaves no rows."""
        assert self._recorder is not None and self._writer is not None
        if failed or self._batch is None:
            self._recorder.discard()
            self._failed_forwards += 1
        else:
            rows, embedding_TD = self._recorder.take(self._batch)
            embeddings = None
            if embedding_TD is not None:
                means_TD = request_means(self._batch.info, torch.from_numpy(embedding_TD))
                requests = list(dict.fromkeys(self._batch.info.request_T))
                rows_of = [self._batch.info.request_T.index(request) for request in requests]
                iterations = [self._batch.iteration_T[row] for row in rows_of]
                embeddings = np.array(requests), np.array(iterations), means_TD[rows_of]
            self._writer.append(rows, embeddings, self._decided())
        self._batch = None

    def end_request(self, request: int) -> None:
        """Record the end of a request, after the policy's `end_request`."""
        assert self._writer is not None
        self._writer.end_request(request)
        self._unseen.discard(request)
        if self._last.pop(request, self._forward) != self._forward:  # cancelled: its rows do not show when it ended
            self._ends.append((self._forward, request))

    def status(self) -> SegmentStatus:
        """State of the rows so far."""
        assert self._writer is not None
        return self._writer.status()

    def close(self) -> None:
        """Write remaining rows and close the trace.

        Raises:
            MoetoolError: a write failed, now or earlier; the trace ends before it.
        """
        if self._writer is None or self._recorder is None:
            return
        self._recorder.close()
        writer, self._writer = self._writer, None
        with self._stack:
            writer.close(self._decided())

    def _decided(self) -> dict[str, Any]:
        return {
            "decisions": self._digest.hexdigest(),
            "failed_forwards": self._failed_forwards,
            "reused_tokens": self._reused_tokens,
            **({"costs": list(self._costs)} if self._costs else {}),
            **({"splits": list(self._splits)} if self._splits else {}),
            **({"lent": list(self._reserved_slots)} if self._reserved_slots else {}),
            **({"ends": list(self._ends)} if self._ends else {}),
        }


def _left_open(out: Path) -> bool:
    """Whether the folder holds a log that was never closed: its server still runs or was killed."""
    return (out / MANIFEST).is_file() and not Trace(out).closed
