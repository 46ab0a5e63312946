"""A model's checkpoint, opened once: config, MoE layers, tensors, weight format, tokenizer and identity."""

import copy
import hashlib
import json
import logging
import weakref
from collections import Counter
from collections.abc import Container, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch

from moetool.base import families
from moetool.base.bounded_read import require_itself
from moetool.base.errors import MismatchError, MoetoolError, UsageError, first_line, shortened
from moetool.base.json_files import decode_json, parse_object, read_bounded
from moetool.base.types import ModelSpec
from moetool.kernels.cpu.scaled_weight import unpacked_at_once
from moetool.models.cache_size import CacheSize, measure_cache
from moetool.models.conversion import TensorSource, sources
from moetool.models.experts.expert_files import ExpertFiles, ExpertWeights, bytes_of_slots, slot_forms, stored_bytes
from moetool.models.experts.moe_layers import MoeLayer, moe_layers, offloaded, spec_of
from moetool.models.experts.packed_slot import stays_packed
from moetool.models.experts.scaled_slot import stays_scaled
from moetool.models.families.config_checks import check_config
from moetool.models.families.text_part import build_empty, field_of, stands_alone
from moetool.models.files.content_hash import content_hashes
from moetool.models.files.hub import snapshot_name
from moetool.models.files.location import locate, locate_config
from moetool.models.files.revision import config_revision, revision_of
from moetool.models.files.tensor_index import FLOATS, TensorIndex, has_weights, read_index
from moetool.models.gguf.tokenizer import read_gguf_tokenizer
from moetool.models.gguf.weights import read_gguf
from moetool.models.layer_checks import check_forward, check_layers
from moetool.models.libraries import require_transformers
from moetool.models.packed_linear import estimate_packed_linears, find_packed_linears, form_of_linear
from moetool.models.shards import Shards
from moetool.models.stored_embedding import embeddings_to_store, lookup_tables, readable_rows
from moetool.models.tied_weights import untie_stored
from moetool.models.transformers_internals import wide_parameters
from moetool.models.weight_index import WeightIndex, index_weights
from moetool.models.weights.format import StoredWeight
from moetool.models.weights.quantization_config import Quantization, quantization_of

require_transformers()  # before imports that older versions lack

_LOG = logging.getLogger(__name__)
_PLACEHOLDER = torch.bfloat16  # no family pins a tensor to it, so such tensors take the model's data type


class UnknownFamily(UsageError):
    """A config of a family that transformers lacks: it can be traced (`ConfigModel`), not run."""


class Checkpoint:
    """A checkpoint whose parts are read and built once, at first use.

    Args:
        name: display name (default: the path).
        weights: whether to use its weight files; otherwise only the config is read.
        direct: read tensors with O_DIRECT where the file system allows.

    Attributes:
        config: transformers' config of the text model, from the file without its quantization.
        raw: the content of config.json.
        quantization: the weight formats of its experts and of its dense parts; None if all are plain numbers.

    Effects: only the results of `open_shards` and `expert_files` keep files open. `close` closes all of them.

    Raises:
        UnknownFamily: transformers does not know the family.
        UsageError: the weight format is not supported.
        MismatchError: the config is damaged, or its fields contradict one another.
    """

    def __init__(self, path: Path, *, name: str = "", weights: bool = True, direct: bool = True) -> None:
        self.path = path
        self.name = name or str(path)
        self.weights = weights
        self._direct = direct
        self._cache_sizes: dict[torch.dtype, CacheSize | None] = {}
        self._opened: weakref.WeakSet[Shards] = weakref.WeakSet()
        self._gguf = read_gguf(path, whole=weights) if path.is_file() else None
        self.quantization: Quantization | None
        if self._gguf is not None:
            self._content, self.raw, self.quantization = self._gguf.content, self._gguf.config, self._gguf.weights
            self._whole_config = _parse_config(path, self._config_file, self.raw)
        else:
            self._content, self.raw = read_config(path / "config.json")
            self._whole_config = _parse_config(path, self._config_file, self.raw)
            self.quantization = quantization_of(self.raw, path)
        self.config: Any = self._whole_config.get_text_config()
        check_config(self.config, self.raw, self._config_file)
        for config in (self.config, self._whole_config):
            if hasattr(config, "quantization_config"):
                del config.quantization_config  # the model is always built unpacked

    @classmethod
    def open(cls, model: str | Path, *, weights: bool = True) -> "Checkpoint":
        """Open the checkpoint of a model.

        Args:
            model: argument of `moetool.models.files.location.locate`, or without weights of `locate_config`.

        Effects: downloads a hub name to the hub's own cache, unless HF_HUB_OFFLINE is set.
        """
        path = locate(str(model)) if weights else locate_config(str(model))
        return cls(path, name=str(model), weights=weights)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all files opened through this object. Values stay cached, and files may be opened again."""
        for shards in list(self._opened):
            shards.close()

    @property
    def header_buffers(self) -> Mapping[str, list[int]]:
        """Numbers of the model that a GGUF header holds, by name."""
        return self._gguf.buffers if self._gguf is not None else {}

    @property
    def _config_file(self) -> Path:
        return self.path / "config.json" if self._gguf is None else self.path

    # -- the model without its weights ---------------------------------------------------------------------------

    @cached_property
    def _model_of_config(self) -> Any:
        return build_empty(self._whole_config, self._config_file, _PLACEHOLDER)

    @cached_property
    def skeleton(self) -> Any:
        """The model on the meta device: modules and shapes without memory. Do not change it.

        It ties the parameters that its config ties, except those of which the weight files hold both (`untie_stored`).

        Raises: errors of `weight_index`, if its config ties any.
        """
        model = self._model_of_config
        if self.weights and model.all_tied_weights_keys:
            untie_stored(model, self.sources, self.weight_index, self.path)
        return model

    @property
    def stands_alone(self) -> bool:
        """Whether transformers loads only its language model."""
        return str(self.raw.get("model_type")) not in families.SAME_AS and stands_alone(self._whole_config)

    def empty_model(self, dtype: torch.dtype) -> Any:
        """Return a new skeleton of this data type that the caller may change."""
        model = copy.deepcopy(self.skeleton)
        model._apply(lambda tensor: tensor.to(dtype) if tensor.dtype == _PLACEHOLDER else tensor)
        for config in (model.config, *(getattr(model.config, name, None) for name in model.config.sub_configs)):
            if config is not None:
                config.dtype = dtype
        return model

    def cache_size(self, dtype: torch.dtype) -> CacheSize | None:
        """Size of requests' own caches (`measure_cache`); None for a family that has none, or that needs numbers."""
        if not self.layers or not families.own_cache(self.config):
            return None
        if dtype not in self._cache_sizes:
            self._cache_sizes[dtype] = measure_cache(self.empty_model(_PLACEHOLDER), dtype)
        return self._cache_sizes[dtype]

    @cached_property
    def layers(self) -> list[MoeLayer]:
        """MoE layers of the skeleton. Raises: UsageError: it has none that moetool can hook."""
        return moe_layers(self.skeleton)

    @cached_property
    def spec(self) -> ModelSpec:
        """Specification of its experts.

        Raises:
            UsageError: it is not an MoE model of a known family.
            MismatchError: its weight files are damaged.
        """
        spec = spec_of(
            self.skeleton,
            self.layers,
            name=snapshot_name(self.path) or self.path.name,
            revision=self.revision,
            expert_bytes_L=self._expert_bytes(),
        )
        try:
            spec.validate()
        except MismatchError as error:
            raise MismatchError(f"{self._config_file}: {error}; download the model again") from None
        if self.quantization is not None and not self.sizes_by_headers:
            _LOG.warning(
                "bytes of quantized experts of %s are estimated from its config, which does not describe the scales; "
                "its weight files give exact sizes",
                self.name,
            )
        for problem in self._gguf.contradictions if self._gguf is not None else ():
            _LOG.warning("%s: its header counts %s: the tensors decide", self.path, problem)
        check_forward(self.empty_model(_PLACEHOLDER), self._config_file)
        if self.weights:
            check_layers(
                self.layers, self.sources, self.weight_index.weights, self.path, by_header=self._gguf is not None
            )
        return spec

    def stored_embeddings(self, dtype: torch.dtype, device: str = "cpu") -> dict[str, list[str]]:
        """Embeddings whose rows are read from the weight files (`StoredEmbedding`), with the weights that hold them.

        Without weight files this assumes that all large ones can be read so, and names no weights.

        Args:
            device: type of device.
        """
        names = embeddings_to_store(self.skeleton, dtype, device)
        if not self.weights:
            return {name: [] for name in names}
        found = {}
        for name in names:
            source, table = self.sources.get(f"{name}.weight"), self.skeleton.get_submodule(name)
            if source is not None and (rows := readable_rows(table, source, self.weight_index.weights)):
                found[name] = rows
        return found

    def stored_elements(self, dtype: torch.dtype, device: str = "cpu") -> int:
        """Numbers in the embeddings whose rows are read from the weight files."""
        tables = self.stored_embeddings(dtype, device)
        return sum(self.skeleton.get_submodule(name).weight.numel() for name in tables)

    def packed_linears(self, dtype: torch.dtype) -> dict[str, StoredWeight]:
        """Linear layers outside the routed experts whose weights a CPU keeps packed, by name (`PackedLinear`)."""
        if self.quantization is None or dtype != torch.bfloat16 or not self.sizes_by_headers:
            return {}
        return self._packed_linears

    @cached_property
    def _packed_linears(self) -> dict[str, StoredWeight]:
        return find_packed_linears(self.skeleton, self.sources, self.weight_index.weights, self.index.read)

    def dense_bytes(self, dtype: torch.dtype, device: str = "cpu", products: bool = True) -> int:
        """Bytes that the dense weights take in memory.

        Packed weights add the memory that unpacks the largest one, plus one copy. Embeddings that stay in the weight
        files do not count.

        Args:
            dtype: data type of unpacked weights.
            device: type of device.
            products: whether a CPU keeps weights packed if it can multiply them so.
        """
        packed, elements, unpacked = self._dense_parts(dtype, device, products)
        scratch = self.layers[0].form.num_elements * (dtype.itemsize + 4) if self.weights and self.quantization else 0
        return packed + elements * dtype.itemsize + max(scratch, unpacked * dtype.itemsize)

    def dense_token_bytes(self, dtype: torch.dtype) -> int:
        """Share of `dense_bytes` that a CPU reads to decode a token: embedding tables count only if tied."""
        packed, elements, _ = self._dense_parts(dtype, "cpu", True)
        stored = self.stored_embeddings(dtype)
        tables = lookup_tables(self.skeleton)
        rows = sum(table.weight.numel() for name, table in tables.items() if name not in stored)
        return packed + (elements - rows) * dtype.itemsize

    def _dense_parts(self, dtype: torch.dtype, device: str, products: bool) -> tuple[int, int, int]:
        """Bytes of weights of types of their own, elements of the others, and most elements that are unpacked at once.

        Packed weights and those that the family keeps in float32 have types of their own.
        """
        linears = self._packed_bytes(dtype) if device == "cpu" and products else {}
        wide = self._wide_elements(dtype, linears)
        packed, excluded, unpacked = wide * torch.float32.itemsize, wide + self.stored_elements(dtype, device), 0
        for linear, num_bytes in linears.items():
            elements = self.skeleton.get_submodule(linear).weight.numel()
            packed, excluded = packed + num_bytes, excluded + elements
            unpacked = max(unpacked, unpacked_at_once(elements))
        return packed, self._dense_elements - excluded, unpacked

    def _wide_elements(self, dtype: torch.dtype, linears: Container[str]) -> int:
        """Dense elements that the family keeps in float32, such as routers, unless these packed linears hold them."""
        parts, experts = wide_parameters(self.skeleton, dtype), offloaded(self.layers)
        others = (
            (name, parameter)
            for name, parameter in self.skeleton.named_parameters()
            if name not in experts and name.removesuffix(".weight") not in linears
        )
        return sum(parameter.numel() for name, parameter in others if any(part in name for part in parts))

    def _packed_bytes(self, dtype: torch.dtype) -> dict[str, int]:
        """Bytes of the weights of `packed_linears`, or an estimate from the config alone."""
        if self.quantization is not None and dtype == torch.bfloat16 and not self.sizes_by_headers:
            return estimate_packed_linears(self.skeleton, self.quantization, self.declared_dtype)
        forms = {name: form_of_linear(stored) for name, stored in self.packed_linears(dtype).items()}
        return {name: form.num_bytes for name, form in forms.items() if form is not None}

    @cached_property
    def stored_dense_bytes(self) -> int:
        """Bytes of the dense weights in its files."""
        experts = offloaded(self.layers)
        dense = (source for parameter, source in self.sources.items() if parameter not in experts)
        names = {name for source in dense for name in source.tensor_names}
        return sum(self.weight_index.weights[name].num_bytes for name in names)

    @cached_property
    def _dense_elements(self) -> int:
        experts = offloaded(self.layers)
        return sum(p.numel() for name, p in self.skeleton.named_parameters() if name not in experts)

    @cached_property
    def num_parameters(self) -> int:
        """Parameters of the model, without those that its config ties and without layers for drafts."""
        experts = sum(layer.form.num_experts * layer.form.num_elements for layer in self.layers)
        return self._dense_elements + experts

    @cached_property
    def num_active_parameters(self) -> int:
        """Parameters that a token multiplies: all but the experts that it does not use, and untied embeddings."""
        experts = sum(layer.top_k * layer.form.num_elements for layer in self.layers)
        rows = sum(table.weight.numel() for table in lookup_tables(self.skeleton).values())
        return self._dense_elements - rows + experts

    # -- the weight files ----------------------------------------------------------------------------------------

    @cached_property
    def index(self) -> TensorIndex:
        """The tensors of its files.

        Raises:
            UsageError: a file is missing.
            MismatchError: one is damaged.
        """
        if self._gguf is not None:
            return self._gguf.index
        return read_index(self.path, self.raw.get("transformers_weights"))

    @cached_property
    def weight_index(self) -> WeightIndex:
        """Its weights by their names, quantized or not.

        Raises: errors of `index`; MismatchError: tensors of a weight contradict one another or the config.
        """
        return index_weights(self.index, self.quantization)

    @cached_property
    def sources(self) -> dict[str, TensorSource]:
        """Tensors that make each parameter and buffer of the model."""
        return sources(self._model_of_config, self.weight_index.weights)

    def open_shards(self) -> Shards:
        """Open its weight files, until their own `close` or this checkpoint's."""
        shards = Shards(self.weight_index, direct=self._direct)
        self._opened.add(shards)
        return shards

    @cached_property
    def expert_weights(self) -> ExpertWeights:
        """The stored weights that make its experts."""
        return ExpertWeights(self.weight_index, self.sources, self.path)

    def expert_files(self, *, fastest: torch.dtype | None = None) -> ExpertFiles:
        """Open a reader of single experts with its own shards; arguments and errors as for `ExpertFiles`."""
        shards = self.open_shards()
        try:
            return ExpertFiles(shards, self.layers, self.spec, self.expert_weights, fastest=fastest)
        except BaseException:
            shards.close()
            raise

    def slot_bytes(self, fastest: torch.dtype | None) -> int:
        """Bytes of a slot of `expert_files`, or an estimate from the config alone."""
        form = self.layers[0].form
        if not self.sizes_by_headers:
            formats = self.quantization.formats if self.quantization is not None else ()
            packed = fastest is None or all(
                stays_packed(format, form, fastest) or stays_scaled(format, form, fastest, self.declared_dtype)
                for format in formats
            )
            return self.spec.slot_bytes if packed or fastest is None else form.num_elements * fastest.itemsize
        layouts = list(dict.fromkeys(map(self.expert_weights.layout, self.layers)))
        return bytes_of_slots(layouts, slot_forms(layouts, tuple(part.shape for part in form.parts), fastest))

    @cached_property
    def expert_dtype(self) -> torch.dtype:
        """Data type of the experts: that of most bytes in the files, or the config's.

        For quantized experts: the type of scales and unquantized weights.

        Raises: MismatchError: it is not a supported type.
        """
        if not self.weights:
            return self.declared_dtype
        sizes: Counter[str] = Counter()
        for tensor in self.index.tensors.values():
            if self.quantization is None or tensor.dtype in FLOATS:
                sizes[tensor.dtype] += tensor.num_bytes
        found = max(sizes, key=sizes.__getitem__, default="nothing")
        if found not in FLOATS:
            raise MismatchError(
                f"the weights in {self.path} are stored as {found}, expected one of {', '.join(FLOATS)}"
            )
        return FLOATS[found]

    @property
    def declared_dtype(self) -> torch.dtype:
        """The data type of the weights on disk, by the config."""
        declared = getattr(self.config, "dtype", None)
        return declared if isinstance(declared, torch.dtype) else torch.bfloat16

    @cached_property
    def sizes_by_headers(self) -> bool:
        """Whether experts' bytes come from file headers; without `weights` too, if all files exist.

        Otherwise sizes of quantized experts are estimates from the config, which does not describe the scales.
        """
        if self.weights or self._gguf is not None:
            return True
        if self.quantization is None or not has_weights(self.path):
            return False
        try:
            for layer in self.layers:
                self.expert_weights.layout(layer)
        except MoetoolError:  # e.g. an incomplete download
            return False
        return True

    def _expert_bytes(self) -> tuple[int, ...]:
        """Bytes of one expert of each layer, as stored."""
        if self.sizes_by_headers:
            return tuple(self.expert_weights.layout(layer).num_bytes for layer in self.layers)
        return tuple(stored_bytes(layer, self.quantization, self.declared_dtype) for layer in self.layers)

    @cached_property
    def revision(self) -> str:
        """Identity of the checkpoint (`moetool.models.files.revision`), or of its config alone."""
        return revision_of(self._content, self.index) if self.weights else config_revision(self._content)

    @cached_property
    def content(self) -> dict[str, str]:
        """The sha256 of its config and of each weight file, by relative path (`moetool.models.files.content_hash`).

        GGUF files are named `gguf 1`, `gguf 2` and so on, whatever their file names.

        Raises: see `content_hashes`.
        """
        if self._gguf is not None:
            hashes = content_hashes(self.index.files, self.path.parent)
            return {f"gguf {n + 1}": hashes[file.name] for n, file in enumerate(self.index.files)}
        hashes = content_hashes(self.index.files, self.path)
        return {"config.json": hashlib.sha256(self._content).hexdigest(), **hashes}

    # -- its text ------------------------------------------------------------------------------------------------

    @cached_property
    def tokenizer(self) -> Any:
        """The model's tokenizer.

        That of a GGUF file comes from the file, or from the `tokenizer.json` beside it if the first cannot be read.

        Effects: logs a warning if it has tokens that the model's embedding lacks.

        Raises: UsageError: there is none that can be read.
        """
        made = self._read_tokenizer()
        if (last := max(len(made) - 1, *made.added_tokens_decoder, -1)) >= self.vocab_size:
            _LOG.warning(
                "the tokenizer of %s has tokens up to %d (%s), but the model embeds %d tokens; prompts with a further "
                "token are refused",
                *(self.name, last, made.convert_ids_to_tokens(last), self.vocab_size),
            )
        return made

    def _read_tokenizer(self) -> Any:
        if self._gguf is None:
            return read_tokenizer(self.path, config=self._whole_config)
        first = self.index.files[0]
        try:
            return read_gguf_tokenizer(first, *self._gguf.tokenizer)
        except Exception as error:  # transformers checks little and raises any error
            if (first.parent / "tokenizer.json").is_file():
                return read_tokenizer(first.parent, config=self._whole_config)
            if isinstance(error, UsageError | MemoryError):
                raise
            raise UsageError(
                f"{first} has no tokenizer that can be read: {first_line(error)}; put the original model's "
                "tokenizer.json into the same directory"
            ) from None

    @property
    def vocab_size(self) -> int:
        """Number of tokens that the model embeds; ids at and beyond it cannot be read."""
        return int(self.config.get_text_config().vocab_size)

    @property
    def max_context(self) -> int | None:
        """Longest context that the model was trained for; None if the config does not state it."""
        return getattr(self.config, "max_position_embeddings", None)


_TOKENIZER_FILES = ("*token*", "vocab*", "merges.txt", "*.model", "chat_template*", "additional_chat_templates/*")


def read_tokenizer(folder: Path, **options: Any) -> Any:
    """Load the tokenizer in a folder.

    Args:
        options: arguments for transformers, such as the model's `config`.

    Raises:
        UsageError: transformers cannot read a tokenizer in the folder, or would make an empty one.
        MismatchError: one of its files stands for another one (`require_itself`).
    """
    from transformers import AutoTokenizer

    for pattern in _TOKENIZER_FILES:
        for file in folder.glob(pattern):
            require_itself(file)
    try:
        made = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, **options)
    except MemoryError:
        raise
    except Exception as error:  # transformers checks little and raises any error
        if not _is_code(folder / "tokenizer_config.json"):
            raise UsageError(f"{folder} has no tokenizer that can be read: {_fault_of_files(folder, error)}") from None
        return read_fast_tokenizer(folder)
    if len(made) <= len(getattr(made, "added_tokens_decoder", ())):  # transformers made it from the config alone
        raise UsageError(f"{folder} has no tokenizer; put the tokenizer.json of the model there")
    return made


def _fault_of_files(folder: Path, error: Exception) -> str:
    """Say which file of a tokenizer is damaged, or else quote an error of transformers beside all files."""
    files = sorted(file for pattern in _TOKENIZER_FILES for file in folder.glob(pattern))
    for file in files:
        try:
            if file.suffix == ".json":
                parse_object(file.read_bytes(), constants=True)
            elif file.suffix == ".jinja":
                file.read_text("utf-8")
        except (OSError, ValueError) as fault:
            return f"its {file.name} is damaged ({first_line(fault)}); download it again"
    lacks = "" if (folder / "tokenizer.json").is_file() else "there is no tokenizer.json, and of its other files: "
    names = ", ".join(file.name for file in files)
    return f"{lacks}{first_line(error)}{f' (read: {names}); download them again' if names else ''}"


def read_fast_tokenizer(folder: Path) -> Any:
    """Load a tokenizer.json, whatever class the checkpoint names; errors as in `read_tokenizer`."""
    from transformers import PreTrainedTokenizerFast

    file = folder / "tokenizer.json"
    require_itself(file)
    try:
        return PreTrainedTokenizerFast.from_pretrained(folder)
    except MemoryError:
        raise
    except Exception as error:
        reason = first_line(error)
        if file.is_file():
            reason = f"its tokenizer.json is damaged ({reason}); download it again"
        elif _is_code(folder / "tokenizer_config.json"):
            reason = "it is code (auto_map), which moetool does not run; put a tokenizer.json of the model there"
        raise UsageError(f"{folder} has no tokenizer that can be read: {reason}") from None


def _is_code(file: Path) -> bool:
    """Whether a tokenizer_config.json names the checkpoint's own code."""
    try:
        values = json.loads(read_bounded(file, advice=""))  # its model_max_length may have 31 digits
    except (OSError, ValueError, RecursionError, MoetoolError):  # transformers says what is wrong with it
        return False
    return isinstance(values, dict) and "auto_map" in values


def read_config(file: Path) -> tuple[bytes, dict[str, Any]]:
    """The bytes of a config.json and its content; configs of state-space layers hold Infinity."""
    advice = "download the model again"
    try:
        content = read_bounded(file, advice=advice)
    except OSError as error:
        raise UsageError(f"cannot read {file}: {first_line(error)}") from None
    return content, decode_json(file, content, advice=advice, constants=True)


_LARGEST = {
    "num_hidden_layers": 1_000,
    "num_experts": 16_384,
    "num_local_experts": 16_384,
    "n_routed_experts": 16_384,
    "vocab_size": 2**24,
    "hidden_size": 2**20,
}
"""Several times the largest published model. More would take minutes to build and means a damaged file."""


def _require_bounded(file: Path, raw: dict[str, Any]) -> None:
    """Raises: MismatchError: a size in the config, or in its text part, exceeds that of any model."""
    for values in (raw, *(part for part in raw.values() if isinstance(part, dict))):
        for name, most in _LARGEST.items():
            if isinstance(value := values.get(name), int | float) and value > most:
                raise MismatchError(f"{file}: {name} is {value:,}, expected at most {most:,}; download the model again")


def _parse_config(path: Path, file: Path, raw: dict[str, Any]) -> Any:
    from transformers import PreTrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type = str(raw.get("model_type") or "")
    if not model_type:
        raise MismatchError(f"{file} has no model_type, expected a name; correct it, or download the model again")
    model_type = families.SAME_AS.get(model_type, model_type)
    families.require_supported(model_type)
    _require_bounded(file, raw)
    if model_type not in CONFIG_MAPPING:
        own = " (moetool never runs code from a checkpoint, auto_map)" if raw.get("auto_map") else ""
        raise UnknownFamily(
            f"{file} is of the model type {model_type!r}, which transformers does not know{own}: moetool cannot run "
            "it, but trace it by capture --server or trace import --set model=PATH; 'moetool models' lists those that "
            "run"
        )
    if not isinstance(quantization := raw.get("quantization_config"), dict | None):
        raise MismatchError(
            f"{file}: quantization_config is {shortened(repr(quantization))}, expected an object; correct it, or "
            "download the model again"
        )
    try:
        values = PreTrainedConfig._decode_special_floats(copy.deepcopy(raw | {"model_type": model_type}))
        config = CONFIG_MAPPING[model_type].from_dict(values, name_or_path=str(path))
        text = config.get_text_config()
    except Exception as error:  # transformers' config classes raise any error
        raise MismatchError(
            f"cannot read {file}: {field_of(raw, error)}{first_line(error)}; correct it, or download the model again"
        ) from None
    if not isinstance(text, PreTrainedConfig):
        raise MismatchError(f"{file} has a text part, but {model_type} models have none; download the model again")
    if isinstance(text.dtype, torch.dtype) and not text.dtype.is_floating_point:
        name = str(text.dtype).removeprefix("torch.")
        raise MismatchError(
            f"{file}: dtype: found {name}, expected a type such as bfloat16; correct it, or download the model again"
        )
    return config
