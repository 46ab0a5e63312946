"""Machines and models by name: vendors' figures (`recipes/machines`) and published configs (`recipes/models`)."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moetool.base import assets, config
from moetool.base.bounded_read import parse_toml, read_toml
from moetool.base.config import POSITIVE, Span, require_within
from moetool.base.errors import UsageError, unknown_name
from moetool.base.types import ModelSpec

_MATRICES = 3  # of an expert: gate, up and down


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedMachine:
    """A machine of `recipes/machines`, with vendors' figures.

    Attributes:
        gpus: GPUs per node; 0: none.
        memory_bytes, memory_bytes_s: size and bandwidth of a GPU's memory.
        half_flops: float16 operations per second of a GPU, without sparsity.
        host_bytes_s: rate to a GPU from host memory, or from disk if the GPU shares host memory; one way.
        gpu_link_bytes_s: rate of a GPU's link to others in its node, one way; 0: none.
        node_link_bytes_s: total rate of a node's links to another, one way; 0: none.
        host_memory_bytes, host_memory_bytes_s: size and bandwidth of host memory; 0: not stated.
        host_flops: operations per second of the host's cores, in the data type of prompts; 0: not stated.
        disk_bytes_s: rate of sequential reads from the disk; 0: not stated.

    Raises:
        UsageError: a figure is impossible.
    """

    name: str
    gpus: int = 1
    memory_bytes: float = 0.0
    memory_bytes_s: float = 0.0
    half_flops: float = 0.0
    host_bytes_s: float = 0.0
    gpu_link_bytes_s: float = 0.0
    node_link_bytes_s: float = 0.0
    host_memory_bytes: float = 0.0
    host_memory_bytes_s: float = 0.0
    host_flops: float = 0.0
    disk_bytes_s: float = 0.0

    def __post_init__(self) -> None:
        gpu = ("memory_bytes", "memory_bytes_s", "half_flops", "host_bytes_s")
        host = ("host_memory_bytes", "host_memory_bytes_s", "host_flops", "disk_bytes_s")
        require_within(self, f"machine {self.name}: ", gpus=Span(0))
        require_within(self, f"machine {self.name}: ", **dict.fromkeys(gpu if self.gpus else host, POSITIVE))
        require_within(self, f"machine {self.name}: ", gpu_link_bytes_s=Span(0), node_link_bytes_s=Span(0))
        require_within(self, f"machine {self.name}: ", **dict.fromkeys((*gpu, *host), Span(0)))

    def linked(self, links: float) -> "NamedMachine":
        """Return this machine with the rates of all links multiplied by `links`."""
        rates = ("host_bytes_s", "gpu_link_bytes_s", "node_link_bytes_s")
        return replace(self, **{name: links * getattr(self, name) for name in rates})


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedModel:
    """A model of `recipes/models`, by its published config.

    Attributes:
        experts, top_k: experts per layer and per token.
        hidden, expert_width: width of the residual stream and of an expert's inner layer.
        value_bytes: bytes per expert weight, scales included.
        dense_parameters: parameters of a layer without its routed experts: attention, router, shared experts.
        shared_parameters: those of shared experts, which `dense_parameters` include.
        dense_value_bytes: bytes per dense parameter.

    Raises:
        UsageError: a size is impossible.
    """

    name: str
    layers: int
    experts: int
    top_k: int
    hidden: int
    expert_width: int
    value_bytes: float = 2.0
    dense_parameters: int
    shared_parameters: int = 0
    dense_value_bytes: float = 2.0

    def __post_init__(self) -> None:
        whole = ("layers", "experts", "top_k", "hidden", "expert_width", "dense_parameters")
        require_within(self, f"model {self.name}: ", **dict.fromkeys(whole, Span(1)))
        require_within(self, f"model {self.name}: ", shared_parameters=Span(0, self.dense_parameters))
        require_within(self, f"model {self.name}: ", value_bytes=POSITIVE, dense_value_bytes=POSITIVE)

    @property
    def expert_parameters(self) -> int:
        return _MATRICES * self.hidden * self.expert_width

    @property
    def expert_bytes(self) -> int:
        return round(self.expert_parameters * self.value_bytes)

    @property
    def dense_bytes(self) -> int:
        """Bytes of a layer without its routed experts."""
        return round(self.dense_parameters * self.dense_value_bytes)

    def spec(self) -> ModelSpec:
        """The spec, for policies and predictors."""
        return ModelSpec(
            name=self.name,
            revision="",
            layer_ids_L=tuple(range(self.layers)),
            num_experts_L=(self.experts,) * self.layers,
            top_k_L=(self.top_k,) * self.layers,
            has_logits_L=(True,) * self.layers,
            num_shared_experts=0,
            num_groups=1,
            hidden_size=self.hidden,
            expert_bytes_L=(self.expert_bytes,) * self.layers,
            score_function="softmax",
            renormalize=True,
        )


def recipe_names(kind: str) -> list[str]:
    """Names of the recipes of a kind: `machines`, `models` or `papers`."""
    return sorted(path.stem for path in assets.path("recipes", kind).glob("*.toml"))


def read_named_machine(name: str) -> NamedMachine:
    """Read a machine by name, or from a TOML file. Raises: UsageError: it is unknown, or a figure is impossible."""
    if name.endswith(".toml"):
        try:
            values = read_toml(Path(name))
        except (OSError, ValueError) as error:
            raise UsageError(f"cannot read the machine {name}: {error}") from None
    else:
        values = read_recipe("machine", name)
    return config.parse(NamedMachine, values, f"machine {name}")


def read_recipe(kind: str, name: str) -> dict[str, Any]:
    """Values of a recipe of a kind, `machine` or `model`, by its name. Raises: UsageError: it is unknown."""
    known = recipe_names(f"{kind}s")
    if name not in known:
        raise unknown_name(kind, name, known)
    path: Path = assets.path("recipes", f"{kind}s", f"{name}.toml")
    return parse_toml(path.read_text(encoding="utf-8"))


def read_named_model(name: str) -> NamedModel:
    """Read a model by name. Raises: UsageError: it is unknown."""
    return config.parse(NamedModel, read_recipe("model", name), f"model {name}")
