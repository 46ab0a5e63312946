"""Folding of scales into a weight's columns and into the parameters that produce its inputs.

The columns of a weight are multiplied by a scale, and the producer of its inputs is divided by it. The model computes
the same, while important columns are rounded more finely. Other readers of the same inputs are multiplied too, so that
the router and a shared expert's gate, which are not rounded, keep their logits.

Shapes:
    C  scaled channels        I  inputs of a weight        O  its outputs
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from moetool.base.errors import UsageError
from moetool.models.experts.moe_layers import MoeLayer

_ROWS = 128  # rows scaled at a time, since torch widens the whole product to a wider scale's type
FAMILIES = ("deepseek_v2", "deepseek_v3", "glm4_moe", "mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleFold:
    """One scale, with the parameters that it divides and multiplies, by name within the decoder layer.

    Attributes:
        name: name for messages and cards.
        before: parameters that produce the inputs, each with the rows (or entries) of the C channels; None for all. A
            slice is changed in place.
        readers: weights [..., O, I] that read them and are rounded.
        plain: weights that read them and are not rounded.
        channel_I: channel of each input; None if each input is a channel.
        inspect: module of the layer whose output error scores a scale; or `experts`: each routed expert by itself, with
            scales [E, C].
    """

    name: str
    before: tuple[tuple[str, torch.Tensor | slice | None], ...]
    readers: tuple[str, ...]
    plain: tuple[str, ...] = ()
    channel_I: torch.Tensor | None = None
    inspect: str

    def spread(self, scale_C: torch.Tensor) -> torch.Tensor:
        """Return the scale of each input, [..., I]."""
        return scale_C if self.channel_I is None else scale_C[..., self.channel_I]

    def gather(self, size_I: torch.Tensor) -> torch.Tensor:
        """Return the mean over each channel's inputs, [C]."""
        if self.channel_I is None:
            return size_I
        count = int(self.channel_I.max()) + 1
        sums = torch.zeros(count).index_add_(0, self.channel_I, size_I)
        return sums / torch.bincount(self.channel_I, minlength=count)

    def apply(self, parameters: Mapping[str, torch.Tensor], scale_C: torch.Tensor) -> None:
        """Fold a scale [..., C] into the parameters of a layer. Effects: changes them in place."""
        for name, rows in self.before:
            tensor = parameters[name]
            if tensor.dim() == 1:
                tensor[slice(None) if rows is None else rows] /= scale_C
                continue
            for matrix, scale in _matrices(tensor, scale_C):
                if isinstance(rows, torch.Tensor):
                    matrix[rows] /= scale[:, None]
                    continue
                pieces = matrix[slice(None) if rows is None else rows].split(_ROWS)
                for piece, part in zip(pieces, scale.split(_ROWS), strict=True):
                    piece /= part[:, None]
        for name in self.readers + self.plain:
            for matrix, scale in _matrices(parameters[name], self.spread(scale_C)):
                for piece in matrix.split(_ROWS):
                    piece *= scale


def _matrices(tensor: torch.Tensor, scale: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield each matrix of a parameter, stacked or not, with its own or the common scale."""
    if tensor.dim() == 2:
        yield tensor, scale
        return
    for number, matrix in enumerate(tensor):
        yield matrix, scale if scale.dim() == 1 else scale[number]


def require_family(config: Any) -> None:
    """Raise UsageError for a family with unknown layers."""
    family = config.model_type
    if family == "gpt_oss":
        raise UsageError(
            "gpt_oss models cannot have a replica: pack-quantized holds single linear weights, but their experts are "
            "stacked and transposed, with gate and up interleaved and with biases; supported families: "
            f"{', '.join(FAMILIES)}"
        )
    if family not in FAMILIES:
        raise UsageError(f"{family} models cannot have a replica; supported families: {', '.join(FAMILIES)}")


def folds_of(layer: Any, moe: MoeLayer | None, config: Any) -> list[ScaleFold]:
    """Return every place of a decoder layer where a scale can be folded exactly.

    Args:
        moe: experts of the layer; None for a dense layer.
    """
    found = _attention(layer, config)
    names = dict(layer.named_parameters())
    norm = _norm(names, "post_attention_layernorm")
    if moe is None:
        dense = ScaleFold(
            name="dense input", before=norm, readers=("mlp.gate_proj.weight", "mlp.up_proj.weight"), inspect="mlp"
        )
        return [*found, dense, _down(names, "mlp")]
    shared = next((f"mlp.{name}" for name in ("shared_expert", "shared_experts") if hasattr(layer.mlp, name)), None)
    width = moe.form.parts[0].shape[0] // 2
    readers = ["mlp.experts.gate_up_proj"]
    if shared is not None:
        readers += [f"{shared}.gate_proj.weight", f"{shared}.up_proj.weight"]
    routers = [name for name in names if names[name] is moe.router.weight]
    found.append(
        ScaleFold(
            name="experts' input",
            before=norm,
            readers=tuple(readers),
            plain=(*routers, *(name for name in names if name == "mlp.shared_expert_gate.weight")),
            inspect="mlp",
        )
    )
    if shared is not None:
        found.append(_down(names, shared))
    found.append(
        ScaleFold(
            name="experts' down",
            before=(("mlp.experts.gate_up_proj", slice(width, 2 * width)),),  # the rows of up
            readers=("mlp.experts.down_proj",),
            inspect="experts",
        )
    )
    return found


def _attention(layer: Any, config: Any) -> list[ScaleFold]:
    attention, names = layer.self_attn, dict(layer.named_parameters())
    latent = hasattr(attention, "kv_a_proj_with_mqa")
    inputs = ("q_a_proj", "q_proj", "kv_a_proj_with_mqa") if latent else ("q_proj", "k_proj", "v_proj")
    readers = tuple(full for name in inputs if (full := f"self_attn.{name}.weight") in names)
    found = [
        ScaleFold(
            name="attention's input", before=_norm(names, "input_layernorm"), readers=readers, inspect="self_attn"
        )
    ]
    for norm, reader in (("q_a_layernorm", "q_b_proj"), ("kv_a_layernorm", "kv_b_proj")):
        if f"self_attn.{norm}.weight" in names:
            found.append(
                ScaleFold(
                    name=f"{reader}'s input",
                    before=_norm(names, f"self_attn.{norm}"),
                    readers=(f"self_attn.{reader}.weight",),
                    inspect=f"self_attn.{reader}",
                )
            )
    heads = int(config.num_attention_heads)
    if latent:
        keys, values = int(attention.qk_nope_head_dim), int(attention.v_head_dim)
        rows = torch.arange(heads * (keys + values)).view(heads, -1)[:, keys:].flatten()
        before: tuple[tuple[str, torch.Tensor | slice | None], ...] = (("self_attn.kv_b_proj.weight", rows),)
        channel_I = None
    else:
        size = int(attention.head_dim)
        channels = torch.arange(attention.v_proj.weight.shape[0]).view(-1, size)
        # Query heads that share a key also share its value, and thus a scale.
        channel_I = channels.repeat_interleave(heads // len(channels), dim=0).flatten()
        before = tuple((name, None) for name in ("self_attn.v_proj.weight", "self_attn.v_proj.bias") if name in names)
    if getattr(config, "clip_qkv", None) is None:  # clipping does not commute with a scale
        found.append(
            ScaleFold(
                name="attention's output",
                before=before,
                readers=("self_attn.o_proj.weight",),
                channel_I=channel_I,
                inspect="self_attn.o_proj",
            )
        )
    return found


def _norm(names: Mapping[str, Any], module: str) -> tuple[tuple[str, None], ...]:
    return tuple((name, None) for name in (f"{module}.weight", f"{module}.bias") if name in names)


def _down(names: Mapping[str, Any], module: str) -> ScaleFold:
    before = tuple((name, None) for name in (f"{module}.up_proj.weight", f"{module}.up_proj.bias") if name in names)
    return ScaleFold(
        name=f"{module.removeprefix('mlp.')} down" if module != "mlp" else "dense down",
        before=before,
        readers=(f"{module}.down_proj.weight",),
        inspect=f"{module}.down_proj",
    )


def is_rounded(path: str, module: Any, moe: MoeLayer | None) -> bool:
    """Return whether a module's weight is rounded: linear modules except gates (some routers are linear modules)."""
    gate = path.endswith("shared_expert_gate") or (moe is not None and module is moe.router)
    return isinstance(module, torch.nn.Linear) and not gate


def rounded_names(layer: Any, moe: MoeLayer | None) -> list[str]:
    """Return the rounded weights of a layer: linear modules except gates, and routed experts."""
    found = [f"{path}.weight" for path, module in layer.named_modules() if is_rounded(path, module, moe)]
    if moe is not None:
        found += [f"mlp.experts.{name}" for name in moe.form.parameters]
    return found
