"""Adapter of transformers' continuous batching, which is private and changes between versions; nothing else uses it.

Its manager provides scheduling and a paged KV cache. Our own thread drives its loop, one forward per `step`. So the
batch of every forward is known before it starts, capture composes batches deterministically, and a failing forward
fails only its own requests.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from moetool.base.errors import UsageError
from moetool.base.types import ForwardInfo, Phase
from moetool.kernels.cpu.attention import find_attention_kernel
from moetool.models.experts.moe_layers import MoeLayer
from moetool.runtime.decode_graphs import DecodeGraphs, StepExperts
from moetool.runtime.decoding import (
    PAGE_TOKENS,
    Batch,
    check_request,
    context_of,
    eos_ids,
    finish_of,
    is_latent,
    kv_shape,
    score_prompt,
)
from moetool.runtime.kv.growing_pages import GrowingPages
from moetool.runtime.kv.paged_attention import DecodeRows, SequenceEnds, no_mask, paged_attention
from moetool.runtime.kv.prefix_pages import PrefixPages
from moetool.runtime.loop.prompt_chunks import PromptChunks
from moetool.runtime.loop.sampling import Sampler
from moetool.runtime.request import Output, SamplingParams
from moetool.runtime.returned_memory import UntouchedZeros, release_pages

_LOG = logging.getLogger(__name__)
_ATTENTION = "moetool_paged"


@dataclass(slots=True)
class _Request:
    prompt: list[int]
    params: SamplingParams
    done: int = 0  # new tokens reported so far
    reused: int | None = None  # prompt tokens with cached pages
    admitted: bool = False  # handed to the manager

    @property
    def num_pages(self) -> int:
        """KV cache pages that it needs at full length."""
        return -(-(len(self.prompt) + self.params.max_tokens) // PAGE_TOKENS)


class Batcher:
    """Continuous batching over a model, one forward at a time.

    All methods belong to one thread. Requests are numbered by the caller.

    Args:
        model: a transformers model in memory.
        max_requests: requests per batch; others queue.
        kv_tokens: tokens in the KV cache, over all requests.
        max_batch_tokens: most tokens of one forward; longer prompts come in chunks.
        unreserved: number of requests admitted whatever their length: if the KV cache proves too small, one of them
            restarts. Further requests are admitted only if the cache holds all at full length.
        max_prompt_wait_s: time limit of a forward with prompt tokens while others decode
            (`moetool.runtime.loop.prompt_chunks.PromptChunks`; 0: chunks have full size).
        prefix_caching: keep the pages of finished requests, and forward only the part of a prompt without a page.
        first_kv_tokens: initial tokens of the KV cache (`GrowingPages`); 0: all.

    Attributes:
        kv_tokens: tokens in the KV cache.
        kv_bytes: bytes of the KV cache.
        graphs: runs decode steps once they are recorded (`record_steps`).
        fixed_shapes: whether the sequences of a decode step attend in one call, by tensors of fixed shapes; default on
            a GPU, where many calls cost more than padding.
        stalled_s: returns the seconds that forwards have waited for experts so far.

    Effects: switches the model to moetool's paged attention and hooks its forward; `close` undoes both.

    Raises:
        UsageError: transformers refuses continuous batching for this family.
    """

    def __init__(
        self,
        model: Any,
        *,
        max_requests: int,
        kv_tokens: int,
        max_batch_tokens: int = 512,
        unreserved: int | None = None,
        prefix_caching: bool = False,
        max_prompt_wait_s: float = 0.0,
        first_kv_tokens: int = 0,
    ) -> None:
        from transformers import AttentionInterface, AttentionMaskInterface, ContinuousBatchingConfig, GenerationConfig

        AttentionInterface.register(_ATTENTION, paged_attention)
        AttentionMaskInterface.register(_ATTENTION, no_mask)
        self.model = model
        self.on_forward: Callable[[Batch], None] | None = None
        self.stalled_s: Callable[[], float] = float
        self.graphs: DecodeGraphs | None = None
        self.fixed_shapes = model.device.type == "cuda"
        if model.device.type == "cpu" and model.dtype == torch.bfloat16:
            for layer in model.config.per_layer_config:  # no request waits for a compiler
                heads, width = kv_shape(layer)
                queries = getattr(layer, "num_attention_heads", None) or 0
                if heads and queries and queries % heads == 0:
                    find_attention_kernel(queries // heads, width)
        self.max_requests = max_requests
        self._unreserved = max_requests if unreserved is None else unreserved
        self._eos = eos_ids(model)
        self._requests: dict[int, _Request] = {}
        self._leaving: set[int] = set()  # cancelled, but the manager does not know yet
        self._forward_id = 0
        self._batch: Batch | None = None
        self._generation = GenerationConfig(do_sample=False, eos_token_id=sorted(self._eos) or [-1])
        self._config = ContinuousBatchingConfig(
            page_size=PAGE_TOKENS,
            num_blocks=-(-kv_tokens // PAGE_TOKENS),
            max_batch_tokens=max_batch_tokens,
            max_requests_per_batch=max_requests,
            max_blocks_per_request=0,
            allow_block_sharing=prefix_caching,
            use_cuda_graph=False,
            use_async_batching=False,
            auto_switch_to_flash=False,  # looking for kernels may ask the hub
            disable_nccl_graph_mixing=False,  # no CUDA graphs, so nothing to disable
        )
        self._attention = model.config._attn_implementation
        text = model.config.get_text_config()
        self._latent = (text.num_key_value_heads, text.head_dim) if is_latent(text) else None
        if self._latent is not None:  # the cache takes its shape from the config, and latent attention has another
            text.num_key_value_heads, text.head_dim = kv_shape(text)
        self._sampler = Sampler(self._eos)
        self._chunks = PromptChunks(max_prompt_wait_s, max_batch_tokens)
        self._first_kv_tokens = first_kv_tokens
        self._growing: GrowingPages | None = None
        self._manager: Any = None
        self.processor: Any = None
        self._build()
        self._hook = model.register_forward_pre_hook(self._before_forward, with_kwargs=True)

    def close(self) -> None:
        """Restore the model's attention and drop all requests."""
        self._hook.remove()
        self.processor = self._manager = self.graphs = None
        self._restore()

    @property
    def running(self) -> int:
        """Requests in the batch."""
        return len(self.processor.scheduler.active_requests) if self.processor is not None else 0

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._requests) - self.running

    @property
    def evicted_pages(self) -> int:
        """Number of pages of earlier requests that were evicted."""
        return self._pages.evicted

    @property
    def borrowed_kv_tokens(self) -> int:
        """Current KV cache tokens beyond the initial ones; all if it does not grow."""
        return self.kv_tokens if self._growing is None else self._growing.borrowed_tokens

    @property
    def held_kv_bytes(self) -> int:
        """Bytes of `kv_bytes` that the cache does not use yet."""
        return 0 if self._growing is None else self._growing.held_bytes

    @property
    def idle(self) -> bool:
        """Whether no request is waiting or running."""
        return not self._requests

    @property
    def max_context(self) -> int:
        """Most tokens of one request, prompt and answer together."""
        return context_of(self.model, self.kv_tokens)

    def record_steps(self, layers: Sequence[MoeLayer], runtime: StepExperts) -> None:
        """Record decode steps as CUDA graphs from now on, if their shapes are fixed."""
        if self.fixed_shapes:
            self.graphs = DecodeGraphs(self.model, layers, runtime, self._announce, self._locate)

    def check(self, prompt: list[int], params: SamplingParams) -> None:
        """Refuse a request that cannot run, so that none fails inside the batch (`check_request`)."""
        check_request(self.model, self.max_context, prompt, params)

    def add(self, request: int, prompt: list[int], params: SamplingParams, drawn: int = 0) -> None:
        """Queue a request that passed `check` and asks for at least one token.

        Numbers of cancelled requests may be reused.

        Args:
            drawn: as in `Sampler.add`.
        """
        self._requests[request] = _Request(prompt, params)
        self._sampler.add(str(request), params, prompt, drawn)

    def cancel(self, request: int) -> None:
        """Drop a request before the next forward; unknown ones are ignored."""
        if (found := self._requests.pop(request, None)) is not None:
            self._sampler.remove(str(request))
            if found.admitted:
                self._manager.cancel_request(str(request))
                self._leaving.add(request)

    def step(self) -> list[Output]:
        """Run one forward and report new tokens, finished requests and failures.

        A forward that raises fails only its own requests.
        """
        with self._on_stream():
            return self._step()

    def _step(self) -> list[Output]:
        outputs: list[Output] = []
        prepared = False
        try:
            self._admit()
            self._pages.begin_forward()
            if self._growing is not None:
                self._growing.begin_forward()
            num_decoding = sum(request.done > 0 for request in self._requests.values())
            chunk = self._chunks.tokens(decoding=num_decoding > 0)
            self.processor.max_batch_tokens = min(self._config.max_batch_tokens, chunk + num_decoding)
            prepared = self.processor.prepare_next_batch()
            self._leaving.clear()
            if not prepared:
                return outputs
            began, stalled_s = time.perf_counter(), self.stalled_s()
            with torch.inference_mode():
                self.processor._generation_step(
                    self.graphs if self.graphs is not None and self._decodes else self.model
                )
            self.processor.update_batch()
            self._chunks.observe(self._num_prompt_tokens, time.perf_counter() - began, self.stalled_s() - stalled_s)
        except Exception as error:
            outputs += self._recover(error, prepared)
        else:
            self._forward_id += 1
        queue = self._manager.output_router.output_queue
        while not queue.empty():
            result = queue.get()
            request = int(result.request_id)
            if request in self._requests:
                outputs.append(self._report(request, result))
        return outputs

    def score(self, request: int, prompt: list[int]) -> Iterator[torch.Tensor]:
        """Forward a prompt by itself, outside the batch; gives its logits [t, V] float32 in pieces (`score_prompt`)."""
        logits = score_prompt(self.model, request, prompt, self._forward_id, self.on_forward)
        self._forward_id += 1
        return logits

    def _admit(self) -> None:
        """Pass requests to the manager in order of arrival."""
        inside = [request for request in self._requests.values() if request.admitted]
        if len(inside) == len(self._requests):
            return
        free_pages = self.kv_tokens // PAGE_TOKENS - sum(request.num_pages for request in inside)
        num_inside = len(inside)
        for number, request in self._requests.items():
            if request.admitted or number in self._leaving:  # the manager would confuse the two
                continue
            if num_inside >= self._unreserved and (num_inside >= self.max_requests or request.num_pages > free_pages):
                return
            self._manager.add_request(
                request.prompt,
                request_id=str(number),
                max_new_tokens=request.params.max_tokens,
                streaming=True,
                eos_token_id=-1 if request.params.ignore_eos else sorted(self._eos) or -1,
            )
            request.admitted = True
            num_inside += 1
            free_pages -= request.num_pages

    @property
    def _num_prompt_tokens(self) -> int:
        """Prompt tokens of the last forward."""
        return 0 if self._batch is None else sum(phase is Phase.PREFILL for phase in self._batch.info.phase_T)

    def _may_reuse(self, name: str) -> bool:
        """Whether a request may reuse cached pages: one whose routes are recorded must be forwarded."""
        found = self._requests.get(int(name))
        return found is not None and not found.params.return_routes

    def _build(self) -> None:
        from transformers.generation.continuous_batching.cb_logits_processors import (
            ContinuousBatchingLogitsProcessorList,
        )

        if self.processor is not None:  # left by a failed batch, whose error may still refer to it
            release_pages(self.processor.cache.cache_tensor)
        try:
            self.model.set_attn_implementation("sdpa")  # the manager accepts only known ones; ours is set right after
            self._manager = self.model.init_continuous_batching(self._generation, self._config)
            self._manager.logit_processor = ContinuousBatchingLogitsProcessorList([])
            self._manager.logit_processor.logits_processor = [self._sampler.processor()]
            self._manager.logit_processor.tensors_required = 1
            self._manager.logit_processor.do_processing = True
            self.model.set_attn_implementation(_ATTENTION)
            with UntouchedZeros(), _whole_contexts(self.model.config.get_text_config()):
                self.processor = self._manager._create_batch_processor()
        except (ValueError, NotImplementedError, AttributeError, KeyError) as error:
            self._restore()
            raise UsageError(f"transformers cannot batch {type(self.model).__name__} continuously: {error}") from error
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)  # filled on another stream
        self._manager.batch_processor = self.processor
        if self.graphs is not None:
            self.graphs.forget()
        self._pages = PrefixPages(self.processor.cache, self._may_reuse)
        self._growing = None
        if self._first_kv_tokens:
            self._growing = GrowingPages(self.processor.cache, self._pages, self._first_kv_tokens)
        self._leaving.clear()
        self.kv_tokens = int(self.processor.cache.num_blocks) * PAGE_TOKENS
        self.kv_bytes = int(self.processor.cache.cache_tensor.numel())

    def _on_stream(self) -> contextlib.AbstractContextManager[Any]:
        """Use the manager's stream for its inputs and results too, so that no ordering is needed."""
        stream = getattr(self.processor.inputs_and_outputs, "compute_stream", None)
        return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)

    def _restore(self) -> None:
        """Undo the changes to the model."""
        self.model.set_attn_implementation(self._attention)
        if self._latent is not None:
            text = self.model.config.get_text_config()
            text.num_key_value_heads, text.head_dim = self._latent

    def _recover(self, error: Exception, prepared: bool) -> list[Output]:
        """After a failed forward, fail its requests; if that fails too, fail all and rebuild the manager."""
        failed = [r.state.request_id for r in self.processor.inputs_and_outputs.requests_in_batch] if prepared else None
        try:
            if failed is None:
                raise error
            self.processor.handle_batch_error(error)
        except Exception:
            failed = [str(request) for request in self._requests]
            _LOG.warning("restarting continuous batching; %d requests fail: %s", len(failed), error)
            self._build()
        outputs = []
        for name in failed:
            if self._requests.pop(int(name), None) is not None:
                self._sampler.remove(name)
                outputs.append(Output(int(name), None, finish="error", error=str(error)))
        return outputs

    def _report(self, request: int, result: Any) -> Output:
        state = self._requests[request]
        if (end := self._sampler.broken_end(str(request))) is not None:
            self._pages.forget(str(request))
            self.cancel(request)
            return end
        token = int(result.generated_tokens[-1])
        state.done += 1
        reused = (state.reused or 0) if state.done == 1 else 0
        logprob = self._sampler.take(str(request), token)
        finish = finish_of(token, state.done, state.params, self._eos)
        if finish is not None:
            del self._requests[request]
            self._sampler.remove(str(request))
        return Output(request, token, logprob, finish, reused=reused)

    def _before_forward(self, module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if self.processor is None or "cache" not in kwargs or "sequence_ends" in kwargs:
            return args, kwargs  # a plain forward, or one already announced
        kwargs = self._announce(kwargs)
        return args, self._locate(kwargs) if self._decodes else kwargs

    def _announce(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Report the batch to `on_forward`; returns the model's arguments with the ends of the batch's sequences."""
        request_T: list[int] = []
        phase_T: list[int] = []
        iteration_T: list[int] = []
        for future in self.processor.inputs_and_outputs.requests_in_batch:
            request = int(future.state.request_id)
            found = self._requests[request]
            if found.reused is None:
                found.reused = int(future.state.position_offset) - future.query_length
            iteration = found.done
            request_T += [request] * future.query_length
            # No token since the request (re)started: a request that lost its KV cache is forwarded again from its
            # beginning, as a prompt.
            prefill = future.state.generated_len() == 0
            phase_T += [Phase.PREFILL if prefill else Phase.DECODE] * future.query_length
            iteration_T += [iteration] * future.query_length
        keys = kwargs["cu_seq_lens_k"]
        tokens, positions, queries, *ends = to_lists(
            kwargs["input_ids"][0], kwargs["position_ids"][0], kwargs["cu_seq_lens_q"], *keys.values()
        )
        token_id_T = tuple(tokens)
        batch = Batch(
            info=ForwardInfo(
                forward_id=self._forward_id,
                request_T=tuple(request_T),
                phase_T=tuple(phase_T),
                position_T=tuple(positions),
                token_id_T=token_id_T,
            ),
            token_id_T=token_id_T,
            iteration_T=tuple(iteration_T),
        )
        self._batch = batch
        if self.on_forward is not None:
            self.on_forward(batch)
        return {
            **kwargs,
            "sequence_ends": SequenceEnds(queries, dict(zip(keys, ends, strict=True))),
            "key_rooms": self._key_rooms,
        }

    @property
    def _key_rooms(self) -> dict[str, int]:
        """Key slots for one sequence of the batch, by kind of layer."""
        longest = self.processor.inputs_and_outputs.max_length_k
        return {kind: min(DecodeRows.room_for(num_keys), self.kv_tokens) for kind, num_keys in longest.items()}

    @property
    def _decodes(self) -> bool:
        """Whether the batch has one token per sequence and attends in one call.

        False if lengths differ so much that the gathered keys would exceed the cache.
        """
        batch = self.processor.inputs_and_outputs
        if not self.fixed_shapes or batch.max_length_q != 1:
            return False
        return max(self._key_rooms.values()) * len(batch.requests_in_batch) <= self.kv_tokens

    def _locate(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Add the cache positions of its keys to a decode step's arguments."""
        places = self.processor.inputs_and_outputs.read_index_storage
        rows = []
        for allocator in self.processor.cache.cache_allocators.values():
            kind = allocator.layer_type
            ends, room = kwargs["cu_seq_lens_k"][kind], kwargs["key_rooms"][kind]
            rows.append(DecodeRows.of(places[allocator.index], ends, room, self.model.dtype))
        return {**kwargs, "decode_rows": rows}


@contextlib.contextmanager
def _whole_contexts(config: Any) -> Iterator[None]:
    """Let a cache that is built meanwhile hold every layer's whole context, so that later prompts can share pages.

    `paged_attention` applies sliding windows. The cache's memory is that of whole contexts in either case.
    """
    names = ("layer_types", "sliding_window")
    own = {name: vars(config)[name] for name in names if name in vars(config)}
    try:
        if own.get("layer_types") is not None:
            config.layer_types = ["full_attention"] * config.num_hidden_layers
        elif own.get("sliding_window") is not None:
            config.sliding_window = None
        yield
    finally:
        for name, value in own.items():
            setattr(config, name, value)


def to_lists(*vectors: torch.Tensor) -> list[list[int]]:
    """Return the values of several integer vectors, with one transfer."""
    values = torch.cat(vectors).tolist()
    ends = list(accumulate(map(len, vectors)))
    return [values[end - len(vector) : end] for vector, end in zip(vectors, ends, strict=True)]
