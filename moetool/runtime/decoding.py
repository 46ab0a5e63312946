"""Common parts of both decoders: batch forward, admission, end of a request, cache size."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch

from moetool.base.errors import CapacityError, MoetoolError, UsageError
from moetool.base.types import ForwardInfo, Phase
from moetool.base.validation import outside_vocabulary
from moetool.models.checkpoint import Checkpoint
from moetool.runtime.request import Finish, SamplingParams, TokenLogprob

NOT_NUMBERS = (
    "the model's scores are not finite (NaN or infinity): the checkpoint is damaged or the data type too narrow"
)
"""Error of a request whose next token cannot be sampled."""

PAGE_TOKENS = 4
"""Fewest that transformers allows: a chat's next turn forwards again what its last page does not fill."""
PIECE_BYTES = 16 << 20
"""Logits of a scored prompt in memory at once; all logits of a long prompt can take more than its experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One forward: its requests, and its tokens for observers.

    Attributes:
        info: requests, phases and positions of the tokens.
        token_id_T: the tokens themselves.
        iteration_T: 0 for tokens of the prompt, then 1, 2, ... for each decoded one.
    """

    info: ForwardInfo
    token_id_T: tuple[int, ...]
    iteration_T: tuple[int, ...]


class RowShape(NamedTuple):
    """Shape of a token's row in the KV cache of one layer.

    Attributes:
        heads: KV heads.
        value_width: numbers of a value; 0: the row is a latent and its rotary key, and there are no values.
        index_width: numbers of the key by which an indexer chooses the token; 0: the layer has no indexer.
    """

    heads: int
    key_width: int
    value_width: int
    index_width: int = 0

    @property
    def num_values(self) -> int:
        return self.heads * (self.key_width + self.value_width) + self.index_width


def row_shapes(config: Any) -> list[RowShape]:
    """Shapes of a model's rows by layer, from its text config."""
    shapes = []
    for number, layer in enumerate(config.per_layer_config):
        if is_latent(layer):
            kinds = getattr(layer, "indexer_types", None)
            chooses = is_indexed(layer) and not (kinds and kinds[number] == "shared")
            width = layer.kv_lora_rank + layer.qk_rope_head_dim
            shapes.append(RowShape(1, width, 0, layer.index_head_dim if chooses else 0))
        else:
            heads, width = kv_shape(layer)
            shapes.append(RowShape(heads, width, width))
    return shapes


def kv_cache_bytes(config: Any, dtype: torch.dtype, kv_tokens: int) -> int:
    """Bytes of the KV cache for `kv_tokens`: whole pages, and one that belongs to nobody.

    Layers with a fixed-size state or a window are counted as if they kept all tokens.
    """
    token_bytes = sum(shape.num_values for shape in row_shapes(config)) * dtype.itemsize
    return (-(-kv_tokens // PAGE_TOKENS) + 1) * PAGE_TOKENS * int(token_bytes)


def cache_bytes(checkpoint: Checkpoint, dtype: torch.dtype, kv_tokens: int, max_requests: int) -> int:
    """Bytes of the KV cache for `kv_tokens`, paged or in caches of at most `max_requests` requests."""
    size = checkpoint.cache_size(dtype)
    return kv_cache_bytes(checkpoint.config, dtype, kv_tokens) if size is None else size.of(kv_tokens, max_requests)


def kv_shape(config: Any) -> tuple[int, int]:
    """Number of a layer's KV heads, and the width of a key."""
    if is_latent(config):
        return config.num_attention_heads, config.qk_nope_head_dim + config.qk_rope_head_dim
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return heads, getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def is_latent(config: Any) -> bool:
    """Whether the family has multi-head latent attention (MLA)."""
    return bool(getattr(config, "kv_lora_rank", None))


def is_indexed(config: Any) -> bool:
    """Whether each query of the family attends only to tokens that an indexer chooses."""
    return bool(getattr(config, "index_topk", None))


def check_request(model: Any, max_context: int, prompt: list[int], params: SamplingParams) -> None:
    """Refuse a request that cannot run.

    Raises:
        UsageError: the prompt is empty or has ids outside the vocabulary.
        CapacityError: prompt and answer are longer than the context.
    """
    vocabulary = model.config.get_text_config().vocab_size
    if not prompt:
        raise UsageError("the prompt is empty; send at least one character")
    if why := outside_vocabulary(prompt, vocabulary):
        raise UsageError(f"the prompt's {why}")
    if len(prompt) + params.max_tokens > max_context:
        raise CapacityError(
            f"the prompt has {len(prompt):,} tokens and the request asks for {params.max_tokens:,} more, "
            f"but the context holds {max_context:,}; shorten the prompt or ask for fewer tokens"
        )


def score_prompt(
    model: Any,
    request: int,
    prompt: list[int],
    forward_id: int,
    on_forward: Callable[[Batch], None] | None,
    **arguments: Any,
) -> Iterator[torch.Tensor]:
    """A plain forward of one prompt; gives its logits [t, V] float32 on the CPU, in pieces of at most `PIECE_BYTES`.

    The forward has run on return. Only the output head runs again for each further piece.

    Args:
        arguments: further arguments of the model's forward.
    """
    if on_forward is not None:
        on_forward(prefill(request, prompt, forward_id))
    rows = max(1, PIECE_BYTES // (4 * int(model.config.get_text_config().vocab_size)))
    tokens = torch.tensor([prompt], device=model.device)
    body, made = getattr(model, "model", model.base_model), list[Any]()
    if len(prompt) <= rows or body is model:
        return iter([_logits(model, tokens, 0, arguments)])
    hook = body.register_forward_hook(lambda module, args, output: made.append(output))
    try:
        first = _logits(model, tokens, torch.arange(rows, device=model.device), arguments)
    finally:
        hook.remove()
    return chain([first], _further_logits(model, body, tokens, rows, made[0], arguments))


def token_logprobs(pieces: Iterable[torch.Tensor], prompt: list[int], top: int) -> list[TokenLogprob | None]:
    """Log-probabilities of the tokens of a prompt, None for the first.

    Args:
        pieces: logits of the prompt, as from `score_prompt`.
        top: number of most likely tokens to return at each position.

    Raises:
        MoetoolError: logits are not finite.
    """
    found: list[TokenLogprob | None] = [None]
    for logits_TV in pieces:
        logprobs_TV = logits_TV.log_softmax(-1)[: len(prompt) - len(found)]
        if logprobs_TV.isnan().any():
            raise MoetoolError(NOT_NUMBERS)
        values, ids = logprobs_TV.topk(top)
        for row_V, *best in zip(logprobs_TV, ids.tolist(), values.tolist(), strict=True):
            found.append(TokenLogprob(float(row_V[prompt[len(found)]]), list(zip(*best, strict=True))))
    return found


def _logits(model: Any, tokens: torch.Tensor, kept: int | torch.Tensor, arguments: Mapping[str, Any]) -> torch.Tensor:
    """Logits [t, V] float32 of some places of a prompt, on the CPU; 0 keeps all."""
    with torch.inference_mode():
        output = model(tokens, use_cache=False, logits_to_keep=kept, **arguments)
        logits: torch.Tensor = output.logits[0].float().cpu()
    return logits


def _further_logits(
    model: Any, body: Any, tokens: torch.Tensor, rows: int, made: Any, arguments: Mapping[str, Any]
) -> Iterator[torch.Tensor]:
    """Logits after the first `rows`, from what the model without its head, its `body`, has made."""
    for start in range(rows, tokens.shape[1], rows):
        kept = torch.arange(start, min(tokens.shape[1], start + rows), device=tokens.device)
        body.forward = lambda *args, **kwargs: made  # what comes after it differs by family
        try:
            piece = _logits(model, tokens, kept, arguments)
        finally:
            del body.forward
        yield piece


class Part(NamedTuple):
    """The tokens of one request in a forward.

    Attributes:
        start: position of the first one.
        iteration: as in `Batch`.
    """

    request: int
    tokens: Sequence[int]
    start: int
    phase: Phase
    iteration: int


def compose(forward_id: int, parts: Iterable[Part]) -> Batch:
    """The forward of these requests' tokens, request after request."""
    request_T: list[int] = []
    phase_T: list[Phase] = []
    position_T: list[int] = []
    token_T: list[int] = []
    iteration_T: list[int] = []
    for request, tokens, start, phase, iteration in parts:
        count = len(tokens)
        request_T += [request] * count
        phase_T += [phase] * count
        position_T += range(start, start + count)
        token_T += tokens
        iteration_T += [iteration] * count
    info = ForwardInfo(
        forward_id=forward_id,
        request_T=tuple(request_T),
        phase_T=tuple(phase_T),
        position_T=tuple(position_T),
        token_id_T=tuple(token_T),
    )
    return Batch(info=info, token_id_T=tuple(token_T), iteration_T=tuple(iteration_T))


def prefill(request: int, prompt: list[int], forward_id: int) -> Batch:
    """Forward one whole prompt alone."""
    return compose(forward_id, [Part(request, prompt, 0, Phase.PREFILL, 0)])


def finish_of(token: int, done: int, params: SamplingParams, eos: frozenset[int]) -> Finish | None:
    """Finish reason after the newest token, number `done`; None if the request continues."""
    if token in eos and not params.ignore_eos:
        return "stop"
    return "length" if done >= params.max_tokens else None


def context_of(model: Any, kv_tokens: int) -> int:
    """Most tokens of one request, prompt and answer together."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or kv_tokens
    return min(int(limit), kv_tokens)


def eos_ids(model: Any) -> frozenset[int]:
    """Tokens that end an answer."""
    ids = model.generation_config.eos_token_id
    if ids is None:
        ids = model.config.get_text_config().eos_token_id
    return frozenset() if ids is None else frozenset([ids] if isinstance(ids, int) else ids)
