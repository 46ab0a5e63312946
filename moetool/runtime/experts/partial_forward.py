"""Partial forward: the next router's logits if only resident and shared experts had been computed.

It takes the hidden states before an MoE layer's block and adds the output of resident and shared experts. Then it runs
the next layer's norms, attention and router. The model's own forward is unchanged.

Source: SMoE (Zhu et al., "Enabling MoE on the Edge via Importance-Driven Expert Scheduling"), § IV-C. Readings and
deviations:

- It computes the chosen experts that are resident when the router has chosen, with their weights in the sum. Missing
  experts add nothing; no weight is scaled up.
- Attention reads the true keys and values of earlier forwards. Those of the current forward come from the partial
  hidden states, also for a prompt's other tokens, since true ones do not exist yet.
- The model's own forward computes these resident experts again.
"""

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from moetool.base import families
from moetool.base.errors import UsageError
from moetool.models.experts.expert_form import Call
from moetool.models.experts.moe_layers import MoeLayer
from moetool.models.router_hooks import is_unrecorded, read_logits, unrecorded
from moetool.runtime.kv.paged_attention import plain_arguments
from moetool.runtime.kv.pages import KvPages

_NORMS = ("input_layernorm", "post_attention_layernorm")
_CLOSE = 0.02  # tolerance relative to the largest logit: half precision depends on the summation order


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayer:
    """The modules of one layer of the usual shape: x + attention(norm(x)), then x + block(norm(x)).

    Attributes:
        block: the module that holds its router and experts, and its shared experts if it has any.
    """

    layer: MoeLayer
    input_norm: Any
    attention: Any
    block_norm: Any
    block: Any


def decoder_layers(model: Any, layers: list[MoeLayer]) -> list[DecoderLayer]:
    """The decoder layers of the MoE layers. Raises: UsageError: they are not of the usual shape, or not consecutive."""
    modules = dict(model.named_modules())
    found: list[DecoderLayer] = []
    for layer in layers:
        match = re.match(r"(.*?\.\d+)\.(.+?)(\.|$)", layer.path)
        assert match is not None, "moe_layers numbers them"
        whole, block = modules[match[1]], match[2]
        parts = {name for name, _ in whole.named_children()}
        if parts != {*_NORMS, "self_attn", block}:
            raise unsupported_layers(model, f"layer {layer.layer_id} consists of {', '.join(sorted(parts))}")
        if layer.form.call not in (Call.INTERFACE, Call.EXPERTS):
            raise unsupported_layers(model, "its experts are not called with indices and weights")
        if found and layer.layer_id != found[-1].layer.layer_id + 1:
            raise unsupported_layers(
                model, f"layers {found[-1].layer.layer_id} and {layer.layer_id} are not consecutive"
            )
        found.append(
            DecoderLayer(
                layer=layer,
                input_norm=whole.input_layernorm,
                attention=whole.self_attn,
                block_norm=whole.post_attention_layernorm,
                block=getattr(whole, block),
            )
        )
    return found


def unsupported_layers(model: Any, why: str) -> UsageError:
    """The error for a model whose layers are not of the usual shape."""
    name = model.config.get_text_config().model_type
    return UsageError(
        f"cannot run a partial forward of {name}: {why}; expected consecutive MoE layers, each with an "
        f"input_layernorm, self_attn, post_attention_layernorm and its experts; leave resident out of --keep, or set "
        f"policy.predict_from=ahead"
    )


class PartialForward:
    """Run partial forwards from inputs that hooks on the model's layers keep.

    Effects: adds hooks, which `close` removes.

    Raises:
        UsageError: the layers are not of the usual shape.
    """

    def __init__(self, model: Any, layers: list[MoeLayer]) -> None:
        self._layers = decoder_layers(model, layers)
        self._family = families.known(model.config.get_text_config().model_type)
        self._residual: torch.Tensor | None = None  # of the last layer run
        self._given: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
        self._handles: list[RemovableHandle] = []
        for part in self._layers:
            self._handles.append(part.block_norm.register_forward_pre_hook(self._on_block_norm))
            self._handles.append(part.block.register_forward_pre_hook(self._on_block, with_kwargs=True))

    def close(self) -> None:
        """Remove the hooks."""
        while self._handles:
            self._handles.pop().remove()

    def through(self, i: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """Return the logits [T, E] of MoE layer i + 1 if layer i's block computes only resident experts.

        Layer i's block runs again (`unrecorded`); its experts' binding restricts it to resident ones.

        Args:
            args, kwargs: arguments of layer i + 1's attention in this forward, without its hidden states.
        """
        before, part = self._layers[i : i + 2]
        assert self._residual is not None
        with unrecorded():
            given, named = self._given
            added = before.block(*given, **named)
            partial = self._residual + (added[0] if isinstance(added, tuple) else added).view_as(self._residual)
            normed = part.input_norm(partial)
            named = {**kwargs, **_unwritten(kwargs, part.attention)}
            if not args:
                named["hidden_states"] = normed
            attended = part.attention.forward(*((normed, *args[1:]) if args else ()), **named)[0]
            seen = part.block_norm.forward(partial + attended)
            output = part.layer.router.forward(seen.reshape(-1, seen.shape[-1]))
        return read_logits(part.layer, output, self._family)

    def require_equal(self, model: Any, partial_logits: list[torch.Tensor]) -> None:
        """Run a few tokens and compare the partial forward's logits with the routers'.

        Args:
            partial_logits: filled during the run with the logits of each layer except the first.

        Raises:
            UsageError: they differ.
        """
        true: list[torch.Tensor] = []

        def on_router(layer: MoeLayer) -> Callable[..., None]:
            def hook(module: Any, args: Any, output: Any) -> None:
                if not is_unrecorded():
                    true.append(read_logits(layer, output, self._family).float())

            return hook

        hooks = [part.layer.router.register_forward_hook(on_router(part.layer)) for part in self._layers[1:]]
        vocabulary = model.config.get_text_config().vocab_size
        try:
            with torch.inference_mode():
                tokens = torch.arange(min(8, vocabulary), device=model.device)[None]
                model(input_ids=tokens, use_cache=False, **plain_arguments(model))
        except (TypeError, AttributeError, RuntimeError, ValueError, IndexError) as error:
            raise unsupported_layers(model, f"its layers take other arguments ({error})") from error
        finally:
            for handle in hooks:
                handle.remove()
        for part, logits_TE, true_TE in zip(self._layers[1:], partial_logits, true, strict=True):
            if not torch.allclose(logits_TE.float(), true_TE, rtol=0, atol=_CLOSE * float(true_TE.abs().max())):
                raise unsupported_layers(model, f"layer {part.layer.layer_id} has other logits in a partial forward")

    def _on_block_norm(self, module: Any, args: tuple[Any, ...]) -> None:
        self._residual = args[0]

    def _on_block(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not is_unrecorded():
            self._given = args, kwargs


def _unwritten(kwargs: dict[str, Any], attention: Any) -> dict[str, Any]:
    """Replace the caches among attention's arguments by ones that it leaves unchanged."""
    made: dict[str, Any] = {}
    for name in ("cache", "past_key_values", "past_key_value"):
        past = kwargs.get(name)
        if past is not None and not isinstance(past, KvPages):  # the model writes the same pages again
            made[name] = copy.copy(past)
            made[name].layers = list(past.layers)
            for layer in past.layers[attention.layer_idx :][:1]:  # a growing cache has none yet
                made[name].layers[attention.layer_idx] = copy.deepcopy(layer)
    return made
