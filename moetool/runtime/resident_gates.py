"""What the next router would say if only resident and shared experts had been computed: the column `resident`.

Beside every MoE layer but the first, a second, smaller forward runs. It takes the hidden states from before the layer
ahead of it, adds what that layer's resident and shared experts give them, and goes through this layer's norms,
attention and router. The model's own forward is not touched: it computes what it would have computed.

Source: SMoE (Zhu et al., "Enabling MoE on the Edge via Importance-Driven Expert Scheduling"), § IV-C. Readings and
deviations:

- Computed are the experts that the router chose and that are resident when it has chosen, with the weights that it gave
  them. What was missing adds nothing; nothing is substituted for it and no weight is scaled up.
- Attention reads the true keys and values of earlier forwards. Those of the forward itself come from the partial hidden
  states, of a prompt's other tokens too, since no true ones exist before the layer has run.
- Which experts are resident is decided here and not by a cache that serves: of each layer those used last, as many as
  `share` says. At the start of a batch they are its first ones, so that rows depend on their batch alone. The experts
  of one forward count as used in the order of how many of its tokens use them, the most used last, then by number.
- Weights of 0 stand for experts that are left out, so that recording takes about a second forward, where a server would
  compute the less, the fewer experts are resident.
"""

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from moetool.errors import UsageError
from moetool.models import families
from moetool.models.expert_form import Call
from moetool.models.router_hooks import read_logits
from moetool.models.spec import MoeLayer
from moetool.runtime.paged_attention import Unwritten

_NORMS = ("input_layernorm", "post_attention_layernorm")
_CLOSE = 0.02  # of the widest logit: how far a sum in another order may be off, in half precision


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayer:
    """The modules of one layer of the usual shape: x + attention(norm(x)), then x + block(norm(x)).

    Attributes:
        layer: its MoE layer.
        block: the module that holds its router and experts, and its shared experts if it has any.
    """

    layer: MoeLayer
    input_norm: Any
    attention: Any
    block_norm: Any
    block: Any


def resident_counts(num_experts_L: tuple[int, ...], share: float) -> tuple[int, ...]:
    """How many experts of each layer are resident, at least one."""
    return tuple(max(1, round(share * num_experts)) for num_experts in num_experts_L)


def decoder_layers(model: Any, layers: list[MoeLayer]) -> list[DecoderLayer]:
    """The decoder layers of the MoE layers.

    Raises:
        UsageError: they are not of the usual shape, or not one after the other.
    """
    modules = dict(model.named_modules())
    found: list[DecoderLayer] = []
    for layer in layers:
        match = re.match(r"(.*?\.\d+)\.(.+?)(\.|$)", layer.path)
        assert match is not None, "moe_layers numbers them"
        whole, block = modules[match[1]], match[2]
        parts = {name for name, _ in whole.named_children()}
        if parts != {*_NORMS, "self_attn", block}:
            raise _unusual(model, f"layer {layer.layer_id} is made of {', '.join(sorted(parts))}")
        if layer.form.call not in (Call.INTERFACE, Call.EXPERTS):
            raise _unusual(model, "its experts are not called with indices and weights")
        if found and layer.layer_id != found[-1].layer.layer_id + 1:
            raise _unusual(model, f"between the MoE layers {found[-1].layer.layer_id} and {layer.layer_id} is another")
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


def _unusual(model: Any, why: str) -> UsageError:
    name = model.config.get_text_config().model_type
    return UsageError(
        f"cannot keep resident for {name}: {why}; expected MoE layers one after the other, each of an "
        f"input_layernorm, self_attn, post_attention_layernorm and its experts; leave resident out of --keep"
    )


class ResidentForward:
    """Hooks on a model's layers that run the second forward.

    Args:
        share: of a layer's experts that are resident.
        on_logits: called with the logits [T, E] of each MoE layer but the first, before that layer runs.

    Attributes:
        running: whether what the model's modules compute at the moment is of the second forward.

    Effects: adds hooks, which `close` removes; runs a few tokens to see that with every expert resident the second
        forward gives what the routers really say.

    Raises:
        UsageError: the layers are not of the usual shape, or the experts are not in memory.
    """

    def __init__(
        self, model: Any, layers: list[MoeLayer], share: float, on_logits: Callable[[torch.Tensor], None]
    ) -> None:
        if any(parameter.is_meta for layer in layers for parameter in layer.experts.parameters()):
            raise UsageError(
                "cannot keep resident while experts are loaded when needed: the second forward would take them in "
                "another order; capture without --device-memory, or leave resident out of --keep"
            )
        self.running = False
        self._layers = decoder_layers(model, layers)
        self._family = families.known(model.config.get_text_config().model_type)
        self._on_logits = on_logits
        self._kept_L = resident_counts(tuple(layer.num_experts for layer in layers), share)
        self._used_L: list[list[int]] = []  # residents of each layer, the one used last at the end
        self._here_L: list[torch.Tensor | None] = [None] * len(layers)  # who was resident when the router chose
        self._residual: torch.Tensor | None = None  # of the layer that ran last, and what its block got
        self._given: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
        self._handles: list[RemovableHandle] = []
        for i, part in enumerate(self._layers):
            hooks = (
                part.block_norm.register_forward_pre_hook(self._on_block_norm),
                part.block.register_forward_pre_hook(self._on_block, with_kwargs=True),
                part.layer.experts.register_forward_pre_hook(self._on_experts(i)),
            )
            self._handles += hooks
            if i:
                self._handles.append(part.attention.register_forward_pre_hook(self._on_attention(i), with_kwargs=True))
        try:
            self._require_true(model)
        except BaseException:
            self.close()
            raise
        self.begin()

    def close(self) -> None:
        """Remove the hooks."""
        while self._handles:
            self._handles.pop().remove()

    def begin(self) -> None:
        """A batch begins: the first experts of each layer are resident."""
        self._used_L = [list(range(kept))[::-1] for kept in self._kept_L]

    def _require_true(self, model: Any) -> None:
        """With all experts resident the second forward must say what the routers say.

        Raises:
            UsageError: it does not.
        """
        kept, on_logits = self._kept_L, self._on_logits
        said: list[torch.Tensor] = []
        true: list[torch.Tensor] = []

        def on_router(layer: MoeLayer) -> Callable[..., None]:
            def hook(module: Any, args: Any, output: Any) -> None:
                if not self.running:
                    true.append(read_logits(layer, output, self._family).float())

            return hook

        self._kept_L, self._on_logits = tuple(part.layer.num_experts for part in self._layers), said.append
        self.begin()
        hooks = [part.layer.router.register_forward_hook(on_router(part.layer)) for part in self._layers[1:]]
        vocabulary = model.config.get_text_config().vocab_size
        try:
            with torch.inference_mode():
                model(input_ids=torch.arange(min(8, vocabulary), device=model.device)[None], use_cache=False)
        except (TypeError, AttributeError, RuntimeError, ValueError, IndexError) as error:
            raise _unusual(model, f"its layers are called otherwise ({error})") from error
        finally:
            for handle in hooks:
                handle.remove()
            self._kept_L, self._on_logits = kept, on_logits
        for part, logits_TE, true_TE in zip(self._layers[1:], said, true, strict=True):
            if not torch.allclose(logits_TE.float(), true_TE, rtol=0, atol=_CLOSE * float(true_TE.abs().max())):
                raise _unusual(model, f"layer {part.layer.layer_id} adds up in another way")

    def _on_block_norm(self, module: Any, args: tuple[Any, ...]) -> None:
        self._residual = args[0]

    def _on_block(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self.running:
            self._given = args, kwargs

    def _on_experts(self, i: int) -> Callable[..., Any]:
        def hook(module: Any, args: tuple[Any, ...]) -> Any:
            _, index_TK, weights_TK = args[:3]
            if self.running:
                here_E = self._here_L[i]
                assert here_E is not None
                return (args[0], index_TK, weights_TK * here_E[index_TK], *args[3:])
            here_E = torch.zeros(self._layers[i].layer.num_experts, dtype=weights_TK.dtype)
            here_E[self._used_L[i]] = 1
            self._here_L[i] = here_E.to(weights_TK.device)
            self._use(i, index_TK)
            return None

        return hook

    def _use(self, i: int, index_TK: torch.Tensor) -> None:
        """Residents after an event."""
        tokens_E = torch.bincount(index_TK.reshape(-1).cpu()).tolist()
        needed = sorted((e for e, tokens in enumerate(tokens_E) if tokens), key=lambda e: (tokens_E[e], -e))
        rest = set(needed)
        self._used_L[i] = [*(e for e in self._used_L[i] if e not in rest), *needed][-self._kept_L[i] :]

    def _on_attention(self, i: int) -> Callable[..., None]:
        part, before = self._layers[i], self._layers[i - 1]

        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            assert self._residual is not None
            self.running = True
            try:
                given, named = self._given
                added = before.block(*given, **named)
                partial = self._residual + (added[0] if isinstance(added, tuple) else added).view_as(self._residual)
                normed = part.input_norm(partial)
                named = {**kwargs, **_unwritten(kwargs)}
                if not args:
                    named["hidden_states"] = normed
                attended = part.attention.forward(*((normed, *args[1:]) if args else ()), **named)[0]
                seen = part.block_norm.forward(partial + attended)
                output = part.layer.router.forward(seen.reshape(-1, seen.shape[-1]))
                self._on_logits(read_logits(part.layer, output, self._family))
            finally:
                self.running = False

        return hook


def _unwritten(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The caches among the arguments of an attention, as ones that are not changed by it."""
    made: dict[str, Any] = {}
    if (paged := kwargs.get("cache")) is not None:
        made["cache"] = Unwritten(paged)
    for name in ("past_key_values", "past_key_value"):
        if kwargs.get(name) is not None:
            made[name] = copy.deepcopy(kwargs[name])
    return made
