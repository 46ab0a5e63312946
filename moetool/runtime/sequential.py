"""Decoding one request at a time, for the families that continuous batching refuses.

Linear and chunked attention, states of fixed size and attention sinks have no place in transformers' paged cache;
with the model's own attention and its own cache they run like in `generate`, and give its tokens.
"""

from collections.abc import Callable
from typing import Any

import torch

from moetool.models import families
from moetool.request import Output, SamplingParams
from moetool.runtime.batching import Batcher
from moetool.runtime.decoding import (
    Batch,
    check_request,
    context_of,
    eos_ids,
    finish_of,
    kv_cache_bytes,
    prefill,
    score_prompt,
)
from moetool.runtime.sampling import Sampler
from moetool.types import ForwardInfo, Phase


def one_at_a_time(config: Any) -> bool:
    """Whether continuous batching refuses the family, by its text config."""
    family = families.known(config.model_type)
    return family is not None and bool(family.one_at_a_time)


def open_batcher(
    model: Any,
    *,
    max_requests: int,
    kv_tokens: int,
    max_batch_tokens: int = 512,
    unreserved: int | None = None,
    prefix_caching: bool = False,
) -> "Batcher | Sequential":
    """The batcher that the model's family can be served by; arguments as for `Batcher`."""
    if one_at_a_time(model.config.get_text_config()):
        return Sequential(model, kv_tokens=kv_tokens)
    return Batcher(
        model,
        max_requests=max_requests,
        kv_tokens=kv_tokens,
        max_batch_tokens=max_batch_tokens,
        unreserved=unreserved,
        prefix_caching=prefix_caching,
    )


class Sequential:
    """Requests one after the other, in the order in which they came; otherwise as `Batcher`.

    A prompt is one forward, whatever its length; each new token is another.

    Args:
        model: a transformers model in memory.
        kv_tokens: tokens that the cache has to hold for one request.

    Attributes:
        max_requests: 1.
        kv_bytes: an upper bound of the bytes of its cache, which grows with the request.
    """

    def __init__(self, model: Any, *, kv_tokens: int) -> None:
        self.model = model
        self.max_requests = 1
        self.kv_tokens = kv_tokens
        self.kv_bytes = kv_cache_bytes(model.config.get_text_config(), model.dtype, kv_tokens)
        self.on_forward: Callable[[Batch], None] | None = None
        self._eos = eos_ids(model)
        self._sampler = Sampler(self._eos)
        self._queue: dict[int, tuple[list[int], SamplingParams]] = {}
        self._forward_id = 0
        self._active: int | None = None
        self._answer: list[int] = []
        self._cache: Any = None

    def close(self) -> None:
        """Forget all requests."""
        self._queue.clear()
        self._active = self._cache = None

    @property
    def running(self) -> int:
        """Requests that are being decoded: one at most."""
        return int(self._active is not None)

    @property
    def waiting(self) -> int:
        """Requests that wait for their turn."""
        return len(self._queue) - self.running

    @property
    def idle(self) -> bool:
        """Whether there is nothing to forward."""
        return not self._queue

    @property
    def max_context(self) -> int:
        """Tokens of prompt and answer together that one request may have."""
        return context_of(self.model, self.kv_tokens)

    def check(self, prompt: list[int], params: SamplingParams) -> None:
        """Refuse what cannot run (`check_request`)."""
        check_request(self.model, self.max_context, prompt, params)

    def add(self, request: int, prompt: list[int], params: SamplingParams, drawn: int = 0) -> None:
        """Queue a request that `check` has passed and that asks for at least one token; `drawn` as of `Sampler.add`."""
        self._queue[request] = (prompt, params)
        self._sampler.add(str(request), params, prompt, drawn)

    def cancel(self, request: int) -> None:
        """Drop a request before the next forward; unknown ones are ignored."""
        if request in self._queue:
            self._end(request)

    def step(self) -> list[Output]:
        """Run one forward of the request whose turn it is, and report its new token or its failure."""
        if not self._queue:
            return []
        if self._active is None:
            self._active = next(iter(self._queue))
            self._answer = []
        request = self._active
        prompt, params = self._queue[request]
        try:
            logits_V = self._forward(request, prompt)
        except Exception as error:
            self._end(request)
            return [Output(request, None, finish="error", error=str(error))]
        self._forward_id += 1
        token = int(self._sampler.apply([str(request)], logits_V[None].float().clone()).argmax())
        if why := self._sampler.broken(str(request)):
            self._end(request)
            return [Output(request, None, finish="error", error=why)]
        self._answer.append(token)
        logprob = self._sampler.take(str(request), token)
        finish = finish_of(token, len(self._answer), params, self._eos)
        if finish is not None:
            self._end(request)
        return [Output(request, token, logprob, finish)]

    def score(self, request: int, prompt: list[int]) -> torch.Tensor:
        """Forward a prompt by itself, outside the running request; gives its logits [T, V] float32."""
        logits = score_prompt(self.model, request, prompt, self._forward_id, self.on_forward)
        self._forward_id += 1
        return logits

    def _forward(self, request: int, prompt: list[int]) -> torch.Tensor:
        """The prompt, or the newest token; gives the logits [V] of the next one."""
        batch = prefill(request, prompt, self._forward_id)
        if self._answer:
            info = ForwardInfo(
                forward_id=self._forward_id,
                request_T=(request,),
                phase_T=(Phase.DECODE,),
                position_T=(len(prompt) + len(self._answer) - 1,),
                token_id_T=(self._answer[-1],),
            )
            batch = Batch(info=info, token_id_T=(self._answer[-1],), iteration_T=(len(self._answer),))
        if self.on_forward is not None:
            self.on_forward(batch)
        tokens, positions = torch.tensor([[batch.token_id_T], [batch.info.position_T]], device=self.model.device)
        with torch.inference_mode():
            made = self.model(
                tokens, position_ids=positions, past_key_values=self._cache, use_cache=True, logits_to_keep=1
            )
        self._cache = made.past_key_values
        logits_V: torch.Tensor = made.logits[0, -1]
        return logits_V

    def _end(self, request: int) -> None:
        del self._queue[request]
        self._sampler.remove(str(request))
        if request == self._active:
            self._active = self._cache = None
