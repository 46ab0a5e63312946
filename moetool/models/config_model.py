"""A model by the numbers of its config.json, for families that transformers lacks: it can be traced, not run.

Layers, experts and experts per token have a few names in published configs. Where its weight files hold experts one by
one, they tell which layers have experts, and their bytes. Otherwise fields of the config name these layers (all, if
none does), and an expert is estimated as three matrices of the config's widths.
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from moetool.base.errors import MismatchError, UsageError, first_line, shortened
from moetool.base.types import SCORE_FUNCTIONS, UNKNOWN_BYTES, ModelSpec
from moetool.models.families.config_relations import EXPERTS, TOP_K
from moetool.models.files.hub import snapshot_name
from moetool.models.files.revision import config_revision, revision_of
from moetool.models.files.tensor_index import TensorIndex, has_weights, read_index
from moetool.models.weights.quantization_config import quantization_of

_TEXT = ("text_config", "language_config", "llm_config")
_LAYERS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")
_DENSE_FIRST = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index", "n_dense_layers")
_STEP = ("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval")
_EXPERT_INPUT = ("routed_expert_hidden_size", "moe_latent_size", "hidden_size")
_SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert")
_GROUPS = ("n_group", "num_expert_group")
_SCORES = ("scoring_func", "score_function", "score_func", "moe_router_activation_func")
_NORMALIZED = ("norm_topk_prob", "moe_renormalize", "route_norm")
_EXPERT_TENSOR = re.compile(r"(?:.*\.)?layers\.(\d{1,6})\..*\bexperts\.(\d{1,6})\..+")
_MOST = 1 << 16


class ConfigModel:
    """A model of a family that transformers does not know.

    Args:
        path: its directory.
        name: display name.
        content, raw: the bytes and the content of its config.json.

    Attributes:
        text: the part of the config that describes the language model.

    Raises:
        UsageError: it does not say how many layers, experts or experts per token there are.
        MismatchError: such a number is impossible.
    """

    def __init__(self, path: Path, name: str, content: bytes, raw: Mapping[str, Any]) -> None:
        self.path, self.name, self.raw = path, name, raw
        self._content = content
        parts = [raw, *(raw[key] for key in _TEXT if isinstance(raw.get(key), Mapping))]
        self.text = next((part for part in parts if _first(part, EXPERTS) is not None), parts[-1])
        self.num_hidden_layers = self._number("layers", _LAYERS, 10_000)
        identity = _first(self.text, ("zero_expert_num",)) or 0
        self.num_experts = self._number("experts", EXPERTS, _MOST) + identity
        self.top_k = self._number("experts per token", TOP_K, self.num_experts)

    @property
    def vocab_size(self) -> int:
        """Number of tokens that the model embeds."""
        return self._number("tokens", ("vocab_size",), 2**24)

    @cached_property
    def tokenizer(self) -> Any:
        """The model's tokenizer. Raises: UsageError: its directory has no tokenizer.json, or a damaged one."""
        from moetool.models.checkpoint import read_fast_tokenizer

        return read_fast_tokenizer(self.path)

    @cached_property
    def spec(self) -> ModelSpec:
        """Specification of its experts.

        Raises:
            MismatchError: its weight files are damaged, or hold another number of experts than the config.
        """
        index = read_index(self.path) if has_weights(self.path) else None
        stored = {} if index is None else self._stored(index)
        layers = [layer for layer in stored if layer < self.num_hidden_layers] or self._moe_layers()
        estimate = self._estimate(layers[0])
        text = self.text
        score = str(_first(text, _SCORES) or "softmax")
        spec = ModelSpec(
            name=f"{self.raw.get('model_type')}:{snapshot_name(self.path) or self.path.name}",
            revision=config_revision(self._content) if index is None else revision_of(self._content, index),
            layer_ids_L=tuple(layers),
            num_experts_L=(self.num_experts,) * len(layers),
            top_k_L=(self.top_k,) * len(layers),
            has_logits_L=(True,) * len(layers),
            num_shared_experts=int(_first(text, _SHARED) or 0),
            num_groups=int(_first(text, _GROUPS) or 1),
            hidden_size=self._number("width", ("hidden_size",), 2**20),
            expert_bytes_L=tuple(stored.get(layer, estimate) for layer in layers),
            score_function=score if score in SCORE_FUNCTIONS else "softmax",
            renormalize=bool(_first(text, _NORMALIZED)),
        )
        spec.validate()
        return spec

    @property
    def problem(self) -> str:
        """Why it cannot be run."""
        own = ", and moetool never runs code from a checkpoint (auto_map)" if self.raw.get("auto_map") else ""
        return f"transformers has no class for the family {self.raw.get('model_type')!r}{own}"

    @property
    def origin(self) -> str:
        """Where the bytes of an expert are from."""
        return "by its weight files" if has_weights(self.path) else "estimated from its config"

    def _number(self, what: str, names: tuple[str, ...], most: int) -> int:
        value = _first(self.text, names)
        if value is None:
            raise UsageError(f"{self.path / 'config.json'} does not give its {what} ({' or '.join(names[:3])})")
        if type(value) is not int or not 1 <= value <= most:
            raise MismatchError(
                f"{self.path / 'config.json'}: {what}: found {shortened(repr(value))}, expected 1 to {most:,}"
            )
        return value

    def _moe_layers(self) -> list[int]:
        """The layers with experts by the config; all where no field tells.

        Raises:
            MismatchError: there are none.
        """
        text, number = self.text, self.num_hidden_layers
        first, step = _first(text, _DENSE_FIRST) or 0, _first(text, _STEP) or 1
        freq, kinds = text.get("moe_layer_freq"), text.get("mlp_layer_types")
        period, offset = text.get("expert_layer_period"), text.get("expert_layer_offset")
        try:
            if step < 1:
                raise ValueError(f"a step of {step}")
            layers = [layer for layer in range(number) if layer >= first and (layer + 1) % step == 0]
            if isinstance(freq, list):
                layers = [layer for layer in layers if freq[layer]]
            elif freq:
                layers = [layer for layer in layers if layer % freq == 0]
            if period:
                layers = [layer for layer in layers if layer % period == offset]
            if kinds:
                layers = [layer for layer in range(number) if kinds[layer] != "dense"]
            layers = [
                layer for layer in text.get("moe_layers") or layers if layer not in (text.get("mlp_only_layers") or ())
            ]
            if outside := [layer for layer in layers if not 0 <= layer < number]:
                raise ValueError(f"layer {outside[0]} of {number}")
        except (TypeError, ValueError, LookupError, ZeroDivisionError) as error:
            raise MismatchError(
                f"{self.path / 'config.json'} names its layers with experts in an unknown way ({first_line(error)}); "
                "correct it, or give --set moe_layers, num_experts and top_k instead of the model"
            ) from None
        if not layers:
            raise MismatchError(f"{self.path / 'config.json'} has no layer with experts, expected some")
        return layers

    def _stored(self, index: TensorIndex) -> dict[int, int]:
        """Bytes of an expert by layer, where weight files hold experts one by one."""
        sizes: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))
        for name, tensor in sorted(index.tensors.items()):
            if match := _EXPERT_TENSOR.fullmatch(name):
                sizes[int(match[1])][int(match[2])] += tensor.num_bytes
        for layer, experts in sizes.items():
            if len(experts) != self.num_experts and layer < self.num_hidden_layers:
                raise MismatchError(
                    f"the weight files in {self.path} hold {len(experts)} experts of layer {layer}, expected "
                    f"{self.num_experts} by its config.json; correct it, or complete the files"
                )
        return {layer: max(experts.values()) for layer, experts in sorted(sizes.items())}

    def _estimate(self, layer: int) -> int:
        """Bytes of an expert of three matrices by the config; `UNKNOWN_BYTES` where it does not tell."""
        inner, outer = self.text.get("moe_intermediate_size"), _first(self.text, _EXPERT_INPUT)
        declared = getattr(torch, str(self.text.get("dtype") or self.raw.get("dtype") or "bfloat16"), None)
        if type(inner) is not int or type(outer) is not int or not isinstance(declared, torch.dtype):
            return UNKNOWN_BYTES
        try:
            quantization = quantization_of(self.raw, self.path)
        except UsageError:  # it can be traced all the same
            return UNKNOWN_BYTES
        module = f"model.layers.{layer}.mlp.experts.0"
        total = 0
        for leaf, shape in (("gate_proj", (inner, outer)), ("up_proj", (inner, outer)), ("down_proj", (outer, inner))):
            format = quantization and quantization.format_of(f"{module}.{leaf}")
            size = declared.itemsize
            total += format.stored_bytes(*shape, size) if format else inner * outer * size
        return total


def _first(part: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    """The first of these fields that is not null."""
    return next((part[name] for name in names if part.get(name) is not None), None)
