"""Timings of all parts except the routed experts, from one or two decoder layers of a model."""

import contextlib
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from moetool.base.errors import CapacityError, MoetoolError, first_line
from moetool.base.machine import memory_bytes
from moetool.costing.costs import Curve
from moetool.measuring.probes.expert_compute import random, synchronize
from moetool.measuring.probes.repeat import Timings, repeat
from moetool.models.cache_argument import cache_argument
from moetool.models.checkpoint import Checkpoint
from moetool.models.experts.moe_layers import MoeLayer, moe_layers
from moetool.models.packed_linear import PackedLinear
from moetool.models.transformers_internals import initialize

CONTEXTS = (16, 128, 512, 2048)
BATCHES = (8, 32)
_SKIP = "moetool_skip"
_WHOLE_CONTEXT = ("full_attention", "indexed_attention")
_RANDOM_VALUES = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCurves:
    """Curves of a decoder layer's parts; see `moetool.costing.costs.ComputeCosts`."""

    attention: Curve
    prompt_attention: Curve
    gate: Curve
    shared: Curve
    dense: Curve | None
    head: Curve


def layer_curves(checkpoint: Checkpoint, dtype: torch.dtype, device: str, seconds: float) -> LayerCurves:
    """Measure the parts of a model's layers, with random weights where they are not packed.

    One MoE layer, and one dense layer if the model has such, run in the model's own forward between embedding and head;
    hooks take the times. Attention is transformers' own, with its cache, from a layer that attends to the whole
    context.

    Args:
        checkpoint: checkpoint of the model. With weights, a CPU's linear layers are packed as in the server.

    Effects: allocates these layers, the embedding and the head.

    Raises:
        CapacityError: they do not fit into memory.
        MoetoolError: the family's forward does not run with a subset of layers.
    """
    config = checkpoint.config
    probe = _Probe(checkpoint, dtype, device)
    longest = getattr(config, "max_position_embeddings", None) or CONTEXTS[-1]
    contexts = [context for context in CONTEXTS if context < longest]
    measurements = [partial(probe.measure_prompt, context) for context in contexts]
    measurements += [partial(probe.measure_decode, context) for context in contexts]
    measurements += [partial(probe.measure_batch, batch) for batch in BATCHES]
    try:
        with torch.inference_mode():
            repeat(measurements, seconds)
    except (RuntimeError, ValueError, TypeError, AttributeError, IndexError, KeyError) as error:
        raise MoetoolError(
            f"cannot time one layer of {config.model_type} by itself ({first_line(error)}); "
            "this family cannot be profiled yet"
        ) from error
    return probe.curves()


class _Probe:
    """A model with one layer of each kind, and a stopwatch on its parts."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: str) -> None:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        self._device = device
        self._vocabulary = int(checkpoint.config.vocab_size)
        self._model = checkpoint.empty_model(dtype)
        layers_of_experts = moe_layers(self._model)
        moe = _typical(layers_of_experts, checkpoint.config)
        block_path = moe.path.rpartition(".")[0]
        layers_path = moe.path[: moe.path.index(f".{moe.layer_id}.")]
        layers = self._model.get_submodule(layers_path)
        has_experts = {layer.layer_id for layer in layers_of_experts}
        dense_id = next((i for i in range(len(layers)) if i not in has_experts), None)
        self._parts: dict[str, nn.Module] = {
            "total": self._model,
            "layer": layers[moe.layer_id],
            "block": self._model.get_submodule(block_path),
            "gate": moe.router,
            "experts": moe.experts,
        }
        if dense_id is not None:
            self._parts["dense_layer"] = layers[dense_id]
        kept = [i for i in (dense_id, moe.layer_id) if i is not None]
        if device == "cpu" and checkpoint.weights:
            _pack(self._model, checkpoint, dtype, layers_path, kept)
        _keep(self._model, layers_path, kept)
        stored = checkpoint.stored_embeddings(dtype, device)
        for name in [name for name, module in self._model.named_modules() if isinstance(module, nn.Embedding)]:
            if _original(name, layers_path, kept) in stored:
                self._model.set_submodule(name, _FewRows(self._model.get_submodule(name)))
        _materialise(self._model, moe, device)
        ALL_EXPERTS_FUNCTIONS.register(_SKIP, _skip)
        self._model.set_experts_implementation(_SKIP)
        self._stopwatch = _Stopwatch(self._parts, device)
        self._caches: dict[int, Any] = {}
        self._timings = {
            name: Timings() for name in ("attention", "prompt_attention", "gate", "shared", "dense", "head")
        }

    def measure_prompt(self, tokens: int) -> None:
        """Measure a prompt of this many tokens; `measure_decode` uses its cache."""
        laps, self._caches[tokens] = self._forward(self._model.base_model, 1, tokens)  # a prompt needs few logits
        self._timings["prompt_attention"].add(tokens, laps["layer"] - laps["block"])
        self._note_block(tokens, laps)

    def measure_decode(self, context: int) -> None:
        """Measure one more token, then crop the cache."""
        laps, cache = self._forward(self._model, 1, 1, self._caches[context])
        with contextlib.suppress(ValueError, RuntimeError):  # caches with a window or a fixed state cannot be cropped
            cache.crop(-1)
        self._timings["attention"].add(context, laps["layer"] - laps["block"])
        self._timings["head"].add(1, laps["total"] - laps["layer"] - laps.get("dense_layer", 0.0))
        self._note_block(1, laps)

    def measure_batch(self, requests: int) -> None:
        """Measure one token of this many requests."""
        laps, _ = self._forward(self._model, requests, 1)
        self._timings["head"].add(requests, laps["total"] - laps["layer"] - laps.get("dense_layer", 0.0))
        self._note_block(requests, laps)

    def curves(self) -> LayerCurves:
        """Return the curves through the timings."""
        made = self._timings
        return LayerCurves(
            attention=made["attention"].curve(),
            prompt_attention=made["prompt_attention"].curve(),
            gate=made["gate"].curve(),
            shared=made["shared"].curve(),
            dense=made["dense"].curve() if "dense_layer" in self._parts else None,
            head=made["head"].curve(),
        )

    def _note_block(self, tokens: int, laps: dict[str, float]) -> None:
        self._timings["gate"].add(tokens, laps["gate"])
        self._timings["shared"].add(tokens, laps["block"] - laps["gate"] - laps["experts"])
        if "dense_layer" in laps:
            attention = laps["layer"] - laps["block"]
            self._timings["dense"].add(tokens, laps["dense_layer"] - attention)

    def _forward(self, model: Any, requests: int, tokens: int, cache: Any = None) -> tuple[dict[str, float], Any]:
        """Return the parts' seconds, and the forward's cache."""
        ids = torch.randint(self._vocabulary, (requests, tokens), device=self._device)
        name = cache_argument(model)
        output = model(ids, use_cache=True, **{name: cache})
        return self._stopwatch.take(), output[name]


class _FewRows(nn.Embedding):
    """Embedding of any ids from a few rows, in place of one whose rows the server reads from files."""

    def __init__(self, table: nn.Embedding) -> None:
        super().__init__(0, table.embedding_dim, dtype=table.weight.dtype, device="meta")
        rows = min(table.num_embeddings, _RANDOM_VALUES // table.embedding_dim + 1)
        self.weight = nn.Parameter(table.weight[:rows], requires_grad=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens % len(self.weight))


class _Stopwatch:
    """Seconds of some modules in the last forward."""

    def __init__(self, parts: dict[str, nn.Module], device: str) -> None:
        self._device = device
        self._laps: dict[str, float] = {}
        for name, module in parts.items():
            module.register_forward_pre_hook(lambda *_, name=name: self._start(name))
            module.register_forward_hook(lambda *_, name=name: self._stop(name))

    def take(self) -> dict[str, float]:
        laps, self._laps = self._laps, {}
        return laps

    def _start(self, name: str) -> None:
        synchronize(self._device)
        self._laps[name] = -time.perf_counter()

    def _stop(self, name: str) -> None:
        synchronize(self._device)
        self._laps[name] += time.perf_counter()


def _typical(layers: list[MoeLayer], config: Any) -> MoeLayer:
    """Return the first MoE layer that attends to the whole context, if layers differ in that."""
    kinds = getattr(config, "layer_types", None) or ()
    return next((layer for layer in layers if kinds and kinds[layer.layer_id] in _WHOLE_CONTEXT), layers[0])


def _pack(model: Any, checkpoint: Checkpoint, dtype: torch.dtype, layers_path: str, layer_ids: list[int]) -> None:
    """Read the weights that the server keeps packed, of some decoder layers and of what is in none."""
    mine = tuple(f"{layers_path}.{i}." for i in layer_ids)
    wanted = {
        name: stored
        for name, stored in checkpoint.packed_linears(dtype).items()
        if name.startswith(mine) or not name.startswith(f"{layers_path}.")
    }
    if not wanted:
        return
    with contextlib.closing(checkpoint.open_shards()) as shards:
        for name, stored in wanted.items():
            model.set_submodule(name, PackedLinear(stored, shards, model.get_submodule(name).bias))


def _keep(model: Any, layers_path: str, layer_ids: list[int]) -> None:
    """Reduce a model to some of its decoder layers."""
    layers = model.get_submodule(layers_path)
    config = model.config.get_text_config()
    kinds = vars(config).get("layer_types")
    if kinds is not None:
        config.layer_types = [kinds[i] for i in layer_ids]
    config.num_hidden_layers = len(layer_ids)
    model.set_submodule(layers_path, nn.ModuleList(layers[i] for i in layer_ids))
    for position, layer_id in enumerate(layer_ids):
        for module in layers[layer_id].modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = position  # its index in the cache


def _original(name: str, layers_path: str, layer_ids: list[int]) -> str:
    """Name that a module had before `_keep`."""
    if not name.startswith(f"{layers_path}."):
        return name
    position, _, rest = name.removeprefix(f"{layers_path}.").partition(".")
    return f"{layers_path}.{layer_ids[int(position)]}.{rest}"


def _materialise(model: Any, moe: MoeLayer, device: str) -> None:
    """Allocate random weights for all on the meta device but the routed experts, and compute rotary frequencies.

    Raises:
        CapacityError: they do not fit into memory.
    """
    experts = set(moe.experts.modules())
    needed = sum(p.nbytes for m in model.modules() if m not in experts for p in m.parameters(recurse=False))
    if device == "cpu" and needed > (free := memory_bytes()[1]):
        raise CapacityError(
            f"{needed:,} bytes are needed for the embedding, the head and a layer of each kind, and {free:,} are free; "
            "free some memory, or measure a narrower --dtype"
        )
    values: dict[torch.dtype, torch.Tensor] = {}
    for module in model.modules():
        if module in experts:
            continue
        for name, parameter in list(module.named_parameters(recurse=False)):
            if not parameter.is_meta:
                continue
            filled = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            pattern = values.setdefault(parameter.dtype, random(parameter.dtype, device, _RANDOM_VALUES))
            for part in filled.view(-1).split(_RANDOM_VALUES):
                part.copy_(pattern[: len(part)])
            setattr(module, name, nn.Parameter(filled, requires_grad=False))
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, torch.zeros(buffer.shape, dtype=buffer.dtype, device=device))
        if module._buffers and not module._parameters:  # rotary frequencies, constants of hashes
            initialize(model, module)


def _skip(module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> Any:
    """Skip the experts, as an experts implementation of transformers."""
    return torch.zeros_like(hidden_states)
