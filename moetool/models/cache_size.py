"""Bytes of a request's own cache, measured on transformers' cache classes without the model's numbers."""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import DynamicCache

from moetool.base.errors import MismatchError

_LOG = logging.getLogger(__name__)
_LENGTHS = (127, 255)
"""Tokens of the two forwards. Known caches compress by a divisor of 128, and keep the tokens that do not fill one."""
_WINDOW_TOKENS = 2048
"""Most tokens of the windows of `RESERVED` requests that count as a part of fixed size."""
RESERVED = 8
"""Most requests whose parts of fixed size a cache reserves."""


@dataclass(frozen=True, slots=True)
class CacheSize:
    """Bytes of the caches of a model's requests.

    Attributes:
        request_bytes: of each request whatever its length: states of fixed size, and short windows.
    """

    token_bytes: int
    request_bytes: int = 0

    def of(self, tokens: int, max_requests: int) -> int:
        """Bytes of `tokens` over all requests, with the fixed parts of at most `RESERVED` of them."""
        return tokens * self.token_bytes + min(max_requests, RESERVED) * self.request_bytes


def measure_cache(model: Any, dtype: torch.dtype) -> CacheSize | None:
    """Measure the cache that the model's own forward fills; None if the forward needs numbers.

    Windows count as a part of fixed size if those of `RESERVED` requests have at most `_WINDOW_TOKENS` tokens; larger
    ones count as if they kept all tokens.

    Args:
        model: in bfloat16 on the meta device, where a forward takes no memory.
        dtype: data type of the model when it is served; states of another type keep theirs.

    Effects: replaces forwards of its layers, so that it is of no further use.

    Raises:
        MismatchError: no layer has keys, so that transformers' cache does not know how many tokens it holds.
    """
    num_layers, first = run_alike_once(model)
    try:
        short, long = (_cache_after(model, length) for length in _LENGTHS)
    except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, ValueError) and not _knows_length(model.config.get_text_config()):
            raise MismatchError(
                f"{model.config.model_type}: no layer of the config has attention with keys, and transformers decodes "
                "with at least one; correct layer_types or what it follows from, or download the model again"
            ) from None
        _LOG.debug("the cache of %s cannot be measured: %s", model.config.model_type, error)
        return None
    token_bytes = request_bytes = 0
    for i in range(num_layers):
        few, many = (_parts(cache, first.get(i, i)) for cache in (short, long))
        window = getattr(many[0], "sliding_window", None) if many else None
        held = [] if window is None else [many[0].keys, many[0].values]
        kept = sum(_bytes(tensor, dtype) // tensor.shape[-2] for tensor in held if tensor.numel())
        if window is not None and window * RESERVED <= _WINDOW_TOKENS:
            request_bytes += kept * window
        else:
            token_bytes += kept
        fewer, more = (sum(_bytes_without_window(part, dtype) for part in parts) for parts in (few, many))
        growth = -(-(more - fewer) // (_LENGTHS[1] - _LENGTHS[0]))
        token_bytes, request_bytes = token_bytes + growth, request_bytes + max(0, fewer - growth * _LENGTHS[0])
    return CacheSize(token_bytes, request_bytes)


def _knows_length(config: Any) -> bool:
    """Whether transformers' cache for a text config knows how many tokens it holds."""
    try:
        DynamicCache(config=config).get_seq_length()
    except ValueError:
        return False
    except KeyError:  # of layers whose class transformers has not imported yet
        return True
    return True


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """All tensors of a cache or of a part of it."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_of(part)
    elif type(value).__module__.startswith("transformers.") and hasattr(value, "__dict__"):
        yield from tensors_of(vars(value))


def _parts(cache: Any, number: int) -> list[Any]:
    """The cache's parts for a layer; MiniMax's cache holds states of linear attention in a list beside `layers`."""
    lists = [cache.layers, *(value for name, value in vars(cache).items() if name != "layers")]
    return [each[number] for each in lists if isinstance(each, list) and number < len(each)]


def _bytes_without_window(part: Any, dtype: torch.dtype) -> int:
    if getattr(part, "sliding_window", None) is not None:
        part = {name: value for name, value in vars(part).items() if name not in ("keys", "values")}
    return sum(_bytes(tensor, dtype) for tensor in tensors_of(part) if tensor.dim())


def _bytes(tensor: torch.Tensor, dtype: torch.dtype) -> int:
    return tensor.numel() * (dtype if tensor.dtype == torch.bfloat16 else tensor.dtype).itemsize


def _cache_after(model: Any, length: int) -> Any:
    """A new cache after one forward."""
    tokens = torch.zeros(1, length, dtype=torch.long, device="meta")
    with torch.inference_mode():
        made = model(tokens, position_ids=torch.arange(length, device="meta")[None], use_cache=True, logits_to_keep=1)
    return made.past_key_values


def run_alike_once(model: Any) -> tuple[int, dict[int, int]]:
    """Let a layer like an earlier one return what that one did; gives the number of layers, and the earlier one's.

    Effects: replaces forwards of the model's layers.
    """
    layers = next((m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) > 1), ())
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or [""] * len(layers)
    firsts: dict[Any, tuple[int, list[Any]]] = {}
    shared = {}
    for i, layer in enumerate(layers):
        facts: list[Any] = [(name, tuple(parameter.shape)) for name, parameter in layer.named_parameters()]
        facts += [(n, k, v) for n, m in layer.named_modules() for k, v in vars(m).items() if isinstance(v, bool)]
        key = (kinds[i] if i < len(kinds) else "", *facts)
        if key in firsts:
            shared[i], returned = firsts[key]
            layer.forward = lambda *args, returned=returned, **kwargs: returned[-1]
        else:
            firsts[key] = i, (returned := list[Any]())
            layer.register_forward_hook(lambda module, args, output, returned=returned: returned.append(output))
    return len(layers), shared
