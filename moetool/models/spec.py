"""What a model is: from a name or a folder to its config, its MoE layers and a `ModelSpec`."""

import hashlib
import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moetool import assets
from moetool.errors import MismatchError, UsageError, first_line
from moetool.models import families
from moetool.models.expert_form import ExpertForm, form_of, holds_experts
from moetool.models.packed import PACKED, SHAPE
from moetool.models.packing import Packing, packing_of
from moetool.types import ModelSpec

REFERENCE = "reference"
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeLayer:
    """One MoE layer of a model in memory.

    Attributes:
        index: 0..L-1.
        layer_id: absolute index among the model's layers.
        experts: the module that holds the experts; called with hidden states, indices and weights.
        router: the module that returns the logits, as `_can_record_outputs` names it.
        logits_index: place of the logits in what the router returns.
        path: the experts' name in the model, such as `model.layers.0.mlp.experts`.
        top_k: experts that a token uses.
        form: what one expert is made of.
    """

    index: int
    layer_id: int
    experts: Any
    router: Any
    logits_index: int
    path: str
    top_k: int
    form: ExpertForm

    @property
    def num_experts(self) -> int:
        """Experts that the router chooses among."""
        return self.form.num_experts + self.form.num_identity


def locate(model: str) -> Path:
    """The folder of a model: `reference`, a local path, or a name on the Hugging Face hub.

    Effects: a hub name is downloaded to the hub's own cache, unless HF_HUB_OFFLINE is set.

    Raises:
        UsageError: there is no such model, or the folder is not one.
    """
    if model == REFERENCE:
        return assets.path("data", "reference-moe")
    path = Path(model)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UsageError(f"{path} is not a model: it has no config.json; give a folder in Hugging Face format")
        return path
    if path.exists() or model.startswith((".", "~", "/")) or not re.fullmatch(r"[\w.-]+/[\w.-]+", model):
        raise UsageError(f"no model at {model!r}: give {REFERENCE!r}, a local folder, or a hub name like org/model")
    from huggingface_hub import snapshot_download

    try:
        patterns = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
        return Path(snapshot_download(model, allow_patterns=patterns))
    except Exception as error:  # the hub raises a dozen kinds, and each means that the model cannot be had
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UsageError(
            f"cannot get {model!r} from the hub ({reason}); give a local folder or {REFERENCE!r}"
        ) from None


def read_config(path: Path) -> Any:
    """The text config of the model in `path`.

    Raises:
        UsageError: transformers does not know the family, it needs code of its own, or the config is damaged.
    """
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    file = path / "config.json"
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
        model_type = str(raw.get("model_type", ""))
        families.require_supported(model_type)
        if raw.get("auto_map") and model_type not in CONFIG_MAPPING:
            raise UsageError(
                f"{file} asks for code of its own (auto_map) for the family {model_type!r}, which transformers does "
                "not know; moetool never runs the code of a checkpoint; 'moetool models' lists what it reads"
            )
        packing_of(raw, path)
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except (ValueError, OSError, KeyError, AttributeError) as error:
        raise UsageError(f"cannot read {file}: {first_line(error)}") from None
    config = config.get_text_config()
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the model is built unpacked, whatever its files hold
    return config


def read_packing(path: Path) -> Packing | None:
    """How the weights of a checkpoint are packed; None where they are not."""
    return packing_of(json.loads((path / "config.json").read_text(encoding="utf-8")), path)


def empty_model(config: Any, dtype: torch.dtype) -> Any:
    """The model with every tensor on the meta device: its modules and shapes, no memory."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def moe_layers(model: Any) -> list[MoeLayer]:
    """The MoE layers of a model, in order.

    Raises:
        UsageError: it has none that moetool can hook.
    """
    model_type = model.config.get_text_config().model_type
    families.require_supported(model_type)
    routers = _router_classes(model, families.FAMILIES.get(model_type))
    found = []
    modules = dict(model.named_modules())
    for path, module in modules.items():
        match = re.search(r"\.(\d+)\.", path)
        if not (holds_experts(module) and match):
            continue
        parent = modules[path.rpartition(".")[0]]
        router = next((m for m in (*module.modules(), *parent.modules()) if type(m).__name__ in routers), None)
        if router is not None:
            found.append((int(match.group(1)), path, module, router, _top_k(model, parent, router)))
    if not found:
        raise UsageError(
            f"{type(model).__name__} has no MoE layers that moetool can hook: expected a mixture-of-experts model "
            "of a family that 'moetool models' lists (qwen3_moe, mixtral, olmoe, deepseek_v2, ...)"
        )
    found.sort(key=lambda item: item[0])
    return [
        MoeLayer(
            index=i,
            layer_id=layer,
            experts=experts,
            router=router,
            logits_index=routers[type(router).__name__],
            path=path,
            top_k=top_k,
            form=form_of(experts),
        )
        for i, (layer, path, experts, router, top_k) in enumerate(found)
    ]


def _router_classes(model: Any, family: families.Family | None) -> dict[str, int]:
    """Names of the classes that route, with the place of the logits in their output."""
    classes = dict.fromkeys(family.routers, 0) if family is not None else {}
    for module in model.modules():
        recorders = (getattr(module, "_can_record_outputs", None) or {}).get("router_logits", [])
        for recorder in recorders if isinstance(recorders, list) else [recorders]:
            classes[recorder.target_class.__name__] = recorder.index
    return classes


def _top_k(model: Any, parent: Any, router: Any) -> int:
    top_k = getattr(router, "top_k", None) or getattr(parent, "top_k", None)
    return int(top_k or model.config.get_text_config().top_k_experts)  # gemma4 keeps it on the config only


def revision(path: Path) -> str:
    """What tells this checkpoint from every other one.

    sha256 over the config, the header of each weight file and 32 blocks of its bytes, evenly spread: a fine-tune of
    the same shapes differs in them, and 60 GB are not read.
    """
    digest = hashlib.sha256((path / "config.json").read_bytes())
    for file in weight_files(path):
        header, base = read_header(file)
        digest.update(json.dumps(header, sort_keys=True).encode())
        size = file.stat().st_size
        with file.open("rb") as stream:
            for i in range(32):
                stream.seek(base + (size - base) * i // 32)
                digest.update(stream.read(4096))
    return digest.hexdigest()


def read_header(file: Path) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file, and the offset where its data begin.

    Raises:
        MismatchError: it is no safetensors file.
    """
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if 8 + length > size:
                raise ValueError(f"its header would be {length:,} bytes long, and the file has {size:,}")
            header = json.loads(stream.read(length))
    except (ValueError, UnicodeDecodeError) as error:
        raise MismatchError(f"{file} is not a safetensors file ({error}); download the model again") from None
    return header, 8 + length


def weight_files(path: Path) -> list[Path]:
    """The safetensors shards of a model.

    Raises:
        UsageError: there are none, or the index names one that is missing.
    """
    index = path / "model.safetensors.index.json"
    if index.is_file():
        shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        files = [path / name for name in shards]
    else:
        files = sorted(path.glob("*.safetensors"))
    if not files:
        raise UsageError(f"{path} holds no .safetensors weights; moetool reads no other format")
    for file in files:
        if not file.is_file():
            raise UsageError(f"{file} is missing, though {index.name} names it; download the model again")
    return files


def read_spec(path: Path, weights: bool = True) -> ModelSpec:
    """The ModelSpec of the model in `path`, without loading its weights.

    Args:
        weights: whether they are there; without them the revision tells the config alone from others.

    Raises:
        UsageError: it is no MoE model of a family that moetool knows.
    """
    config = read_config(path)
    declared = config_dtype(config)  # the empty model overwrites it
    model = empty_model(config, torch.float32)
    layers = moe_layers(model)
    dtype = checkpoint_dtype(path) if weights else declared
    found = revision(path) if weights else hashlib.sha256((path / "config.json").read_bytes()).hexdigest()
    packed = packed_expert_bytes(path, layers) if weights and read_packing(path) else None
    return spec_of(model, layers, dtype, name=path.name, revision=found, expert_bytes_L=packed)


def spec_of(
    model: Any,
    layers: list[MoeLayer],
    dtype: torch.dtype,
    *,
    name: str,
    revision: str,
    expert_bytes_L: tuple[int, ...] | None = None,
) -> ModelSpec:
    """The ModelSpec of a model, empty or not.

    Args:
        layers: its MoE layers.
        dtype: data type of the experts in the checkpoint.
        name: of the checkpoint, for people.
        expert_bytes_L: of an expert in the checkpoint, where it has another form than `dtype`.

    Raises: UsageError where moetool does not know its family.
    """
    config = model.config.get_text_config()
    family = families.find(config.model_type)
    rule = family.rule(config, layers[0].router)
    return ModelSpec(
        name=f"{family.name}:{name}",
        revision=revision,
        layer_ids_L=tuple(layer.layer_id for layer in layers),
        num_experts_L=tuple(layer.num_experts for layer in layers),
        top_k_L=tuple(layer.top_k for layer in layers),
        has_logits_L=(True,) * len(layers),
        num_shared_experts=_num_shared_experts(model, config),
        num_groups=int(getattr(config, "n_group", 1) or 1),
        hidden_size=int(config.hidden_size),
        expert_bytes_L=expert_bytes_L or tuple(layer.form.num_elements * dtype.itemsize for layer in layers),
        score_function=rule.score,
        renormalize=rule.renormalize,
    )


def packed_expert_bytes(path: Path, layers: list[MoeLayer]) -> tuple[int, ...] | None:
    """Bytes of an expert of each layer in files that pack their weights; None where the experts are not packed."""
    sizes: Counter[int] = Counter()
    packed = False
    for header in (read_header(file)[0] for file in weight_files(path)):
        for name, entry in header.items():
            match = re.search(r"\.(\d+)\..*\.experts\.\d+\.", name)
            if match and not name.endswith(SHAPE):
                packed = packed or name.endswith(PACKED)
                sizes[int(match[1])] += entry["data_offsets"][1] - entry["data_offsets"][0]
    return tuple(sizes[layer.layer_id] // layer.form.num_experts for layer in layers) if packed else None


def offloaded(layers: list[MoeLayer]) -> set[str]:
    """Names of the parameters that routed experts are made of; all others stay in memory."""
    return {f"{layer.path}.{name}" for layer in layers for name in layer.form.parameters}


def dense_bytes(path: Path, dtype: torch.dtype) -> int:
    """Bytes of everything but the routed experts, in memory as `dtype`.

    Where experts are packed, this includes what one takes while it is computed: unpacked, and once more on the way.
    """
    model = empty_model(read_config(path), dtype)
    layers = moe_layers(model)
    experts = offloaded(layers)
    scratch = layers[0].form.num_elements * (dtype.itemsize + 4) if read_packing(path) else 0
    return sum(p.numel() for name, p in model.named_parameters() if name not in experts) * dtype.itemsize + scratch


def config_dtype(config: Any) -> torch.dtype:
    """The data type of a model's weights on disk, by its config."""
    dtype = getattr(config, "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else torch.bfloat16


def checkpoint_dtype(path: Path) -> torch.dtype:
    """The data type of the experts in the weight files: the one that most of their bytes have.

    Of packed experts it is that of their scales and of the weights that are not packed.
    """
    sizes: Counter[str] = Counter()
    for header in (read_header(file)[0] for file in weight_files(path)):
        for name, entry in header.items():
            if "data_offsets" in entry and not name.endswith(PACKED):  # nor the metadata; packed are not numbers
                sizes[entry["dtype"]] += entry["data_offsets"][1] - entry["data_offsets"][0]
    found = max(sizes, key=sizes.__getitem__, default="nothing")
    if found not in _DTYPES:
        raise MismatchError(f"the weights in {path} are stored as {found}, expected one of {', '.join(_DTYPES)}")
    return _DTYPES[found]


def _num_shared_experts(model: Any, config: Any) -> int:
    for name in ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert"):
        if isinstance(number := getattr(config, name, None), int):
            return number
    return int(
        any(path.endswith(("shared_expert", "shared_experts", "shared_mlp")) for path, _ in model.named_modules())
    )
