"""Routes of single requests, for clients that ask for them with the answer."""

import numpy as np

from moetool.base.errors import MismatchError, UsageError
from moetool.models.loading import LoadedModel
from moetool.runtime.decoding import Batch
from moetool.runtime.recording.recorder import GateRecorder
from moetool.runtime.request import Output
from moetool.trace.foreign.model_facts import require_even, with_dense
from moetool.trace.rows import TokenBatch


class RequestRoutes:
    """Records requests from first to last forward; the model has hooks only while a request is recorded.

    All methods belong to the engine's thread.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._num_hidden = int(loaded.model.config.get_text_config().num_hidden_layers)
        self._dtype = np.uint8 if loaded.spec.num_experts <= 256 else np.uint16
        self._recorder: GateRecorder | None = None
        self._batch: Batch | None = None
        self._rows: dict[int, list[TokenBatch]] = {}  # rows not yet delivered
        self._positions: dict[int, int] = {}  # next position of each request

    def __contains__(self, request: int) -> bool:
        return request in self._rows

    def check(self) -> None:
        """Raises: UsageError: layers differ in experts or top-k, which one array cannot hold."""
        try:
            require_even(self._loaded.spec, "routed_experts")
        except MismatchError as error:
            raise UsageError(str(error)) from None

    def follow(self, request: int) -> None:
        """Start recording a request. Effects: hooks the model if no other request is recorded."""
        if self._recorder is None:
            self._recorder = GateRecorder(self._loaded.model, self._loaded.layers, ())
        self._rows[request], self._positions[request] = [], 0

    def begin_forward(self, batch: Batch) -> None:
        if self._recorder is not None:
            self._recorder.discard()
            self._batch = batch

    def end_forward(self, failed: bool) -> None:
        """End the forward; one that raised leaves no rows."""
        batch, self._batch = self._batch, None
        if self._recorder is None or batch is None:
            return
        if failed:
            self._recorder.discard()
            return
        rows, _ = self._recorder.take(batch)
        for request, kept in self._rows.items():
            # A request that lost its KV cache is forwarded again from its beginning.
            mine = rows.select((rows.request_T == request) & (rows.position_T >= self._positions[request]))
            if len(mine):
                kept.append(mine)
                self._positions[request] = int(mine.position_T[-1]) + 1

    def attach(self, output: Output) -> Output:
        """Add a recorded request's experts since the last output to its output.

        Effects: the last output ends the recording.
        """
        request = output.request
        if self._rows[request] and output.token is not None:
            experts_TS = TokenBatch.concatenate(self._rows[request]).experts_TS
            experts_THK = with_dense(self._loaded.spec, experts_TS, self._num_hidden)
            output = output._replace(experts_THK=experts_THK.astype(self._dtype))
            self._rows[request] = []
        if output.finish is not None:
            del self._rows[request], self._positions[request]
            if not self._rows and self._recorder is not None:
                self._recorder.close()
                self._recorder = None
        return output
