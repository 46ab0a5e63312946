"""Prefix caching for requests with transformers caches of their own: caches of ended requests, for later prompts.

Keys and values of a layer that attends to the whole context can be cut at any token. Other states (windows, linear
attention, convolutions) hold their newest token's value only, so a copy of them, a mark, is kept at chosen tokens.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers.cache_utils import (
    DynamicCache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)

from moetool.models.cache_size import tensors_of

_GROWING = (DynamicLayer, DynamicIndexedLayer)


@dataclass(frozen=True, slots=True)
class KeptCache:
    """Cache of an ended request; never changed.

    Attributes:
        tokens: the tokens that it holds.
        marks: by number of tokens, the cache's states there (`states_of`).
    """

    tokens: list[int]
    cache: Any
    marks: Mapping[int, Any] = field(default_factory=dict)

    def common(self, prompt: Sequence[int]) -> int:
        """Number of tokens of a prompt that the cache has at hand; the prompt's last token is never among them."""
        most = min(len(self.tokens), len(prompt) - 1)
        same = next((i for i in range(most) if self.tokens[i] != prompt[i]), most)
        if same == len(self.tokens) or cuttable(self.cache):
            return same
        return max((count for count in self.marks if count <= same), default=0)

    def states_at(self, count: int) -> Any:
        """States after the first `count` tokens, a number from `common`, without a copy."""
        return self.marks[count] if count in self.marks else _without_growing(self.cache)

    def resumed(self, count: int) -> Any:
        """A cache that holds the first `count` tokens and may be changed."""
        made = _copied(self.states_at(count))
        for i, layer in enumerate(self.cache.layers):
            if _grows(layer):
                made.layers[i] = copy.copy(layer)
                made.layers[i].crop(count - len(self.tokens))
        return made


def cuttable(cache: Any) -> bool:
    """Whether a cache can go back to any earlier token."""
    return bool(cache.is_croppable) and all(_grows(layer) for layer in cache.layers)


def attends_only(cache: Any) -> bool:
    """Whether a cache holds keys and values only; then it takes several tokens at once, whatever the family."""
    kinds = (*_GROWING, DynamicSlidingWindowLayer)
    return type(cache) is DynamicCache and all(type(layer) in kinds for layer in cache.layers)


def states_of(cache: Any) -> Any:
    """Copy the states of a cache that cannot be cut, for `KeptCache.marks`."""
    return _copied(_without_growing(cache))


def state_bytes(states: Any) -> int:
    """Bytes of states, as from `states_of`, or of a mapping to them."""
    return sum(tensor.nbytes for tensor in tensors_of(states))


def name_linear_layers(cache: Any) -> None:
    """Mark layers without keys as linear attention, after a forward.

    MiniMax's cache holds the states of linear attention beside its layers, which remain empty. transformers takes the
    length of a mask from the first layer, unless that is linear attention.
    """
    for i, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer and not layer.is_initialized:
            cache.layers[i] = LinearAttentionLayer()


def _copied(states: Any) -> Any:
    """A deep copy. A tensor that views a larger one is copied alone."""
    return copy.deepcopy(states, {id(tensor): tensor.clone() for tensor in tensors_of(states)})


def _grows(layer: Any) -> bool:
    return type(layer) in _GROWING


def _without_growing(cache: Any) -> Any:
    made = copy.copy(cache)
    made.layers = [None if _grows(layer) else layer for layer in cache.layers]
    return made
