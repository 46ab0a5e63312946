"""The server's own trace: every forward's gate stream as it happened, and the decisions about it.

`moetool replay` reads it like any other trace, in the recorded order, and takes the same decisions, unless a forward
failed: that one leaves no rows, though decisions were taken in it. The manifest counts such forwards. Under a policy
that routes, the experts are those that the router chose, and a replay puts the same ones in their place.
"""

import contextlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from moetool import durable
from moetool.errors import MoetoolError
from moetool.models.decoding import Batch
from moetool.models.loading import LoadedModel
from moetool.models.recording import GateRecorder
from moetool.models.signals import request_means
from moetool.replay import DecisionDigest
from moetool.residency import Step
from moetool.trace.reader import MANIFEST
from moetool.trace.writer import TraceWriter


class ServeLog:
    """Writes a trace of kind `log` into `out` when it is closed.

    Args:
        keep: columns besides the experts, as in `moetool capture --keep`.
        ahead: for how many layers the column `ahead` looks ahead, where it is kept.
        facts: what else a replay has to be given to decide the same: policy, options, slots, devices, what was learned
            before.

    Effects: `attach` hooks the model and opens `out.partial`.
    """

    def __init__(
        self, out: Path, keep: Collection[str] = ("topk",), ahead: int = 1, facts: Mapping[str, Any] | None = None
    ) -> None:
        durable.require_absent(out, False, MANIFEST)
        self._out, self._keep, self._ahead, self._facts = out, keep, ahead, dict(facts or {})
        self._stack = contextlib.ExitStack()
        self._writer: TraceWriter | None = None
        self._recorder: GateRecorder | None = None
        self._loaded: LoadedModel | None = None
        self._batch: Batch | None = None
        self._prompt_tokens: dict[int, int] = {}
        self._new_tokens: dict[int, int] = {}
        self._digest = DecisionDigest()
        self._error: MoetoolError | None = None
        self._failed_forwards = 0

    def attach(self, loaded: LoadedModel) -> None:
        """Begin to record the model."""
        folder = self._stack.enter_context(durable.staged_directory(self._out, False, MANIFEST))
        self._loaded = loaded
        self._writer = TraceWriter(folder, loaded.spec, self._keep, self._ahead)
        self._recorder = GateRecorder(loaded.model, loaded.layers, self._keep, self._ahead)

    def add_request(self, request: int, prompt_tokens: int) -> None:
        """Take in a request."""
        self._prompt_tokens[request] = prompt_tokens

    def begin_forward(self, batch: Batch) -> None:
        """A forward begins."""
        self._batch = batch

    def on_step(self, forward: int, layer: int, step: Step) -> None:
        """A decision was taken."""
        self._digest(forward, layer, step)

    def end_forward(self, failed: bool) -> None:
        """Write the forward that has run; one that failed leaves no rows."""
        assert self._recorder is not None and self._writer is not None
        if failed or self._batch is None:
            self._recorder.discard()
            self._failed_forwards += 1
        else:
            rows, embedding_TD = self._recorder.take(self._batch)
            means_TD = None if embedding_TD is None else request_means(self._batch.info, torch.from_numpy(embedding_TD))
            for request, phase in zip(self._batch.info.request_T, self._batch.info.phase_T, strict=True):
                self._new_tokens[request] = self._new_tokens.get(request, 0) + phase
            try:
                self._writer.append(rows)
                if means_TD is not None:
                    for request in dict.fromkeys(self._batch.info.request_T):
                        place = self._batch.info.request_T.index(request)
                        self._writer.add_embedding(request, self._batch.iteration_T[place], means_TD[place])
            except MoetoolError as error:  # a full disk must not end the server; `close` tells of it
                self._error = self._error or error
        self._batch = None

    def close(self) -> None:
        """Write what is left and put the trace in its place.

        Raises:
            MoetoolError: something could not be written, now or earlier; then there is no trace.
        """
        if self._writer is None or self._recorder is None or self._loaded is None:
            return
        self._recorder.close()
        with self._stack:
            if self._error is not None:
                raise self._error
            for request, prompt_tokens in self._prompt_tokens.items():
                self._writer.add_request(
                    request,
                    dataset="serve",
                    task="",
                    prompt_id=str(request),
                    prompt_tokens=prompt_tokens,
                    new_tokens=self._new_tokens.get(request, 0),
                )
            provenance: dict[str, Any] = {
                "model": str(self._loaded.path),
                **self._facts,
                "decisions": self._digest.hexdigest(),
                "failed_forwards": self._failed_forwards,
            }
            self._writer.finish(composition={"kind": "log"}, provenance=provenance)
        self._writer = None
