"""Weight formats of a checkpoint from its config, and its stored weights."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moetool.base.errors import UsageError
from moetool.base.json_files import read_json
from moetool.models.files.tensor_index import Tensor
from moetool.models.weights.awq import Awq
from moetool.models.weights.format import StoredWeight, UnclaimedTensors, WeightFormat, as_dense
from moetool.models.weights.fp8_block import Fp8Block
from moetool.models.weights.gptq import Gptq
from moetool.models.weights.mxfp4 import GROUP, Mxfp4Blocks, Mxfp4Packed
from moetool.models.weights.nvfp4 import Nvfp4
from moetool.models.weights.pack_quantized import PackQuantized
from moetool.models.weights.packed import BITS
from moetool.models.weights.scaled import Scaled

METHODS = ("fp8", "mxfp4", "gptq", "awq", "auto-round", "compressed-tensors", "fbgemm_fp8", "modelopt")
"""Supported values of `quant_method`."""
_AUTO_ROUND_GPTQ = {
    "auto_round:auto_gptq": "gptq",
    "auto_round:gptq": "gptq",
    "auto_round": "gptq_v2",
    "auto_round:gptqmodel": "gptq_v2",
}
"""AutoRound's packings of integers, and the GPTQ version with the same zero points."""
_ENTRIES = ("quantization_config", "compression_config")
_MODELOPT = "hf_quant_config.json"
"""Older releases of ModelOpt describe the weights here alone."""
_QUANTIZED = ("F8_E4M3", "F8_E5M2", "F8_E8M0", "U8", "I8", "I32")
_PARTS = (".weight_scale", ".weight_zero_point", ".weight_shape", ".weight_global_scale", ".scales", ".g_idx")


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """Modules that share a weight format.

    Attributes:
        names: module names; `re:` begins a pattern; a class name such as `Linear` stands for all its modules.
        format: None: not quantized.
    """

    names: tuple[str, ...]
    format: WeightFormat | None

    def rank(self, module: str) -> int:
        """Specificity of the targets for a module: 0 none, 1 class, 2 pattern, 3 name."""
        if module in self.names:
            return 3
        if any(name.startswith("re:") and re.match(name[3:], module) for name in self.names):
            return 2
        return int(any(re.fullmatch(r"[A-Z]\w*", name) for name in self.names))


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """The weight formats of a checkpoint.

    Attributes:
        method: the config's `quant_method`.
        groups: targets with their formats.
        ignore: names or patterns of modules that are not quantized.
    """

    method: str
    groups: tuple[Targets, ...]
    ignore: tuple[str, ...] = ()

    @property
    def formats(self) -> tuple[WeightFormat, ...]:
        """All formats, each once."""
        return tuple(dict.fromkeys(group.format for group in self.groups if group.format is not None))

    def format_of(self, module: str) -> WeightFormat | None:
        """The format of a module by the config; None if it is not quantized."""
        if Targets(names=self.ignore, format=None).rank(module) > 1:
            return None
        ranked = [(group.rank(module), group.format) for group in self.groups]
        best = max((rank for rank, _ in ranked), default=0)
        return next((format for rank, format in ranked if rank == best and rank), None)

    def claim(
        self, tensors: Mapping[str, Tensor], files: Sequence[Path], read: Callable[[Tensor], bytes]
    ) -> dict[str, StoredWeight]:
        """Find the weights made from a checkpoint's tensors, dense ones included, by name.

        Its tensors, not the config, decide whether a module is quantized.

        Args:
            files: the files that `Tensor.file` indexes.
            read: returns the bytes of a small tensor.

        Raises:
            MismatchError: tensors are missing, contradict one another or the config.
            UsageError: their storage format is not supported.
        """
        unclaimed = UnclaimedTensors(dict(tensors), files, read)
        found: dict[str, StoredWeight] = {}
        for name in unclaimed:
            tensor = unclaimed.get(name)
            if tensor is None:
                continue
            if name.endswith(".weight_g_idx"):
                raise UsageError(
                    f"{files[tensor.file]} orders the groups of a weight by activation ({name}), which moetool does "
                    "not support; use the unquantized model"
                )
            for format in self._candidates(name):
                weight = format.weight_of(name)
                made = format.claim(weight, unclaimed) if weight is not None else None
                if made is not None:
                    found[made.name] = made
                    break
        for name in unclaimed:
            tensor = unclaimed.take(name)
            assert tensor is not None
            if name.endswith(_PARTS):
                raise unclaimed.error(name, tensor, "belongs to a weight whose values are missing")
            if tensor.dtype in _QUANTIZED and name.endswith("weight") and len(tensor.shape) > 1:
                raise unclaimed.error(
                    name, tensor, f"is stored as {tensor.dtype} without scales, expected a scale tensor"
                )
            found[name] = as_dense(name, tensor)
        return found

    def _candidates(self, tensor: str) -> list[WeightFormat]:
        """The formats that may claim a tensor, the config's own for it first."""
        marked = [format for format in self.formats if format.weight_of(tensor) is not None]
        if len(marked) < 2:
            return marked
        weight = marked[0].weight_of(tensor)
        assert weight is not None
        own = self.format_of(weight.removesuffix(".weight"))
        return sorted(marked, key=lambda format: format != own)


def quantization_of(config: Mapping[str, Any], path: Path) -> Quantization | None:
    """Quantization of a checkpoint from its config.json, or ModelOpt's hf_quant_config.json; None if there is none.

    Raises:
        UsageError: its quantization is not supported, or a value is of the wrong kind.
        MismatchError: hf_quant_config.json is damaged.
    """
    where = "quantization_config in config.json"
    try:
        if (file := path / _MODELOPT).is_file() and not any(config.get(key) for key in _ENTRIES):
            where = f"quantization in {_MODELOPT}"
            own = read_json(file, advice="download the model again").get("quantization")
            config = {**config, _ENTRIES[0]: {"quant_method": "modelopt", **own}} if own else config
        found = _quantization_of(config, path)
        for names in () if found is None else (found.ignore, *(group.names for group in found.groups)):
            for name in names:
                re.compile(name.removeprefix("re:") if name.startswith("re:") else "")
        return found
    except (TypeError, ValueError, AttributeError, LookupError, re.error) as error:
        raise UsageError(
            f"{path}: a value of {where} is of the wrong kind ({error}); download the model again"
        ) from None


def _quantization_of(config: Mapping[str, Any], path: Path) -> Quantization | None:
    text = config.get("text_config")
    inner = text if isinstance(text, Mapping) else {}
    found = next((c[key] for c in (config, inner) for key in _ENTRIES if c.get(key)), None)
    if found is None:
        return None
    if not isinstance(found, Mapping):
        raise UsageError(f"{path}: quantization_config is {type(found).__name__}, expected an object")
    method = str(found.get("quant_method"))
    if method not in METHODS:
        raise UsageError(
            f"{path} is quantized ({method}); moetool reads float32, float16, bfloat16 and the methods "
            f"{', '.join(METHODS)}; use the unquantized model"
        )
    ignore = tuple(map(str, found.get("modules_to_not_convert") or ()))
    if method == "modelopt":
        ignore = tuple(map(str, found.get("ignore") or found.get("exclude_modules") or ()))
    if method == "compressed-tensors":
        return _compressed_tensors(found, path)
    groups = {
        "fp8": lambda: [Targets(names=("Linear",), format=Fp8Block(_block(found.get("weight_block_size"), path)))],
        "mxfp4": lambda: [Targets(names=("Linear",), format=Mxfp4Blocks())],
        "fbgemm_fp8": lambda: [Targets(names=("Linear",), format=Scaled("channel"))],
        "gptq": lambda: _gptq(found, path),
        "awq": lambda: [_awq(found, path)],
        "auto-round": lambda: _auto_round(found, path),
        "modelopt": lambda: _modelopt(found, path),
    }[method]()
    if method == "fp8" and "fp4" in (c.get("expert_dtype") for c in (found, config, inner)):
        experts = Fp8Block(_block(found.get("weight_block_size"), path), four_bits=True)
        groups.append(Targets(names=(r"re:.*\.experts\.\d+\.",), format=experts))
    patterns = tuple("re:.*" + ".*".join(map(re.escape, name.split("*"))) for name in ignore)
    return Quantization(method=method, groups=tuple(groups), ignore=patterns)


def _block(size: Any, path: Path) -> tuple[int, int] | None:
    if size is None:
        return None
    if not (isinstance(size, Sequence) and len(size) == 2 and all(isinstance(n, int) and n > 0 for n in size)):
        raise UsageError(f"{path}: weight_block_size is {size!r}, expected two positive numbers such as [128, 128]")
    return int(size[0]), int(size[1])


def _gptq(found: Mapping[str, Any], path: Path) -> list[Targets]:
    version = found.get("checkpoint_format", found.get("format", "gptq"))
    if version not in ("gptq", "gptq_v2"):
        raise UsageError(
            f"{path} is quantized by gptq and stored as {version!r}, expected gptq or gptq_v2; use a checkpoint in "
            "one of these"
        )

    def read(values: Mapping[str, Any]) -> Gptq:
        bits, group = values.get("bits"), values.get("group_size", 128)
        if type(bits) is not int or bits not in BITS or type(group) is not int or (group < 1 and group != -1):
            raise UsageError(
                f"{path} is quantized by gptq to {bits!r} bits in groups of {group!r}, expected "
                f"{', '.join(map(str, BITS))} bits, and a positive group_size or -1"
            )
        return Gptq(bits, group, bool(values.get("desc_act")), 0 if version == "gptq_v2" else 1)

    groups = [Targets(names=("Linear",), format=read(found))]
    for pattern, values in (found.get("dynamic") or {}).items():
        sign, _, regex = pattern.partition(":")
        names = (f"re:{regex if regex else sign}",)
        format = None if sign == "-" else read({**found, **values})
        groups.append(Targets(names=names, format=format))
    return groups


def _awq(found: Mapping[str, Any], path: Path) -> Targets:
    bits, group, version = found.get("bits"), found.get("group_size", 128), str(found.get("version", "gemm")).lower()
    if type(bits) is not int or bits != 4 or version != "gemm" or found.get("zero_point") is False:
        raise UsageError(
            f"{path} is quantized by awq to {bits!r} bits ({version}, zero_point {found.get('zero_point', True)}), "
            "expected 4 bits, gemm, with zero points; use a checkpoint in that layout"
        )
    if type(group) is not int or (group < 1 and group != -1):
        raise UsageError(f"{path}: group_size is {group!r}, expected a positive number or -1")
    return Targets(names=("Linear",), format=Awq(group))


def _auto_round(found: Mapping[str, Any], path: Path) -> list[Targets]:
    """Formats that AutoRound packs: those of GPTQ, of AWQ and of compressed-tensors.

    Source: the `packing_format` of auto_round/inference/convert_model.py and backend.py, auto-round 0.16.
    """
    packing = str(found.get("packing_format", "auto_round:auto_gptq"))
    if found.get("rotation_config") or found.get("spinquant_config"):
        raise UsageError(f"{path} also rotates weights, which moetool does not support; use another export")

    def read(values: Mapping[str, Any]) -> WeightFormat | None:
        bits, group, data = values.get("bits"), values.get("group_size", 128), values.get("data_type", "int")
        if isinstance(bits, int) and bits >= 16:
            return None
        if packing in _AUTO_ROUND_GPTQ and data == "int":
            version = _AUTO_ROUND_GPTQ[packing]
            return _gptq({"bits": bits, "group_size": group, "checkpoint_format": version}, path)[0].format
        if packing in ("auto_round:auto_awq", "auto_round:awq") and data == "int":
            return _awq({"bits": bits, "group_size": group}, path).format
        if packing == "auto_round:llm_compressor" and (data, bits, group) == ("mx_fp", 4, GROUP):
            return Mxfp4Packed()
        if packing == "auto_round:llm_compressor" and (data, bits, group) == ("mx_fp", 8, GROUP):
            return Scaled("group", (1, GROUP))
        if packing == "auto_round:llm_compressor" and (data, bits, group) == ("nv_fp", 4, 16):
            return Nvfp4()
        if packing == "auto_round:fp8_static" and (data, bits, group) == ("fp", 8, -1):
            return Scaled("channel")
        raise UsageError(
            f"{path} is quantized by auto-round to {bits!r} bits ({data}, groups of {group!r}) and stored as "
            f"{packing}, which moetool does not support; use another export, such as auto_gptq"
        )

    groups = [Targets(names=("Linear",), format=read(found))]
    for name, values in (found.get("extra_config") or {}).items():
        exact = re.fullmatch(r"\w+(\.\w+)+", name)  # other keys are searched for in the names of layers
        if values:
            groups.append(Targets(names=(name if exact else f"re:.*({name})",), format=read({**found, **values})))
    return groups


def _modelopt(found: Mapping[str, Any], path: Path) -> list[Targets]:
    formats: dict[Any, WeightFormat] = {"NVFP4": Nvfp4(), "W4A16_NVFP4": Nvfp4(), "FP8": Scaled("tensor")}
    mixed = found.get("quantized_layers") or {}
    modules: dict[Any, list[str]] = {values.get("quant_algo"): [] for values in mixed.values()}
    for name, values in mixed.items():
        modules[values.get("quant_algo")].append(name)
    if not mixed or found.get("quant_algo") != "MIXED_PRECISION":
        modules = {found.get("quant_algo"): ["Linear"]}
    if others := sorted(str(algorithm) for algorithm in modules.keys() - formats.keys()):
        raise UsageError(
            f"{path} is quantized by modelopt to {others[0]}, expected {', '.join(formats)} or MIXED_PRECISION of "
            "these; use the unquantized model"
        )
    return [Targets(names=tuple(names), format=formats[algorithm]) for algorithm, names in modules.items()]


def _compressed_tensors(found: Mapping[str, Any], path: Path) -> Quantization:
    for name, what in (("sparsity_config", "removes weights (sparsity)"), ("transform_config", "rotates weights")):
        own = found.get(name) or {}
        if (own and own.get("format", "dense") != "dense") or own.get("config_groups"):
            raise UsageError(
                f"{path} also {what}, by its {name}, which moetool does not support; use the unquantized model"
            )
    form = found.get("format")
    groups = []
    for group in (found.get("config_groups") or {}).values():
        weights = group.get("weights")
        names = tuple(map(str, group.get("targets") or ("Linear",)))
        groups.append(
            Targets(names=names, format=_scheme(weights, group.get("format") or form, path) if weights else None)
        )
    if not any(group.format for group in groups):
        raise UsageError(f"{path}: quantization_config has no config_groups with weights; use the unquantized model")
    return Quantization(
        method="compressed-tensors", groups=tuple(groups), ignore=tuple(map(str, found.get("ignore") or ()))
    )


def _scheme(weights: Mapping[str, Any], form: Any, path: Path) -> WeightFormat:
    """The format of one group of modules."""
    bits, kind, size = weights.get("num_bits"), weights.get("type", "int"), weights.get("group_size")
    symmetric = bool(weights.get("symmetric", True))
    # compressed-tensors derives a missing strategy from the group size.
    strategy = weights.get("strategy") or ("tensor" if size is None else "channel" if size == -1 else "group")
    described = f"{path} is quantized to {bits} bits ({kind}, by {strategy}, {form})"
    if weights.get("actorder") not in (None, False, "weight", "static"):
        raise UsageError(f"{path} orders its groups by activation, which is not supported; use the unquantized model")
    if strategy in ("group", "tensor_group") and not (isinstance(size, int) and size > 0):
        raise UsageError(f"{path} is quantized by group with a group_size of {size}, expected a positive number")
    if form == "pack-quantized":
        if kind != "int" or strategy not in ("group", "channel") or bits not in BITS:
            raise UsageError(
                f"{described}, expected integers of {', '.join(map(str, BITS))} bits by group or channel; use the "
                "unquantized model"
            )
        return PackQuantized(int(bits), int(size) if strategy == "group" and size else 0, symmetric)
    if form == "nvfp4-pack-quantized" and (kind, bits, size) == ("float", 4, 16) and symmetric:
        return Nvfp4()
    if form == "mxfp4-pack-quantized" and (kind, bits, size) == ("float", 4, GROUP) and symmetric:
        return Mxfp4Packed()
    if form in ("float-quantized", "int-quantized", "naive-quantized", "mxfp8-quantized") and bits == 8:
        block = None
        if strategy == "block":
            block = _block(weights.get("block_structure"), path)
        elif strategy == "group" and size:
            block = (1, int(size))
        if strategy in ("tensor", "channel") or block is not None:
            name = "fp8_scaled" if kind == "float" else "int8_scaled"
            return Scaled(strategy, block, symmetric, name)
    raise UsageError(f"{described}, which moetool does not support; use the unquantized model")
