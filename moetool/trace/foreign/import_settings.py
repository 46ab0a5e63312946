"""Facts about a model from `--set`, which foreign files lack."""

import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

from moetool.base.errors import UsageError
from moetool.base.types import ModelSpec
from moetool.trace.expert_counts import MANIFEST, open_workload
from moetool.trace.foreign.model_facts import MOST_EXPERTS, GivenFacts, ModelFacts, some_layers

_MOST = {
    "num_hidden_layers": 10_000,
    "num_experts": MOST_EXPERTS,
    "top_k": MOST_EXPERTS,
    "expert_bytes": 1 << 50,
    "hidden_size": 1 << 20,
}


FindModel = Callable[[str], tuple[ModelSpec, int | None]]
"""Returns the spec of a local model, and its number of layers, if known; of the engine, since it reads checkpoints."""


def no_model(name: str) -> tuple[ModelSpec, int | None]:
    """Find no model. Raises: UsageError."""
    raise UsageError(f"no trace at {name!r}: give a trace directory of the model")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(GivenFacts):
    """Values of `--set` for an import.

    Attributes:
        model: `reference`, a model's folder (config.json is enough), or a trace of it. It must agree with the files;
            the trace then belongs to that model. With `moe_layers`, files hold these layers of it only.
        task: task of files that do not name it.
        moe_layers: the layers with experts, such as 1..26 or 1,3,5.
        drop_tokens: leave out token ids, which reveal the text.

    Raises:
        UsageError: a number is out of range, or two settings give the same fact.
    """

    model: str | None = None
    task: str | None = None
    moe_layers: str | int | None = None
    drop_tokens: bool = False

    def __post_init__(self) -> None:
        for name, most in _MOST.items():
            if (value := getattr(self, name)) is not None and not 1 <= value <= most:
                raise UsageError(f"--set {name}: found {value}, expected a whole number above 0, at most {most:,}")
        if self.first_k_dense is not None and self.first_k_dense < 0:
            raise UsageError(f"--set first_k_dense: found {self.first_k_dense}, expected a whole number, 0 or more")
        if self.first_k_dense is not None and self.moe_layers is not None:
            raise UsageError("--set first_k_dense and moe_layers both name the layers with experts; give one")
        shape = ("name", "first_k_dense", "num_experts", "top_k", "expert_bytes", "hidden_size")
        if self.model is not None and (twice := [name for name in shape if getattr(self, name) is not None]):
            raise UsageError(f"--set model already gives {twice[0]}; leave out --set {twice[0]}")

    def facts(self, find_model: FindModel) -> ModelFacts:
        """Return the facts, with the model's spec instead of its path."""
        if self.model is not None:
            if (Path(self.model) / MANIFEST).is_file():
                spec, num_hidden_layers = open_workload(Path(self.model)).spec, None
            else:
                spec, num_hidden_layers = find_model(self.model)
            if self.moe_layers is not None:
                num_hidden_layers = num_hidden_layers or spec.layer_ids_L[-1] + 1
                spec = some_layers(spec, _layers(str(self.moe_layers)))
            return ModelFacts(spec=spec, num_hidden_layers=self.num_hidden_layers or num_hidden_layers)
        layers = None if self.moe_layers is None else _layers(str(self.moe_layers))
        return ModelFacts(moe_layers=layers, **{one.name: getattr(self, one.name) for one in fields(GivenFacts)})


def _layers(text: str) -> tuple[int, ...]:
    """Parse layers such as `1..26` or `1,3,5`."""
    if match := re.fullmatch(r"(\d{1,6})\s*\.\.\s*(\d{1,6})", text.strip()):
        layers = tuple(range(int(match[1]), int(match[2]) + 1))
    elif re.fullmatch(r"\d{1,6}(\s*,\s*\d{1,6})*", text.strip()):
        layers = tuple(sorted({int(part) for part in text.split(",")}))
    else:
        layers = ()
    if not layers:
        raise UsageError(f"--set moe_layers: found {text!r}, expected layers such as 1..26 or 1,3,5")
    return layers
