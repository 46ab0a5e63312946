"""Table of facts about MoE families that cannot be derived from their modules.

A family is a `model_type` of transformers. The positions and shapes of experts and routers, and top-k, are derived from
the modules (`moetool.models.experts.moe_layers`). This table holds the rule from scores to weights, and obstacles to
capture, batched serving and expert substitution.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from moetool.base.errors import UsageError

Score = Literal["softmax", "sigmoid", "sqrtsoftplus"]

# Routers' names for the factor on their weights.
_SCALES = ("routed_scaling_factor", "route_scale", "router_scaling_factor")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Rule that turns a router's logits into the chosen experts' weights (`moetool.models.families.router_rules`).

    Attributes:
        score: turns logits into scores over all experts.
        renormalize: whether the chosen scores are divided by their sum.
        scale: factor on the result.
    """

    score: Score
    renormalize: bool
    scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family.

    Attributes:
        name: its `model_type`.
        score: how its router turns logits into scores.
        renormalize: whether the top-k weights are divided by their sum; None: as in the checkpoint's config.
        exception: why the weights do not follow from the recorded logits by that rule; empty if they do.
        fixed: why experts cannot be substituted although the rule holds; empty if they can.
        own_cache: why pages cannot hold it, so that each request keeps its own; empty if it can.
        unrecorded: why its decode steps run module by module on a CPU; empty if they are recorded as programs.
        appends: whether such a cache takes several tokens at once after the first forward, as for the next chat turn.
        refused: why it can be neither captured nor served; empty if it can.
        notes: further facts for display.
        probabilities: whether the router returns probabilities instead of logits.
        routers: router classes that `_can_record_outputs` does not name.
        inferred: whether it was inferred by running its router (`moetool.models.families.inference`).
    """

    name: str
    score: Score = "softmax"
    renormalize: bool | None = None
    exception: str = ""
    fixed: str = ""
    own_cache: str = ""
    unrecorded: str = ""
    appends: bool = False
    refused: str = ""
    notes: str = ""
    probabilities: bool = False
    routers: tuple[str, ...] = ()
    inferred: bool = False

    @property
    def substitutable(self) -> bool:
        """Whether an expert can be substituted by another with its own score (SMoE)."""
        return not (self.refused or self.exception or self.fixed)

    @property
    def served(self) -> str:
        """`in batches` or `no`."""
        return "no" if self.refused else "in batches"

    @property
    def decoded(self) -> str:
        """How decode steps run on a CPU in bfloat16: `program`, `modules` or `no`."""
        if self.refused:
            return "no"
        return "modules" if self.own_cache or self.unrecorded else "program"

    @property
    def weight_rule(self) -> str:
        """The rule in words."""
        if self.refused:
            return "-"
        sums = {True: ", summing to one", False: "", None: ", summing to one if norm_topk_prob"}
        return self.score + sums[self.renormalize]

    def to_json(self) -> dict[str, Any]:
        """Data of `moetool models --json`."""
        return {
            "family": self.name,
            "known": "inferred" if self.inferred else "listed",
            "captured": not self.refused,
            "served": self.served,
            "decoded": self.decoded,
            "substitution": self.substitutable,
            "weights": "as its router computes" if self.inferred else self.weight_rule,
            "remarks": "; ".join(
                filter(None, (self.refused, self.exception, self.fixed, self.own_cache, self.unrecorded, self.notes))
            ),
        }

    def rule(self, config: Any, router: Any) -> Rule:
        """The weight rule of a router of this family."""
        score = getattr(router, "expert_selection_fn", self.score)  # cohere2_moe has two
        renormalize = self.renormalize if score == self.score else None
        if renormalize is None:
            renormalize = bool(getattr(router, "norm_topk_prob", getattr(config, "norm_topk_prob", False)))
        scale = next((float(getattr(router, name)) for name in _SCALES if hasattr(router, name)), 1.0)
        return Rule(score=score, renormalize=renormalize, scale=scale)


_LINEAR = "its linear attention keeps a state that the paged cache cannot hold"
_CONVOLUTION = "its convolutions keep a state that the paged cache cannot hold"
_EAGER = "its attention has only transformers' eager form, which cannot be paged"
_CHUNKED = "its chunked attention is not supported by the paged cache"
_UNKNOWN = "recorded steps have no function for its {}"
_OWN_CODE = "transformers has no class for it, and moetool never runs code from a checkpoint"

_ALL = (
    Family(name="afmoe", score="sigmoid", renormalize=True),
    Family(name="bailing_hybrid", score="sigmoid", own_cache=_LINEAR, appends=True),
    Family(name="cohere2_moe", renormalize=True),
    Family(
        name="dbrx",
        renormalize=True,
        unrecorded=_UNKNOWN.format("LayerNorm"),
        fixed="its router returns logits, not a replaceable choice",
        notes="weights are divided by their p-norm; p is 1 in the checkpoints",
    ),
    Family(name="deepseek", refused=f"{_OWN_CODE}; the nearest supported family is deepseek_v2"),
    Family(name="deepseek_v2", renormalize=False),
    Family(name="deepseek_v3", score="sigmoid", notes="Kimi-K2 checkpoints (kimi_k2) are of this family"),
    Family(name="deepseek_v32", score="sigmoid", unrecorded=_UNKNOWN.format("indexers")),
    Family(
        name="deepseek_v4",
        score="sqrtsoftplus",
        renormalize=True,
        own_cache=_EAGER,
        appends=True,
        routers=("DeepseekV4HashRouter",),
        notes="the first layers choose experts by token id (a hash table), whatever their logits",
    ),
    Family(name="doge", refused="its experts are single rows of an embedding, too small to load one by one"),
    Family(name="dots1", score="sigmoid"),
    Family(name="ernie4_5_moe", renormalize=True),
    Family(name="exaone_moe", score="sigmoid"),
    Family(name="flex_olmo"),
    Family(name="flint", score="sigmoid", own_cache=_EAGER, appends=True),
    Family(
        name="gemma4_text",
        renormalize=True,
        probabilities=True,
        own_cache="its layers' caches have different widths, and the paged cache has one",
        appends=True,
        exception="each expert's weight is also multiplied by a learned scale",
        notes="logits are recorded as logarithms of the router's probabilities",
    ),
    Family(name="glm4_moe", score="sigmoid"),
    Family(name="glm4_moe_lite", score="sigmoid"),
    Family(name="glm_moe_dsa", score="sigmoid", unrecorded=_UNKNOWN.format("indexers")),
    Family(name="gpt_oss", renormalize=True),
    Family(name="granitemoe", renormalize=True),
    Family(name="granitemoehybrid", renormalize=True, own_cache=_LINEAR, appends=True),
    Family(name="granitemoeshared", renormalize=True),
    Family(name="hunyuan_v1_moe", renormalize=True),
    Family(name="hy_v3", score="sigmoid", renormalize=True),
    Family(name="jamba", renormalize=False, own_cache=_LINEAR),
    Family(
        name="jetmoe",
        renormalize=True,
        own_cache="it repeats cached keys and values in its own order",
        appends=True,
        fixed="its router returns sorted tokens, not a replaceable choice",
        notes="the experts of its attention stay in memory; those of its feed-forward layers are captured and served",
    ),
    Family(name="kimi_linear", score="sigmoid", own_cache=_LINEAR, appends=True),
    Family(name="laguna", score="sigmoid", renormalize=True, unrecorded=_UNKNOWN.format("softplus")),
    Family(name="lfm2_moe", score="sigmoid", own_cache=_CONVOLUTION, appends=True),
    Family(
        name="llama4_text",
        score="sigmoid",
        renormalize=False,
        own_cache=_CHUNKED,
        appends=True,
        fixed="its router returns scaled inputs, not a replaceable choice",
        notes="its weights multiply the input of an expert, not its output",
    ),
    Family(
        name="longcat_flash",
        renormalize=False,
        notes="its zero-compute experts are numbered after the others; one takes a slot and reads nothing",
    ),
    Family(name="mellum"),
    Family(name="mimo_v2_flash", score="sigmoid", own_cache=_EAGER, appends=True),
    Family(name="minimax", renormalize=True, own_cache=_LINEAR, appends=True),
    Family(name="minimax_m2", score="sigmoid", renormalize=True),
    Family(name="mixtral", renormalize=True),
    Family(name="nemotron_h", score="sigmoid", own_cache=_LINEAR, appends=True),
    Family(name="olmoe"),
    Family(
        name="phimoe",
        exception="sparsemixer masks the logits again for each of the two experts",
        unrecorded=_UNKNOWN.format("LayerNorm"),
    ),
    Family(name="qwen2_moe"),
    Family(name="qwen3_5_moe_text", renormalize=True, own_cache=_LINEAR, appends=True),
    Family(name="qwen3_moe"),
    Family(name="qwen3_next", own_cache=_LINEAR, appends=True),
    Family(name="solar_open", score="sigmoid"),
    Family(name="xverse", refused=_OWN_CODE),
    Family(
        name="zaya",
        renormalize=False,
        own_cache=_CONVOLUTION,
        appends=True,
        exception="its router may skip all experts; the logit of skipping is not recorded",
        notes="a token that skips is counted as using expert 0, with weight 0",
    ),
)
SAME_AS = {"kimi_k2": "deepseek_v3"}
"""Model types that transformers lacks, and the families whose config and modules they have."""
FAMILIES = {family.name: family for family in _ALL}
"""Families that moetool lists, by name."""

_inferred: dict[str, Family] = {}
"""Families inferred in this process, when a model of theirs was opened."""

INFERRED = (
    *("aria_text", "axk1", "axk2", "dots3_note_text", "granitemoe_swa", "hy_v4", "inkling2_text", "inkling_text"),
    *("kolibri1", "minimax_m3_vl_text"),
)
"""Unlisted transformers families that can be inferred from their default config."""

WITHIN_OTHERS = (
    *("glm4v_moe_text", "glm5_next_text", "mistral4", "mistral_large4_text", "muse_spark_text", "qwen3_omni_moe_text"),
    *("qwen3_vl_moe_text", "step3p5", "unlimited_ocr_text"),
)
"""Inferred families that transformers has only as part of multimodal models."""


def unlisted(name: str, **known: Any) -> Family:
    return Family(
        name=name, inferred=True, own_cache="inferred from its modules, so the paged cache is not used", **known
    )


def find_or_add(model_type: str, built_as: str, infer: Callable[[], Family]) -> Family:
    """Return the family of a model.

    Args:
        built_as: type whose modules it has; if the table lists only that, it has its facts.
        infer: infers a family that the table lists under neither name.
    """
    family = known(model_type)
    if family is None:
        listed = FAMILIES.get(built_as)
        family = _inferred[model_type] = infer() if listed is None else replace(listed, name=model_type, notes="")
    return family


def known(model_type: str) -> Family | None:
    """Return the family from the table, or as inferred when a model of it was opened."""
    return FAMILIES.get(model_type) or _inferred.get(model_type)


def find(model_type: str) -> Family:
    """Return the family of a model whose MoE layers were found. Raises: UsageError: moetool cannot run it."""
    family = known(model_type)
    assert family is not None, model_type
    require_supported(model_type)
    return family


def require_supported(model_type: str) -> None:
    """Raises: UsageError, with the reason, for a family that can be neither captured nor served."""
    family = known(model_type)
    if family is not None and family.refused:
        raise UsageError(f"{model_type} models are not supported: {family.refused}; see 'moetool models'")


def require_substitutable(spec_name: str, policy: str) -> None:
    """Refuse a policy that substitutes experts, for a model that does not allow it.

    Args:
        spec_name: `ModelSpec.name`. It begins with the family; an unknown name, as in a foreign trace, is never
            refused.

    Raises:
        UsageError: the family's routers cannot be substituted.
    """
    family = known(spec_name.partition(":")[0])
    if family is not None and not family.substitutable:
        raise UsageError(
            f"policy {policy} substitutes experts, and {family.name} does not allow that: "
            f"{family.refused or family.exception or family.fixed}; choose another policy ('moetool models' lists "
            f"where it works)"
        )


def own_cache(config: Any) -> bool:
    """Whether the family needs caches of its own, by its text config."""
    family = known(config.model_type)
    return family is not None and bool(family.own_cache)


def resumes_cache(config: Any) -> bool:
    """Whether a cache of the family's own can take the next turn of a chat, by its text config."""
    family = known(config.model_type)
    return family is not None and family.appends
