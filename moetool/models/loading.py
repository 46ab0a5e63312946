"""Bringing a model into memory: whole, or without its routed experts."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from moetool.errors import MismatchError, UsageError, first_line
from moetool.models.expert_files import ExpertFiles, Shards
from moetool.models.spec import MoeLayer, empty_model, moe_layers, read_config, read_spec
from moetool.types import ForwardInfo, ModelSpec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ExpertPool(Protocol):
    """What runs the experts of a model that does not have them in memory."""

    def begin_forward(self, info: ForwardInfo) -> None: ...
    def end_forward(self) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model ready to run.

    Attributes:
        model: transformers' own model object.
        layers: its MoE layers, in order.
        files: reads its experts; None where the experts are in memory.
        pool: computes its experts where they are not; it must hear of every forward.
    """

    path: Path
    spec: ModelSpec
    model: Any
    layers: list[MoeLayer]
    files: ExpertFiles | None
    pool: "ExpertPool | None" = None

    def begin_forward(self, info: ForwardInfo) -> None:
        """Announce a forward that is about to run."""
        if self.pool is not None:
            self.pool.begin_forward(info)

    def end_forward(self) -> None:
        """The forward is over, complete or not."""
        if self.pool is not None:
            self.pool.end_forward()

    def close(self) -> None:
        """End the pool's threads and close the files."""
        if self.pool is not None:
            self.pool.close()
        if self.files is not None:
            self.files.shards.close()


def parse_dtype(name: str) -> torch.dtype:
    """Raises: UsageError for a name that is no supported data type."""
    if name not in DTYPES:
        raise UsageError(f"unknown dtype {name!r}: known are {', '.join(DTYPES)}")
    return DTYPES[name]


def use_threads(config: Any, threads: int = 0) -> int:
    """Set how many threads torch computes with; gives their number.

    Args:
        threads: 0 chooses: one for a narrow model, whose products are too small to share out (on two cores two
            threads were slower than one, and ten times slower when something else ran), torch's default otherwise.
    """
    if threads == 0 and config.hidden_size < 1024:
        threads = 1
    if threads:
        torch.set_num_threads(threads)
    return torch.get_num_threads()


def load_tokenizer(path: Path) -> Any:
    """The model's own tokenizer.

    Raises:
        UsageError: the folder has none that transformers can read.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except (ValueError, OSError, KeyError) as error:
        raise UsageError(f"{path} has no tokenizer: {first_line(error)}") from None


def load_full(path: Path, dtype: torch.dtype) -> LoadedModel:
    """The plain model, experts and all, in memory on the CPU."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    spec = read_spec(path)
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, trust_remote_code=False).eval()
    return LoadedModel(path=path, spec=spec, model=model, layers=moe_layers(model), files=None)


def load_lazy(path: Path, dtype: torch.dtype, direct: bool = True) -> LoadedModel:
    """The model with everything but its routed experts in memory on the CPU.

    The experts' parameters stay on the meta device; whoever runs the model puts an experts implementation in
    their place (see `moetool.serving.experts`).

    Args:
        direct: read experts with O_DIRECT where the file system allows.

    Raises:
        MismatchError: the weight files and the config do not belong together.
    """
    from transformers import GenerationConfig

    spec = read_spec(path)
    model = empty_model(read_config(path), dtype)
    layers = moe_layers(model)
    shards = Shards(path, direct=direct)
    files = ExpertFiles(shards, layers, spec)
    experts = {id(p) for layer in layers for p in layer.experts.parameters()}
    for name, parameter in list(model.named_parameters()):
        if id(parameter) not in experts:
            _fill(model, name, parameter, shards, dtype)
    model.tie_weights()
    _rebuild_buffers(model, shards)
    if (path / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(path)
    return LoadedModel(path=path, spec=spec, model=model, layers=layers, files=files)


def _fill(model: Any, name: str, parameter: nn.Parameter, shards: Shards, dtype: torch.dtype) -> None:
    if name not in shards.tensors:
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            return  # tie_weights points it at the embedding
        raise MismatchError(
            f"{name} is missing from the weight files, or they name it otherwise; cannot load this layout"
        )
    tensor = shards.load(name)
    if tensor.shape != parameter.shape:
        raise MismatchError(f"{name} has shape {list(tensor.shape)}, expected {list(parameter.shape)} by the config")
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, nn.Parameter(tensor.to(dtype), requires_grad=False))


def _rebuild_buffers(model: Any, shards: Shards) -> None:
    """Give buffers on meta their values: from the files, or, for rotary frequencies, computed as transformers does."""
    for name, buffer in list(model.named_buffers()):
        if not buffer.is_meta:
            continue
        owner_name, _, leaf = name.rpartition(".")
        owner = model.get_submodule(owner_name)
        stored = name in shards.tensors
        value = shards.load(name) if stored else torch.empty_like(buffer, device="cpu")
        owner.register_buffer(leaf, value, persistent=stored)
        if not stored and "RotaryEmbedding" not in type(owner).__name__:
            raise MismatchError(
                f"{name} is missing from the weight files and cannot be computed; cannot load this layout"
            )
    with torch.no_grad():
        for module in model.modules():
            if "RotaryEmbedding" in type(module).__name__:
                model._init_weights(module)
