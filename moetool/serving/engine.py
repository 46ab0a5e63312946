"""The engine: one thread that forwards the batch, takes requests and cancellations between forwards.

submit -> queue -> forward (experts from the pool) -> tokens to each request's sink
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import psutil

from moetool.errors import MoetoolError
from moetool.fleet import Pool
from moetool.models.batching import Batcher
from moetool.models.decoding import Batch
from moetool.models.loading import LoadedModel
from moetool.models.sampling import NOT_NUMBERS
from moetool.models.sequential import Sequential
from moetool.request import Output, SamplingParams, Sink, State, TokenLogprob, Unavailable
from moetool.serving.experts import ExpertRuntime
from moetool.serving.log import ServeLog
from moetool.serving.store import ExpertStore
from moetool.serving.stores import Stores, open_stores

_SAVE_SECONDS = 300.0
_FEW = 8
"""Requests that it takes without having begun them, however few run together."""


class Engine:
    """Serves a model by a cache policy.

    `submit`, `cancel`, `prompt_logprobs` and `metrics` may be called from any thread.

    Args:
        loaded: a model from `load_lazy`.
        residency: decides about the expert slots; its `num_slots` is the size of the pool. A `Fleet` has a pool on
            each of several devices.
        batcher: forwards the same model's requests.
        model_name: what clients call the model.
        host_memory_bytes: for experts in host memory (`ExpertStore`).
        log: records the gate stream and the decisions.
        save: called when the engine closes, and every few minutes: keeps what the policy has learned.
        open_runtime: what computes the experts: on this machine, unless another is given.

    Effects: allocates the pool. `start` starts the thread, `close` ends it and frees the pool's threads.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        tokenizer: Any,
        residency: Pool,
        batcher: Batcher | Sequential,
        *,
        model_name: str,
        io_threads: int = 2,
        host_memory_bytes: int | None = None,
        log: ServeLog | None = None,
        save: Callable[[], None] | None = None,
        open_runtime: Callable[[LoadedModel, Pool, ExpertStore | Stores], ExpertRuntime] = ExpertRuntime,
    ) -> None:
        if loaded.files is None:
            raise ValueError("the engine takes a model without its experts: load_lazy")
        self.model_name = model_name
        self.tokenizer = tokenizer
        self.spec = loaded.spec
        self.max_context = batcher.max_context
        self.max_requests = batcher.max_requests
        self.max_unbegun = max(min(_FEW, self.max_requests), self.max_requests // 2)
        self.vocab_size = int(loaded.model.config.get_text_config().vocab_size)
        self.state: State = "starting"
        self.store = open_stores(loaded, residency, io_threads, host_memory_bytes)
        self.residency = residency
        if log is not None:
            residency.sink = log.on_step
        self._save = save
        self._saved = time.monotonic()
        self.runtime = open_runtime(loaded, self.residency, self.store)
        self._batcher = batcher
        batcher.on_forward = self._on_forward
        self._log = log
        if log is not None:
            log.attach(loaded)
        self._sinks: dict[int, Sink] = {}
        self._scores: set[Future[list[TokenLogprob | None]]] = set()
        self._next_request = 0
        self._in_forward: tuple[int, ...] = ()
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self._forwards = self._failures = self._prompt_tokens = self._new_tokens = 0
        self._forward_seconds = 0.0
        self._forward_began: float | None = None
        self._dense_bytes = sum(tensor.nbytes for tensor in loaded.model.parameters() if not tensor.is_meta)

    # -- from any thread ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread; the engine is ready when this returns."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.state = "ready"
        self._thread.start()

    def check(self, prompt: list[int], params: SamplingParams) -> None:
        """Refuse what can never be served.

        Raises:
            UsageError: the prompt is empty or has ids outside the vocabulary.
            CapacityError: prompt and answer do not fit into the context.
        """
        self._batcher.check(prompt, params)

    def submit(self, prompt: list[int], params: SamplingParams, sink: Sink) -> int:
        """Queue a request; its tokens go to `sink`, on the engine's thread.

        Returns:
            The number of the request, for `cancel`.

        Raises:
            UsageError, CapacityError: as `check`.
            Unavailable: the engine is starting, draining or has failed.
        """
        self._require_ready()
        self._batcher.check(prompt, params)
        with self._wake:
            self._require_ready()
            request = self._take_number()
            self._sinks[request] = sink
            if params.max_tokens == 0:
                self._commands.append(lambda: self._deliver(Output(request, None, finish="length")))
            else:
                self._commands.append(lambda: self._add(request, prompt, params))
            self._wake.notify()
        return request

    def cancel(self, request: int) -> None:
        """Stop a request; its sink gets a last message `cancelled` unless it has ended already."""
        with self._wake:
            self._commands.append(lambda: self._cancel(request))
            self._wake.notify()

    def prompt_logprobs(self, prompt: list[int], top: int) -> list[TokenLogprob | None]:
        """Log-probabilities of the tokens of a prompt, None for the first; blocks until its forward has run.

        Raises: as `submit`.
        """
        self._require_ready()
        self._batcher.check(prompt, SamplingParams(max_tokens=0))
        answer: Future[list[TokenLogprob | None]] = Future()
        with self._wake:
            self._require_ready()
            self._scores.add(answer)
            answer.add_done_callback(self._scores.discard)
            request = self._take_number()
            self._commands.append(lambda: self._score(request, prompt, top, answer))
            self._wake.notify()
        return answer.result()

    def close(self) -> None:
        """Cancel what is left, end the thread, keep what was learned and the log.

        Raises:
            MoetoolError: one of them could not be written.
        """
        with self._wake:
            if self.state != "failed":
                self.state = "draining"
            for request in list(self._sinks):
                self._commands.append(partial(self._cancel, request))
            self._commands.append(self._stop)
            self._wake.notify()
        if self._thread is not None and self._thread.is_alive():
            self._thread.join()
        self.runtime.close()
        self._batcher.close()
        lost: list[str] = []
        for keep in (self._save, self._log.close if self._log is not None else None):
            try:
                if keep is not None:
                    keep()
            except MoetoolError as error:
                lost.append(str(error))
        if lost:
            raise MoetoolError("; ".join(lost))

    def metrics(self) -> dict[str, float]:
        """Counters and gauges by name, for /metrics and for reports."""
        counts, stats = self.residency.counts, self.store.stats
        return {
            "hits_kept": counts.kept,
            "hits_prefetched": max(0, counts.prefetched - stats.late),
            "hits_late": stats.late,
            "misses": counts.missed,
            "hosted": counts.hosted,
            "prefetch_wasted": counts.wasted,
            "expert_reads": stats.reads,
            "bytes_read": stats.bytes_read,
            "prefetch_bytes_read": stats.prefetch_bytes,
            "host_hits": stats.host_hits,
            "host_bytes": stats.host_bytes,
            "reads_retried": stats.retried,
            "stall_seconds": stats.stall_seconds,
            "host_stall_seconds": stats.host_stall_seconds,
            "forward_seconds": self._forward_seconds,
            "forward_running_seconds": 0.0 if (began := self._forward_began) is None else time.perf_counter() - began,
            "queue_running": self._batcher.running,
            "queue_waiting": max(0, len(self._sinks) - self._batcher.running),
            "tokens_prompt": self._prompt_tokens,
            "tokens_generated": self._new_tokens,
            "forwards": self._forwards,
            "failures": self._failures,
            "slots": self.store.num_slots,
            "slots_bytes": self.store.pool_bytes,
            "host_pool_bytes": self.store.host_pool_bytes,
            "kv_bytes": self._batcher.kv_bytes,
        }

    def stats(self) -> dict[str, Any]:
        """Hit rate by layer, bytes by tier, stall, prefetch recall, and memory by what holds it.

        `prefetch_recall` is the share of experts that were needed and not kept that a prefetch had brought in time or
        late. Rates are null before anything was needed.
        """
        counts, read = self.residency.counts, self.store.stats
        fetched = counts.prefetched + counts.missed + counts.hosted
        uses, misses = self.runtime.uses_L, self.runtime.misses_L
        return {
            "hit_rate": _share(counts.kept + counts.prefetched, counts.needed),
            "hit_rate_by_layer": [_share(use - miss, use) for use, miss in zip(uses, misses, strict=True)],
            "prefetch_recall": _share(counts.prefetched, fetched),
            "prefetches_wasted": counts.wasted,
            "bytes_by_tier": {"disk": read.bytes_read, "host": read.host_bytes},
            "stall_seconds": read.stall_seconds,
            "forward_seconds": self._forward_seconds,
            "forwards": self._forwards,
            "failures": self._failures,
            "tokens": {"prompt": self._prompt_tokens, "generated": self._new_tokens},
            "memory_bytes": {
                "dense": self._dense_bytes,
                "kv_cache": self._batcher.kv_bytes,
                "expert_slots": self.store.pool_bytes,
                "host_experts": self.store.host_pool_bytes,
                "process": psutil.Process().memory_info().rss,
            },
        }

    # -- on the engine's thread --------------------------------------------------------------------------------

    def step(self) -> None:
        """Carry out what was asked for and run one forward, if there is anything to forward."""
        while self._commands:
            self._commands.popleft()()
        if self._batcher.idle:
            return
        self._forward_began = began = time.perf_counter()
        outputs = self._batcher.step()
        self._forward_began = None
        self._forward_seconds += time.perf_counter() - began
        failed = any(output.finish == "error" for output in outputs)
        self._failures += failed
        self._after_forward(failed, ended={output.request for output in outputs if output.finish is not None})
        for output in outputs:
            self._new_tokens += output.token is not None
            self._deliver(output)
        if self._save is not None and time.monotonic() - self._saved > _SAVE_SECONDS:
            self._saved = time.monotonic()
            with contextlib.suppress(MoetoolError):  # a full disk must not end the server; `close` tells of it
                self._save()

    @property
    def idle(self) -> bool:
        """Whether nothing is queued or running."""
        return not self._commands and self._batcher.idle

    def _run(self) -> None:
        reason = "the engine was closed"
        try:
            while True:
                with self._wake:
                    while self.idle and self.state in ("ready", "draining"):
                        self._wake.wait()
                self.step()
        except _Stop:
            pass
        except BaseException as error:
            reason = f"the engine failed: {error}"
            raise
        finally:
            self._end(reason)

    def _end(self, reason: str) -> None:
        """Tell everybody who still waits that there will be no answer."""
        with self._wake:
            if self.state != "draining":
                self.state = "failed"
            self._commands.clear()
            waiting, scores = list(self._sinks), list(self._scores)
        for request in waiting:
            with contextlib.suppress(Exception):  # one broken sink must not leave the others waiting
                self._deliver(Output(request, None, finish="error", error=reason))
        for answer in scores:
            answer.set_exception(MoetoolError(reason))

    def _require_ready(self) -> None:
        if self.state != "ready":
            raise Unavailable(f"the server is {self.state}; try again later")

    def _take_number(self) -> int:
        number = self._next_request
        self._next_request += 1
        return number

    def _on_forward(self, batch: Batch) -> None:
        self._in_forward = tuple(dict.fromkeys(batch.info.request_T))
        if self._log is not None:
            self._log.begin_forward(batch)
        self.runtime.begin_forward(batch.info)

    def _add(self, request: int, prompt: list[int], params: SamplingParams) -> None:
        if request in self._sinks:  # not cancelled before it began
            self._prompt_tokens += len(prompt)
            if self._log is not None:
                self._log.add_request(request, len(prompt))
            self._batcher.add(request, prompt, params)

    def _cancel(self, request: int) -> None:
        if request in self._sinks:
            self._batcher.cancel(request)
            self.residency.end_request(request)
            self._deliver(Output(request, None, finish="cancelled"))

    def _score(self, request: int, prompt: list[int], top: int, answer: "Future[Any]") -> None:
        if self._log is not None:
            self._log.add_request(request, len(prompt))
        try:
            logits_TV = self._batcher.score(request, prompt)
        except Exception as error:
            self._failures += 1
            answer.set_exception(MoetoolError(str(error)))
        else:
            logprobs: list[TokenLogprob | None] = [None]
            for row_V, token in zip(logits_TV.log_softmax(-1), prompt[1:], strict=False):
                if row_V.isnan().any():
                    answer.set_exception(MoetoolError(NOT_NUMBERS))
                    break
                values, ids = row_V.topk(top)
                pairs = list(zip(ids.tolist(), values.tolist(), strict=True))
                logprobs.append(TokenLogprob(float(row_V[token]), pairs))
            if not answer.done():
                answer.set_result(logprobs)
        self._after_forward(failed=answer.exception() is not None, ended={request})

    def _after_forward(self, failed: bool, ended: set[int]) -> None:
        """Close the books on the forward that has run, or has failed."""
        self.runtime.end_forward()
        if self._in_forward:
            self._forwards += 1
            if self._log is not None:
                self._log.end_forward(failed)
        for request in self._in_forward:
            if request in ended:
                self.residency.end_request(request)
        self._in_forward = ()

    def _deliver(self, output: Output) -> None:
        sink = self._sinks.get(output.request)
        if output.finish is not None:
            self._sinks.pop(output.request, None)
        if sink is not None:
            sink(output)

    def _stop(self) -> None:
        raise _Stop


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


class _Stop(Exception):
    """Ends the engine's thread from inside its commands."""
