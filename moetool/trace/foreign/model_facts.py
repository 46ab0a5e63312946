"""Facts about a model from the user and from foreign files, combined.

Shape letter of files that have a row for every layer of the model: H hidden layers, with and without experts.
"""

import hashlib
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from moetool.base.errors import MismatchError, UsageError
from moetool.base.types import UNKNOWN_BYTES, ModelSpec

MOST_EXPERTS = 1 << 16
"""Limit of experts per layer: a trace stores an expert's number in 16 bits."""

SAY_LAYERS = "--set model=PATH, first_k_dense=N or moe_layers=1..26"


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenFacts:
    """Facts about a model, given by the user.

    Attributes:
        name: display name of the model.
        num_hidden_layers: number of layers with and without experts.
        first_k_dense: number of first layers without experts; all later layers have experts.
        top_k: experts per token and layer.
        expert_bytes: bytes of one expert.
        hidden_size: width of the residual stream.
    """

    name: str | None = None
    num_hidden_layers: int | None = None
    first_k_dense: int | None = None
    num_experts: int | None = None
    top_k: int | None = None
    expert_bytes: int | None = None
    hidden_size: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts(GivenFacts):
    """Facts about a model that the files lack, given by the user.

    Attributes:
        spec: spec of a local model or trace; it must agree with the files and replaces theirs.
        moe_layers: the layers with experts, if not all layers after `first_k_dense`.
    """

    spec: ModelSpec | None = None
    moe_layers: tuple[int, ...] | None = None

    def layers_of(self, path: object, num_hidden_layers: int) -> tuple[int, ...]:
        """Return the layers with experts of a file that has a row for every layer (default: all).

        Raises:
            MismatchError: the file's layers differ from the given ones.
        """
        if self.spec is not None:
            layers = self.spec.layer_ids_L
        elif self.moe_layers is not None:
            layers = self.moe_layers
        else:
            layers = tuple(range(self.first_k_dense or 0, num_hidden_layers))
        expected = self.num_hidden_layers or max(max(layers, default=0) + 1, num_hidden_layers)
        if not layers or num_hidden_layers != expected or layers[-1] >= num_hidden_layers:
            raise MismatchError(
                f"{path} has {num_hidden_layers} layers, expected {expected}, of which layers {_span(layers)} have "
                f"experts; name the right model with {SAY_LAYERS}"
            )
        return layers

    def said(self, path: object, what: str, *others: str) -> int:
        """Return a given fact that the file lacks (`what`: an attribute's name).

        Args:
            others: attributes' names of facts that the file lacks, too.

        Raises:
            UsageError: one of them is not given.
        """
        if missing := [name for name in (what, *others) if self.known(name) is None]:
            settings = " ".join(f"--set {name}=NUMBER" for name in missing)
            raise UsageError(f"{path} lacks {' and '.join(missing)} of its model; add --set model=PATH or {settings}")
        value = self.known(what)
        assert value is not None
        return value

    def known(self, what: str) -> int | None:
        """Return a fact if it is given (`what`: an attribute's name)."""
        if (value := getattr(self, what)) is not None:
            return int(value)
        if self.spec is not None and what in ("num_experts", "top_k", "expert_bytes"):
            return int(max(getattr(self.spec, f"{what}_L")))
        if self.spec is not None and what == "num_hidden_layers":
            return max(self.spec.layer_ids_L) + 1
        return None

    def num_experts_or(self, experts: np.ndarray) -> tuple[int | None, list[str]]:
        """Return the number of experts in each layer of a file that does not tell it, and a note.

        Args:
            experts: all expert numbers of the file; the highest one counts where no fact is given.
        """
        if self.known("num_experts") is not None or not experts.size:
            return None, []
        found = int(experts.max()) + 1
        return found, [f"{found} experts per layer, from the highest number in the file; --set num_experts tells more"]

    def top_k_or_one(self, num_layers: int) -> tuple[list[int] | None, list[str]]:
        """Return 1 per layer for a file of counts that does not tell the experts per token, and a note."""
        if self.known("top_k") is not None:
            return None, []
        note = "the experts per token are unknown: each use of an expert counts as a token; --set top_k tells"
        return [1] * num_layers, [note]

    def spec_of(
        self,
        path: object,
        *,
        name: str = "unnamed model",
        layers: Sequence[int],
        num_experts: int | None = None,
        top_k_L: Sequence[int] | None = None,
        has_logits: bool = False,
    ) -> ModelSpec:
        """Return the model's spec from the facts of a file and the given ones.

        Raises:
            UsageError: a fact is neither in the file nor given.
            MismatchError: the file and the given facts differ.
        """
        num_layers = len(layers)
        if num_experts is None and self.spec is not None and self.spec.num_layers == num_layers:
            num_experts_L = self.spec.num_experts_L
        else:
            num_experts_L = (num_experts or self.said(path, "num_experts"),) * num_layers
        top_k_L = tuple(top_k_L or [self.said(path, "top_k")] * num_layers)
        expert_bytes = self.known("expert_bytes") or UNKNOWN_BYTES
        facts = {"layers": list(layers), "num_experts": num_experts_L, "top_k": top_k_L, "bytes": expert_bytes}
        found = spec_from_routes(
            self.name or name,
            facts,
            layer_ids_L=tuple(layers),
            num_experts_L=num_experts_L,
            top_k_L=top_k_L,
            has_logits_L=(has_logits,) * num_layers,
            hidden_size=self.hidden_size or 0,
            expert_bytes_L=(expert_bytes,) * num_layers,
        )
        return self.adopt(path, found)

    def adopt(self, path: object, found: ModelSpec) -> ModelSpec:
        """Return the given model's spec instead of the file's, if there is one.

        Raises:
            MismatchError: the file and the given facts differ.
        """
        num_layers = found.num_layers
        said = self.spec
        if found.num_experts > MOST_EXPERTS:
            raise MismatchError(
                f"{path} has {found.num_experts:,} experts per layer, expected {MOST_EXPERTS:,} at most"
            )
        expected: dict[str, Any] = {
            "layer_ids_L": said.layer_ids_L if said else self.moe_layers,
            "num_experts_L": said.num_experts_L if said else self.num_experts and (self.num_experts,) * num_layers,
            "top_k_L": said.top_k_L if said else self.top_k and (self.top_k,) * num_layers,
            "expert_bytes_L": not said and found.sized and self.expert_bytes and (self.expert_bytes,) * num_layers,
        }
        for name, value in expected.items():
            if value and tuple(value) != (there := getattr(found, name)):
                setting = "moe_layers" if name == "layer_ids_L" else name.removesuffix("_L")
                whose, remedy = "the given facts", f"leave out --set {setting}"
                if said:
                    whose, remedy = said.name, "name the model that it was recorded from"
                raise MismatchError(
                    f"{path} has {name.removesuffix('_L')} {_span(there)}, expected {_span(value)} of {whose}; {remedy}"
                )
        if not found.sized and self.expert_bytes:
            found = replace(found, expert_bytes_L=(self.expert_bytes,) * num_layers)
        return said or found


def some_layers(spec: ModelSpec, layers: Sequence[int]) -> ModelSpec:
    """Return a model with some of its MoE layers, of a revision of its own: plans for it do not fit the whole model.

    Raises:
        UsageError: the model has no experts in one of them.
    """
    if unknown := sorted(set(layers) - set(spec.layer_ids_L)):
        raise UsageError(
            f"--set moe_layers: {spec.name} has no experts in layer {unknown[0]}, expected some of "
            f"{_span(spec.layer_ids_L)}"
        )
    if tuple(layers) == spec.layer_ids_L:
        return spec
    keep = [spec.layer_ids_L.index(layer) for layer in layers]
    names = ("layer_ids_L", "num_experts_L", "top_k_L", "has_logits_L", "expert_bytes_L")
    per_layer: dict[str, Any] = {name: tuple(getattr(spec, name)[at] for at in keep) for name in names}
    header = json.dumps([spec.revision, list(layers)])
    return replace(
        spec,
        name=f"{spec.name}, layers {_span(layers)}",
        revision=hashlib.sha256(header.encode()).hexdigest(),
        **per_layer,
    )


def _span(values: Sequence[int]) -> str:
    """Format numbers compactly: a run as first..last, equal ones as one."""
    values = list(values)
    if len(values) > 1 and len(set(values)) == 1:
        return f"{values[0]} in each of {len(values)} layers"
    if len(values) > 2 and values == list(range(values[0], values[0] + len(values))):
        return f"{values[0]}..{values[-1]}"
    return ", ".join(map(str, values)) or "none"


def require_dense(path: object, used_H: np.ndarray, layers: Collection[int]) -> None:
    """Raises: MismatchError: a layer beyond `layers`, those with experts, has some."""
    for layer in np.flatnonzero(used_H):
        if layer not in layers:
            raise MismatchError(
                f"{path}: layer {layer} has experts, expected none; name the layers that do with {SAY_LAYERS}"
            )


def without_dense(path: object, experts_THK: np.ndarray, layers: Sequence[int], empty: int = 0) -> np.ndarray:
    """Return experts_TS of the layers that have experts.

    Args:
        empty: the engine's value for the other layers.

    Raises:
        MismatchError: another layer has experts.
    """
    require_dense(path, (experts_THK != empty).any(axis=(0, 2)), layers)
    return experts_THK[:, list(layers)].reshape(len(experts_THK), -1)


def with_dense(spec: ModelSpec, experts_TS: np.ndarray, num_hidden_layers: int, empty: int = 0) -> np.ndarray:
    """Return experts_THK int32 of a trace's rows, `empty` in layers without experts."""
    num_tokens = len(experts_TS)
    experts_THK = np.full((num_tokens, num_hidden_layers, spec.top_k_L[0]), empty, np.int32)
    experts_THK[:, list(spec.layer_ids_L)] = experts_TS.reshape(num_tokens, spec.num_layers, -1)
    return experts_THK


def hidden_layers(spec: ModelSpec, asked: int | None) -> int:
    """Return the number of the model's layers (default: up to the last with experts).

    Raises:
        UsageError: `asked` is too small.
    """
    least = max(spec.layer_ids_L) + 1
    if asked is not None and asked < least:
        raise UsageError(f"num_hidden_layers is {asked}, but the model has layer {least - 1}; give its number")
    return asked or least


def require_even(spec: ModelSpec, format: str) -> None:
    """Raise MismatchError if layers differ in their number of experts or in top-k."""
    for name in ("num_experts_L", "top_k_L"):
        if len(set(getattr(spec, name))) > 1:
            raise MismatchError(
                f"{format} has one {name.removesuffix('_L')} for all layers, but {spec.name} has "
                f"{_span(getattr(spec, name))}; export to policylang or moe_cache_lab"
            )


def spec_from_routes(name: str, header: dict[str, Any], *, layer_ids_L: tuple[int, ...], **known: Any) -> ModelSpec:
    """Return the spec of a model known by its routes only.

    Args:
        header: facts in the file. The revision is equal for equal names and headers, and never equals a checkpoint's
            (`moetool.models.files.revision`), since the weights are unknown.
        known: further fields of the spec.
    """
    revision = hashlib.sha256(json.dumps(["routes", name, header], sort_keys=True).encode()).hexdigest()
    unknown = {
        "has_logits_L": (False,) * len(layer_ids_L),
        "num_shared_experts": 0,
        "num_groups": 1,
        "hidden_size": 0,
        "score_function": "softmax",
        "renormalize": False,
    }
    return ModelSpec(name=name, revision=revision, layer_ids_L=layer_ids_L, **{**unknown, **known})
