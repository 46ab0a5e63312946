"""The engine: one thread that forwards batches and takes requests and cancellations between forwards.

submit -> queue -> forward (experts from the pool) -> tokens to each request's sink
"""

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import psutil

from moetool.base import plugins
from moetool.base.errors import MoetoolError
from moetool.base.types import ForwardInfo
from moetool.caching.devices import Pool
from moetool.caching.machine_split import MachineSplit
from moetool.caching.residency import Counts, Residency
from moetool.kernels.cpu.matmul import chosen_kernels
from moetool.models.loading import LoadedModel
from moetool.models.shards import WeightsChanged
from moetool.runtime.decoding import Batch, token_logprobs
from moetool.runtime.experts.forward import ExpertRuntime
from moetool.runtime.experts.store import ExpertStore
from moetool.runtime.loop.batching import Batcher
from moetool.runtime.loop.own_caches import OwnCaches
from moetool.runtime.loop.split_guard import SplitGuard
from moetool.runtime.memory_share import MemoryShare
from moetool.runtime.recording.live_oracle import LiveOracle
from moetool.runtime.recording.request_routes import RequestRoutes
from moetool.runtime.request import Output, SamplingParams, Sink, State, TokenLogprob, Unavailable
from moetool.runtime.returned_memory import trim_heap

if TYPE_CHECKING:
    from moetool.runtime.recording.gate_log import ServeLog
    from moetool.trace.segments import SegmentStatus

_LOG = logging.getLogger(__name__)
SAVE_SECONDS = 300.0
_FEW = 8
"""Most requests in the queue, whatever the batch size."""


class Engine:
    """Serves a model with a cache policy.

    `submit`, `cancel`, `prompt_logprobs` and `metrics` may be called from any thread.

    Args:
        loaded: a model from `load_lazy`.
        runtime: computes the model's experts; its residency assigns expert slots.
        batcher: forwards the requests of the same model.
        model_name: the model's name for clients.
        log: records the gate stream and the decisions.
        save: saves the policy's learned state; called every few minutes and at close.
        closes_model: whether `close` closes the model, which otherwise may serve further engines.

    Attributes:
        host_order: order in which experts are read into host memory ahead of use, for display; empty: they are not.
        split: split of misses between link and host; None: the policy places them.

    Effects: owns the model and the runtime. `start` starts the thread, `close` ends it, frees the runtime's threads and
        closes the model's files.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        tokenizer: Any,
        runtime: ExpertRuntime,
        batcher: Batcher | OwnCaches,
        *,
        model_name: str,
        log: "ServeLog | None" = None,
        save: Callable[[], None] | None = None,
        closes_model: bool = True,
    ) -> None:
        self._loaded = loaded
        self._closes_model = closes_model
        self._files = None if loaded.files is None else loaded.files.shards
        self._reason = ""
        self.host_order = ""
        self.model_name = model_name
        self.tokenizer = tokenizer
        self.spec = loaded.spec
        self.max_context = batcher.max_context
        self.max_requests = batcher.max_requests
        self.max_unbegun = max(min(_FEW, self.max_requests), self.max_requests // 2)
        self.vocab_size = int(loaded.model.config.get_text_config().vocab_size)
        self.state: State = "starting"
        self.runtime = runtime
        self.store = runtime.store
        self.residency = runtime.residency
        if log is not None:
            self.residency.sink = log.on_step
            runtime.on_costs = log.on_costs
        self._oracle: LiveOracle | None = None
        self._share: MemoryShare | None = None
        self.split: MachineSplit | None = None
        self._guard: SplitGuard | None = None
        self._splits = True  # the coming requests
        self._decoding = 0  # requests of this forward, if all of them decode
        self._save = save
        self._saved = time.monotonic()
        self.batcher = batcher
        batcher.on_forward = self._on_forward
        batcher.stalled_s = lambda: self.store.stats.stall_seconds
        if isinstance(batcher, Batcher):
            batcher.record_steps(loaded.layers, runtime)
        self._log = log
        if log is not None:
            log.attach(loaded, runtime.watch_partial_logits)
        self._routes = RequestRoutes(loaded)
        self._sinks: dict[int, Sink] = {}
        self._scores: set[Future[list[TokenLogprob | None]]] = set()
        self._next_request = 0
        self._in_forward: tuple[int, ...] = ()
        self._at_begin: tuple[ForwardInfo, Counts, float] | None = None
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self._forwards = self._failures = self._prompt_tokens = self._reused_tokens = self._new_tokens = 0
        self._forward_seconds = 0.0
        self._forward_began: float | None = None
        self._stored_dense_bytes = loaded.checkpoint.stored_dense_bytes
        self._dense_bytes = sum(tensor.nbytes for tensor in loaded.model.parameters() if not tensor.is_meta)

    def compare_with(self, oracle: LiveOracle) -> None:
        """Compare the policy with others while serving; the oracle starts and closes with the engine."""
        self._oracle = oracle

    def split_misses(self, split: MachineSplit, guard: SplitGuard | None) -> None:
        """Use the residency's split as long as `guard` finds that faster; None: always."""
        self.split, self._guard = split, guard

    def share_memory(self, share: MemoryShare) -> None:
        """Let long prompt chunks borrow expert slots from the next forward on; for a single CPU device."""
        assert isinstance(self.residency, Residency) and isinstance(self.store, ExpertStore)
        self._share = share

    # -- from any thread ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread; the engine is ready when this returns."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.state = "ready"
        _LOG.info(
            "engine of %s ready: %d of %d experts fit; bytes: dense %d, KV cache %d, expert slots %d, host tier %d",
            *(self.model_name, self.store.num_slots, self.spec.total_experts, self._dense_bytes),
            *(self.batcher.kv_bytes, self.store.pool_bytes, self.store.host_pool_bytes),
        )
        self._thread.start()
        if self._oracle is not None:
            self._oracle.start()

    def check(self, prompt: list[int], params: SamplingParams) -> None:
        """Refuse a request that can never be served.

        Raises:
            UsageError: the prompt is empty or has ids outside the vocabulary.
            CapacityError: prompt and answer do not fit into the context.
        """
        self.batcher.check(prompt, params)
        if params.return_routes:
            self._routes.check()

    def submit(self, prompt: list[int], params: SamplingParams, sink: Sink) -> int:
        """Queue a request; its tokens go to `sink`, on the engine's thread.

        Returns:
            The request's number, for `cancel`.

        Raises:
            UsageError, CapacityError: see `check`.
            Unavailable: the engine is starting, draining or has failed.
        """
        self._require_ready()
        self.check(prompt, params)
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
        """Stop a request; its sink receives a last message `cancelled` unless the request has ended."""
        with self._wake:
            self._commands.append(lambda: self._cancel(request))
            self._wake.notify()

    def prompt_logprobs(self, prompt: list[int], top: int) -> list[TokenLogprob | None]:
        """Log-probabilities of a prompt's tokens, None for the first; blocks until its forward has run.

        Raises: see `submit`.
        """
        self._require_ready()
        self.batcher.check(prompt, SamplingParams(max_tokens=0))
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
        """Cancel remaining requests, end the thread, save the policy's state, the log and kept prefixes.

        Raises:
            MoetoolError: state, log or prefixes could not be written.
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
        if self._oracle is not None:
            self._oracle.close()
        lost: list[str] = []

        def write(save: Callable[[], None]) -> None:
            try:
                save()
            except MoetoolError as error:
                lost.append(str(error))

        self.runtime.close()
        for save in (self._save, None if self._log is None else self._log.close):
            if save is not None:
                write(save)
        if self.state != "failed" and isinstance(self.batcher, Batcher):
            write(self.batcher.save_prefixes)
        self.batcher.close()
        _LOG.info(
            "engine of %s closed after %d forwards in %.3f s: %d tokens generated, %d failures, %s",
            *(self.model_name, self._forwards, self._forward_seconds, self._new_tokens, self._failures),
            self.store.stats,
        )
        if self._closes_model:
            self._loaded.close()
        if lost:
            raise MoetoolError("; ".join(lost))

    def metrics(self) -> dict[str, float]:
        """Counters and gauges by name, for /metrics and reports."""
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
            "queue_running": self.batcher.running,
            "queue_waiting": max(0, len(self._sinks) - self.batcher.running),
            "tokens_prompt": self._prompt_tokens,
            "tokens_reused": self._reused_tokens,
            "tokens_generated": self._new_tokens,
            "kv_pages_evicted": self.batcher.evicted_pages,
            "forwards": self._forwards,
            "failures": self._failures,
            "slots": self.store.num_slots,
            "slots_bytes": self.store.pool_bytes,
            "host_pool_bytes": self.store.host_pool_bytes,
            "kv_bytes": self.batcher.kv_bytes,
            **({} if self._log is None else _gate_log_metrics(self._log.status())),
        }

    def stats(self) -> dict[str, Any]:
        """Hit rate by layer, bytes by tier, bytes of an expert, stall, prefetch recall, and memory by use.

        `prefetch_recall` is the share of needed experts not kept in cache that were prefetched, in time or late. Rates
        are null before the first event. `experts` counts uses and loads by layer and by expert (`expert_map`). `oracle`
        compares the last forwards (`LiveOracle`). `host_experts_read` is the order in which host memory is filled.
        `host_compute` has the costs by which the host computes misses, which of them are assumed, whether it does, and
        measured steps relative to those without; null where it never does.
        `recorded_steps` says whether decode steps run as programs (`moetool.runtime.steps`), or why not, and `kernels`
        which compiled products this process has (`chosen_kernels`); both null beside a GPU.
        """
        counts, read = self.residency.counts, self.store.stats
        fetched = counts.prefetched + counts.missed + counts.hosted
        experts = self.runtime.counts.to_map(self.spec, _residents(self.residency))
        by_layer = experts["by_layer"]
        return {
            "hit_rate": _share(counts.kept + counts.prefetched, counts.needed),
            "hit_rate_by_layer": list(map(_share, by_layer["hits"], by_layer["needed"])),
            "experts": experts,
            "oracle": None if self._oracle is None else self._oracle.latest,
            "prefetch_recall": _share(counts.prefetched, fetched),
            "prefetches_wasted": counts.wasted,
            "bytes_by_tier": {"disk": read.bytes_read, "host": read.host_bytes},
            "stall_seconds": read.stall_seconds,
            "forward_seconds": self._forward_seconds,
            "forwards": self._forwards,
            "failures": self._failures,
            "tokens": {"prompt": self._prompt_tokens, "reused": self._reused_tokens, "generated": self._new_tokens},
            "host_experts_read": self.host_order or None,
            "host_compute": self._host_compute(),
            "recorded_steps": self._recorded_steps(),
            "kernels": chosen_kernels() if self.store.devices[0].type == "cpu" else None,
            "expert_bytes": {"stored": self.spec.slot_bytes, "slot": self.store.files.slot_bytes},
            "dense_bytes": {"stored": self._stored_dense_bytes, "memory": self._dense_bytes},
            "memory_bytes": self.memory_bytes(),
            "gate_log": None if self._log is None else {"path": str(self._log.path), **asdict(self._log.status())},
        }

    def memory_bytes(self) -> dict[str, int]:
        """Bytes of memory by use, and of the whole process."""
        reserved = self.residency.reserved_slots
        reserved_bytes = reserved * self.store.pool_bytes // self.store.num_slots
        return {
            "dense": self._dense_bytes,
            "kv_cache": self.batcher.kv_bytes - self.batcher.held_kv_bytes,
            "expert_slots": self.store.pool_bytes - reserved_bytes,
            "lent_by_expert_slots": reserved_bytes,
            "host_experts": self.store.host_pool_bytes,
            "process": psutil.Process().memory_info().rss,
        }

    def _host_compute(self) -> dict[str, Any] | None:
        if self.split is None:
            return None
        ended, ratio = (False, None) if self._guard is None else (self._guard.ended, self._guard.ratio)
        return {**self.split.to_json(), "active": self.split.active, "ended": ended, "step_ratio": ratio}

    def _recorded_steps(self) -> dict[str, Any] | None:
        if not isinstance(self.batcher, Batcher):
            return {"refused": "its requests have caches of their own", "steps": 0, "calls": 0}
        recorded = self.batcher.recorded
        if recorded is None:
            return None
        return {"refused": recorded.refused or None, "steps": recorded.steps, "calls": recorded.calls}

    # -- on the engine's thread --------------------------------------------------------------------------------

    def step(self) -> None:
        """Carry out queued commands and run one forward if any request is pending."""
        while self._commands:
            self._commands.popleft()()
        if self.batcher.idle:
            return
        self._decoding = 0
        self._forward_began = began = time.perf_counter()
        outputs = self.batcher.step()
        self._forward_began = None
        self._forward_seconds += (seconds := time.perf_counter() - began)
        self._failures += (failed := self.batcher.failed)
        self._after_forward(failed, [output.request for output in outputs if output.finish is not None])
        for output in outputs:
            self._new_tokens += output.token is not None
            self._reused_tokens += output.reused
            self._deliver(output)
        if self._guard is not None and not failed:
            self._watch_split(self._guard, seconds)
        self._require_unchanged()
        if self._save is not None and time.monotonic() - self._saved > SAVE_SECONDS:
            self._saved = time.monotonic()
            try:
                self._save()
            except MoetoolError as error:  # a full disk must not end the server; `close` reports it
                _LOG.warning("policy state not saved: %s", error)

    @property
    def problems(self) -> Sequence[str]:
        """Why the engine failed, or what is wrong although it still serves; names no path."""
        if self.state == "failed":
            return (self._reason or "the server's log says why it failed",)
        if self._log is None or not (error := self._log.status().error):
            return ()
        return (f"the gate log cannot be written: {error}",)

    @property
    def idle(self) -> bool:
        """Whether nothing is queued or running."""
        return not self.num_pending and self.batcher.idle

    @property
    def num_pending(self) -> int:
        """Number of requests, cancellations and scores in the engine's inbox."""
        return len(self._commands)

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
        except WeightsChanged as error:
            reason = f"{error}; start the server again, and replace weights by renaming new files over them"
            self._reason = reason
            _LOG.error("serving stops: %s", reason)
        except BaseException as error:
            reason = f"the engine failed: {error}"
            _LOG.error("%s", reason)
            raise
        finally:
            self._end(reason)

    def _end(self, reason: str) -> None:
        """Tell all waiting clients that no answer will come."""
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
            if self.state == "failed":
                raise Unavailable(f"the engine failed: {self.problems[0]}")
            raise Unavailable(f"the server is {self.state}; try again later")

    def _take_number(self) -> int:
        number = self._next_request
        self._next_request += 1
        return number

    def _on_forward(self, batch: Batch) -> None:
        self._in_forward = tuple(dict.fromkeys(batch.info.request_T))
        if _LOG.isEnabledFor(logging.DEBUG):
            self._at_begin = (batch.info, self.residency.counts, self.store.stats.stall_seconds)
        self._decoding = 0 if batch.info.prefill else len(batch.info.request_T)
        self._change_split(batch.info.forward_id)
        self._reserve_slots(batch.info)
        if self._log is not None:
            self._log.begin_forward(batch)
        self._routes.begin_forward(batch)
        self.runtime.begin_forward(batch.info)

    def _watch_split(self, guard: SplitGuard, seconds: float) -> None:
        """Note a step, and choose between requests whether the split serves the next ones."""
        if self._decoding:
            guard.add(self._decoding, seconds)
        if self.batcher.idle and not guard.ended:
            self._splits = guard.choose()
            if guard.ended:
                _LOG.warning("the host computes no further misses: steps took %.2f x those without", guard.ratio)

    def _change_split(self, forward: int) -> None:
        """Begin or end the split before this forward."""
        if self.split is None or self._splits == self.split.active:
            return
        self.split.active = self._splits
        if self._log is not None:
            self._log.on_split(forward, self._splits)

    def _reserve_slots(self, info: ForwardInfo) -> None:
        """Reserve expert slots for the next forward and the KV cache, or return them."""
        if self._share is None:
            return
        assert isinstance(self.residency, Residency) and isinstance(self.store, ExpertStore)
        before, wanted = self.residency.reserved_slots, self._share.slots_for_forward(len(info.request_T))
        wanted += self._share.slots_for_cache(self.batcher.grown_kv_tokens)
        if wanted == before:
            return
        if wanted < before:
            trim_heap()  # return the longer forward's activations before slots grow into their memory
        self.store.release(self.residency.reserve_slots(wanted))
        if self._log is not None and self.residency.reserved_slots != before:
            self._log.on_reserved_slots(info.forward_id, self.residency.reserved_slots)

    def _add(self, request: int, prompt: list[int], params: SamplingParams) -> None:
        if request not in self._sinks:
            return  # cancelled before it began
        try:
            self.batcher.add(request, prompt, params, params.drawn)
        except Exception as error:  # from its grammar
            self._deliver(Output(request, None, finish="error", error=plugins.describe(error)))
            return
        self._prompt_tokens += len(prompt)
        if self._log is not None:
            self._log.add_request(request, len(prompt))
        if params.return_routes:
            self._routes.follow(request)
        _LOG.debug("request %d: %d prompt tokens, at most %d new", request, len(prompt), params.max_tokens)

    def _cancel(self, request: int) -> None:
        if request in self._sinks:
            self.batcher.cancel(request)
            self._end_request(request)
            self._deliver(Output(request, None, finish="cancelled"))

    def _score(self, request: int, prompt: list[int], top: int, answer: "Future[Any]") -> None:
        if self._log is not None:
            self._log.add_request(request, len(prompt))
        try:
            answer.set_result(token_logprobs(self.batcher.score(request, prompt), prompt, top))
        except Exception as error:
            self._failures += 1
            answer.set_exception(MoetoolError(str(error)))
        self._after_forward(answer.exception() is not None, [request])
        self._require_unchanged()

    def _after_forward(self, failed: bool, ended: Sequence[int]) -> None:
        """Account for the forward that ran or failed."""
        try:
            self.runtime.end_forward()
        except BaseException:  # none of its tokens is delivered
            self._close_books(True, ended)
            raise
        self._close_books(failed, ended)

    def _close_books(self, failed: bool, ended: Sequence[int]) -> None:
        if self._at_begin is not None:
            self._log_forward(*self._at_begin, failed)
            self._at_begin = None
        if self._in_forward:
            self._forwards += 1
            if self._log is not None:
                self._log.end_forward(failed)
            self._routes.end_forward(failed)
        for request in ended:
            self._end_request(request)
        self._in_forward = ()

    def _end_request(self, request: int) -> None:
        self.residency.end_request(request)
        if self._log is not None:
            self._log.end_request(request)

    def _require_unchanged(self) -> None:
        """Raises: WeightsChanged: a read found that weights in memory and on disk no longer match."""
        if self._files is not None and self._files.changed:
            raise WeightsChanged(self._files.changed)

    def _log_forward(self, info: ForwardInfo, before: Counts, stalled_s: float, failed: bool) -> None:
        now = self.residency.counts
        _LOG.debug(
            "forward %d%s: %d requests, %d tokens, %s; experts: %d kept, %d prefetched, %d missed, %d on the host; "
            "stall %.6f s",
            *(info.forward_id, " FAILED" if failed else "", len(self._in_forward), len(info.request_T)),
            *("prefill" if info.prefill else "decode", now.kept - before.kept, now.prefetched - before.prefetched),
            *(now.missed - before.missed, now.hosted - before.hosted, self.store.stats.stall_seconds - stalled_s),
        )

    def _deliver(self, output: Output) -> None:
        if output.request in self._routes:
            output = self._routes.attach(output)
        sink = self._sinks.get(output.request)
        if output.finish is not None:
            self._sinks.pop(output.request, None)
        if sink is not None:
            sink(output)

    def _stop(self) -> None:
        raise _Stop


def _gate_log_metrics(status: "SegmentStatus") -> dict[str, float]:
    return {
        "gate_log_rows_written": status.written,
        "gate_log_rows_lost": status.lost,
        "gate_log_rows_waiting": status.waiting,
        "gate_log_failing": float(bool(status.error)),
    }


def _residents(pool: Pool) -> list[int]:
    return [key for residency in pool.residencies for key in list(residency.slot_of)]  # a copy in one step


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


class _Stop(Exception):
    """Ends the engine's thread from inside its commands."""
