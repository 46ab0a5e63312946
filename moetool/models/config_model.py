"""A model by the numbers of its config.json, for families that transformers lacks: it can be traced, not run.

Layers, experts and experts per token have a few names in published configs. Where its weight files hold experts one by
one, they tell which layers have experts, and their bytes. Only layers under the prefix with the most bytes count, not
those of a vision tower or those that only draft. Otherwise fields of the config name these layers (all, if none does),
and an expert is estimated as three matrices of the config's widths.
"""

import logging
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from moetool.base.errors import MismatchError, UsageError, shortened
from moetool.base.types import SCORE_FUNCTIONS, UNKNOWN_BYTES, ModelSpec
from moetool.models.families.config_relations import EXPERTS, TOP_K
from moetool.models.files.hub import snapshot_name
from moetool.models.files.revision import config_revision, revision_of
from moetool.models.files.tensor_index import TensorIndex, has_weights, read_index
from moetool.models.weights.quantization_config import quantization_of

_log = logging.getLogger(__name__)
_TEXT = ("text_config", "language_config", "llm_config")
_LAYERS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")
_WIDTH = ("hidden_size",)
_DENSE_FIRST = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index", "n_dense_layers")
_STEP = ("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval")
_EXPERT_INPUT = ("routed_expert_hidden_size", "moe_latent_size", "hidden_size")
_SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert")
_GROUPS = ("n_group", "num_expert_group")
_SCORES = ("scoring_func", "score_function", "score_func", "moe_router_activation_func")
_NORMALIZED = ("norm_topk_prob", "moe_renormalize", "route_norm")
_DTYPE = ("dtype", "torch_dtype")
_LAYER_TENSOR = re.compile(r"((?:[^.]+\.)*?)\d{1,6}\.")
_EXPERT_TENSOR = re.compile(r"((?:[^.]+\.)*?layers\.)(\d{1,6})\.(?:.*\.)?experts\.(\d{1,6})\..+")
_MOST = 1 << 16
_INSTEAD = (
    "correct it, or give --set num_hidden_layers, moe_layers, num_experts and top_k instead of the model (trace import)"
)


class ConfigModel:
    """A model of a family that transformers does not know.

    Args:
        path: its directory.
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
        needed = {"layers": _LAYERS, "experts": EXPERTS, "experts per token": TOP_K, "width": _WIDTH}
        self._require(needed)
        self.num_hidden_layers = self._whole(_LAYERS, 1, 10_000, 0)
        self._stored_experts = self._whole(EXPERTS, 1, _MOST, 0)
        self.num_experts = self._stored_experts + self._whole(("zero_expert_num",), 0, _MOST, 0)
        self.top_k = self._whole(TOP_K, 1, self.num_experts, 0)

    @property
    def vocab_size(self) -> int:
        """Number of tokens that the model embeds."""
        names = ("vocab_size",)
        self._require({"tokens": names})
        return self._whole(names, 1, 2**24, 0)

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
        stored = self._stored
        layers = list(stored) or self._moe_layers()
        estimate = self._estimate(layers[0])
        spec = ModelSpec(
            name=f"{self.raw.get('model_type')}:{snapshot_name(self.path) or self.path.name}",
            revision=config_revision(self._content) if self._index is None else revision_of(self._content, self._index),
            layer_ids_L=tuple(layers),
            num_experts_L=(self.num_experts,) * len(layers),
            top_k_L=(self.top_k,) * len(layers),
            has_logits_L=(True,) * len(layers),
            num_shared_experts=self._whole(_SHARED, 0, _MOST, 0),
            num_groups=self._whole(_GROUPS, 0, _MOST, 0) or 1,
            hidden_size=self._whole(_WIDTH, 1, 2**20, 0),
            expert_bytes_L=tuple(stored.get(layer, estimate) for layer in layers),
            score_function=self._score_function(),
            renormalize=self._typed(_NORMALIZED, lambda value: type(value) is bool, "true or false", False),
        )
        spec.validate()
        return spec

    @property
    def problem(self) -> str:
        """Reason why it cannot be run."""
        own = ", and moetool never runs code from a checkpoint (auto_map)" if self.raw.get("auto_map") else ""
        return f"transformers has no class for the family {self.raw.get('model_type')!r}{own}"

    @property
    def origin(self) -> str:
        """Source of the bytes of an expert."""
        return "by its weight files" if self._stored else "estimated from its config"

    def _require(self, fields: Mapping[str, tuple[str, ...]]) -> None:
        """Raises: UsageError that names all missing numbers, each with names of its field."""
        missing = [
            f"{what} ({' or '.join(names[:3])})" for what, names in fields.items() if _first(self.text, names) is None
        ]
        if missing:
            raise UsageError(f"{self.path / 'config.json'} does not give its {', '.join(missing)}; {_INSTEAD}")

    def _whole(self, names: tuple[str, ...], least: int, most: int, default: int) -> int:
        value: int = self._typed(names, lambda value: _is_whole(value, least, most), f"{least} to {most:,}", default)
        return value

    def _typed(self, names: tuple[str, ...], is_valid: Callable[[Any], bool], expected: str, default: Any) -> Any:
        """The first of these fields that is not null. Raises: MismatchError: it is not valid."""
        value = _first(self.text, names)
        if value is None or is_valid(value):
            return default if value is None else value
        name = next(name for name in names if self.text.get(name) is not None)
        raise MismatchError(
            f"{self.path / 'config.json'}: {name}: found {shortened(repr(value))}, expected {expected}; {_INSTEAD}"
        )

    def _score_function(self) -> str:
        """The router's score function; softmax in place of one that moetool lacks, with a warning."""
        name: str = self._typed(_SCORES, lambda value: isinstance(value, str), "a name", "softmax")
        if name in SCORE_FUNCTIONS:
            return name
        _log.warning(
            "%s: moetool lacks the score function %s, so scores are the softmax of logits; experts stay as recorded",
            self.path / "config.json",
            shortened(repr(name)),
        )
        return "softmax"

    def _by_layer(self, name: str, kind: type) -> list[Any]:
        """A list with a value for each layer. Raises: MismatchError: values are missing, or of another type."""

        def is_valid(value: Any) -> bool:
            return (
                isinstance(value, list)
                and len(value) >= self.num_hidden_layers
                and all(isinstance(item, kind) for item in value)
            )

        return self._typed((name,), is_valid, f"{self.num_hidden_layers} values of {kind.__name__}", [])

    def _listed_layers(self, name: str) -> list[int]:
        """Layers that a field lists. Raises: MismatchError: one is no layer."""
        last = self.num_hidden_layers - 1

        def is_valid(value: Any) -> bool:
            return isinstance(value, list) and all(_is_whole(layer, 0, last) for layer in value)

        return sorted(set(self._typed((name,), is_valid, f"a list of layers 0 to {last}", [])))

    def _moe_layers(self) -> list[int]:
        """The layers with experts by the config; all where no field tells.

        Raises:
            MismatchError: there are none, or a field names them in an unknown way.
        """
        text, number = self.text, self.num_hidden_layers
        first, step = self._whole(_DENSE_FIRST, 0, _MOST, 0), self._whole(_STEP, 0, _MOST, 1) or 1
        period, offset = self._whole(("expert_layer_period",), 0, _MOST, 0), text.get("expert_layer_offset")
        layers = [layer for layer in range(number) if layer >= first and (layer + 1) % step == 0]
        if isinstance(text.get("moe_layer_freq"), list):
            chosen = self._by_layer("moe_layer_freq", int)
            layers = [layer for layer in layers if chosen[layer]]
        elif freq := self._whole(("moe_layer_freq",), 0, _MOST, 0):
            layers = [layer for layer in layers if layer % freq == 0]
        if period:
            layers = [layer for layer in layers if layer % period == offset]
        if kinds := self._by_layer("mlp_layer_types", str):
            layers = [layer for layer in range(number) if kinds[layer] != "dense"]
        dense = self._listed_layers("mlp_only_layers")
        layers = [layer for layer in self._listed_layers("moe_layers") or layers if layer not in dense]
        if not layers:
            raise MismatchError(f"{self.path / 'config.json'} has no layer with experts, expected some")
        return layers

    @cached_property
    def _index(self) -> TensorIndex | None:
        return read_index(self.path) if has_weights(self.path) else None

    @cached_property
    def _stored(self) -> dict[int, int]:
        """Bytes of an expert by layer of the language model, where weight files hold experts one by one."""
        tensors = sorted(self._index.tensors.items()) if self._index else []
        bytes_of: dict[str, int] = defaultdict(int)
        for name, tensor in tensors:
            if match := _LAYER_TENSOR.match(name):
                bytes_of[match[1]] += tensor.num_bytes
        prefix = max(bytes_of, key=bytes_of.__getitem__, default="")
        stored: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))
        for name, tensor in tensors:
            match = _EXPERT_TENSOR.fullmatch(name)
            if match and match[1] == prefix and int(match[2]) < self.num_hidden_layers:
                stored[int(match[2])][int(match[3])] += tensor.num_bytes
        for layer, experts in stored.items():
            if len(experts) != self._stored_experts:
                raise MismatchError(
                    f"the weight files in {self.path} hold {len(experts)} experts of layer {layer}, expected "
                    f"{self._stored_experts} by its config.json; correct it, or complete the files"
                )
        return {layer: max(experts.values()) for layer, experts in sorted(stored.items())}

    def _estimate(self, layer: int) -> int:
        """Bytes of an expert of three matrices by the config; `UNKNOWN_BYTES` where it does not tell."""
        inner, outer = self.text.get("moe_intermediate_size"), _first(self.text, _EXPERT_INPUT)
        declared = getattr(torch, str(_first(self.text, _DTYPE) or _first(self.raw, _DTYPE) or "bfloat16"), None)
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


def _is_whole(value: Any, least: int, most: int) -> bool:
    return type(value) is int and least <= value <= most
