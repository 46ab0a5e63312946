"""What a model is: from a name or a folder to its config, its MoE layers and a `ModelSpec`."""

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moetool import assets
from moetool.errors import MismatchError, MoetoolError, UsageError, first_line
from moetool.types import ModelSpec

REFERENCE = "reference"

# How each family's router turns logits into scores; what is not here is softmax.
_SIGMOID_FAMILIES = frozenset(
    {
        *("afmoe", "bailing_hybrid", "deepseek_v3", "deepseek_v32", "dots1", "exaone_moe", "flint", "glm4_moe"),
        *("glm4_moe_lite", "hy_v3", "kimi_linear", "laguna", "lfm2_moe", "mimo_v2_flash", "minimax_m2"),
        *("nemotron_h", "solar_open"),
    }
)
# Families whose config has no norm_topk_prob and whose weights sum to one all the same.
_RENORMALIZED_FAMILIES = frozenset({"granitemoe", "granitemoeshared", "minimax", "minimax_m2", "mixtral"})


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeLayer:
    """One MoE layer of a model in memory.

    Attributes:
        index: 0..L-1.
        layer_id: absolute index among the model's layers.
        experts: the module that holds the experts; called with hidden states, indices and weights.
        router: the module that returns the logits, as `_can_record_outputs` names it.
        path: the experts' name in the model, such as `model.layers.0.mlp.experts`.
    """

    index: int
    layer_id: int
    experts: Any
    router: Any
    path: str


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
        UsageError: transformers does not know the family, or the config is damaged.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except (ValueError, OSError, KeyError) as error:
        raise UsageError(f"cannot read {path}/config.json: {first_line(error)}") from None
    return config.get_text_config()


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
    recorders = getattr(model, "_can_record_outputs", None) or {}
    router_class = getattr(recorders.get("router_logits"), "target_class", None)
    found = []
    modules = dict(model.named_modules())
    for path, module in modules.items():
        match = re.search(r"\.(\d+)\.", path)
        if not (hasattr(module, "_is_expert_parallel") and match):
            continue  # not a class that transformers' experts interface decorates
        siblings = modules[path.rpartition(".")[0]].modules()
        router = next((m for m in siblings if router_class is not None and isinstance(m, router_class)), None)
        if router is None:
            continue
        found.append((int(match.group(1)), module, router, path))
    if not found:
        raise UsageError(
            f"{type(model).__name__} has no MoE layers that moetool can hook: expected a mixture-of-experts model "
            "whose experts use transformers' experts interface (qwen3_moe, mixtral, olmoe, deepseek_v2, ...)"
        )
    found.sort(key=lambda item: item[0])
    return [
        MoeLayer(index=i, layer_id=layer, experts=experts, router=router, path=path)
        for i, (layer, experts, router, path) in enumerate(found)
    ]


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
        UsageError: it is no MoE model that moetool can hook.
    """
    config = read_config(path)
    model = empty_model(config, checkpoint_dtype(config))
    layers = moe_layers(model)
    family = config.model_type
    top_k = getattr(config, "num_experts_per_tok", None) or getattr(config, "num_experts_per_token", None)
    if not isinstance(top_k, int):
        raise MoetoolError(f"{path}/config.json does not say how many experts a token uses (num_experts_per_tok)")
    element = checkpoint_dtype(config).itemsize
    sizes = tuple(
        sum(p.numel() // int(layer.experts.num_experts) for p in layer.experts.parameters()) * element
        for layer in layers
    )
    return ModelSpec(
        name=f"{family}:{path.name}",
        revision=revision(path) if weights else hashlib.sha256((path / "config.json").read_bytes()).hexdigest(),
        layer_ids_L=tuple(layer.layer_id for layer in layers),
        num_experts_L=tuple(int(layer.experts.num_experts) for layer in layers),
        top_k_L=(top_k,) * len(layers),
        has_logits_L=(True,) * len(layers),
        num_shared_experts=int(getattr(config, "n_shared_experts", 0) or 0),
        num_groups=int(getattr(config, "n_group", 1) or 1),
        hidden_size=int(config.hidden_size),
        expert_bytes_L=sizes,
        score_function="sigmoid" if family in _SIGMOID_FAMILIES else "softmax",
        renormalize=bool(getattr(config, "norm_topk_prob", family in _RENORMALIZED_FAMILIES)),
    )


def dense_bytes(path: Path, dtype: torch.dtype) -> int:
    """Bytes of everything but the routed experts, in memory as `dtype`."""
    model = empty_model(read_config(path), dtype)
    expert_parameters = {id(p) for layer in moe_layers(model) for p in layer.experts.parameters()}
    return sum(p.numel() for p in model.parameters() if id(p) not in expert_parameters) * dtype.itemsize


def checkpoint_dtype(config: Any) -> torch.dtype:
    """The data type of a model's weights on disk, by its config."""
    dtype = getattr(config, "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else torch.bfloat16
