"""MoE layers of a model, and its `ModelSpec`."""

import re
from dataclasses import dataclass
from typing import Any

from moetool.base import families
from moetool.base.errors import UsageError
from moetool.base.types import ModelSpec
from moetool.models.experts.expert_form import ExpertForm, form_of, holds_experts
from moetool.models.families.inference import infer_family
from moetool.models.transformers_internals import router_recorders


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeLayer:
    """One MoE layer of a model in memory.

    Attributes:
        index: 0..L-1.
        layer_id: absolute index among the model's layers.
        experts: the module that holds the experts; called with hidden states, indices and weights.
        router: the module that returns the logits, as `_can_record_outputs` names it.
        logits_index: position of the logits in the router's output.
        path: name of `experts` in the model, such as `model.layers.0.mlp.experts`.
        top_k: experts that a token uses.
        form: weights and computation of one expert.
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
        """Number of experts that the router chooses from."""
        return self.form.num_experts + self.form.num_identity


def moe_layers(model: Any) -> list[MoeLayer]:
    """Return a model's MoE layers, in order. Raises: UsageError: it has none that moetool can hook."""
    model_type = model.config.get_text_config().model_type
    families.require_supported(model_type)
    routers = _router_classes(model, families.known(model_type))
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
    config = model.config.get_text_config()
    families.find_or_add(
        model_type,
        getattr(model.config_class, "model_type", model_type),
        lambda: infer_family(model_type, found[0][3], int(config.hidden_size)),
    )
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
    """Names of router classes, with the position of the logits in their output."""
    classes = dict.fromkeys(family.routers, 0) if family is not None else {}
    for module in model.modules():
        for recorder in router_recorders(module):
            classes[recorder.target_class.__name__] = recorder.index
    return classes


def _top_k(model: Any, parent: Any, router: Any) -> int:
    # gemma4 keeps it on the config only.
    owners = ((router, "top_k"), (parent, "top_k"), (model.config.get_text_config(), "top_k_experts"))
    top_k = next((value for owner, name in owners if (value := getattr(owner, name, None))), None)
    if not isinstance(top_k, int):
        raise UsageError(f"the config of {type(model).__name__} lacks the number of experts per token; add it")
    return top_k


def spec_of(
    model: Any, layers: list[MoeLayer], *, name: str, revision: str, expert_bytes_L: tuple[int, ...]
) -> ModelSpec:
    """The ModelSpec of a model, with or without its weights.

    Args:
        name: display name of the checkpoint.
        expert_bytes_L: bytes of an expert in the checkpoint.

    Raises: UsageError: moetool does not know its family.
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
        expert_bytes_L=expert_bytes_L,
        score_function=rule.score,
        renormalize=rule.renormalize,
    )


def offloaded(layers: list[MoeLayer]) -> set[str]:
    """Parameter names of the routed experts; all others stay in memory."""
    return {f"{layer.path}.{name}" for layer in layers for name in layer.form.parameters}


def _num_shared_experts(model: Any, config: Any) -> int:
    for name in ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert"):
        if isinstance(number := getattr(config, name, None), int):
            return number
    return int(
        any(path.endswith(("shared_expert", "shared_experts", "shared_mlp")) for path, _ in model.named_modules())
    )
