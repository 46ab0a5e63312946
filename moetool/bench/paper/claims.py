"""A paper's claims from a recipe: TOML in recipes/papers, without code."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from moetool.base import assets, config, plugins
from moetool.base.bounded_read import TOML_BYTES, parse_toml, read_bytes
from moetool.base.config import Span, require_within
from moetool.base.errors import UsageError, unknown_name
from moetool.bench.paper.named_machine import MachineChoice
from moetool.bench.paper.verdict import Check
from moetool.costing.machines import recipe_names


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Default sizes of a paper's experiments.

    Attributes:
        seeds: runs of every seeded experiment.
        prompts: prompts per embedded set.
        new_tokens: decoded tokens per prompt.
        requests: requests per simulation.
        epochs: training epochs of predictors.
        rounds: rounds of live measurements.
        texts: texts for the live model per round or seed.

    Raises:
        UsageError: one is below 1.
    """

    seeds: int = 5
    prompts: int = 40
    new_tokens: int = 24
    requests: int = 100
    epochs: int = 12
    rounds: int = 3
    texts: int = 4

    def __post_init__(self) -> None:
        require_within(self, "sizes: ", **dict.fromkeys(self.__slots__, Span(1)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A claim of a paper and the experiment that tests it.

    Attributes:
        id: table, figure or section.
        says: the claim in the paper's terms.
        printed: the paper's numbers.
        setup: name of a shared setup, which gives the experiment and the options that are not set here.
        experiment: a module of `moetool.bench.paper.experiments`.
        options: options of the experiment.
        derive: values that follow from measured ones (`moetool.bench.paper.verdict.derive`).
        check: conditions of agreement.
        size: printed numbers by name, shares and multiples as numbers.
        needs: what else decides the claim: `size`, bytes of experts, and `top_k`, experts per token, within a factor of
            1.5 of the paper's model; `gpu`, seconds of a GPU.
        ours: a question of moetool's that the paper does not answer, in a table of its own.
        here: relevant differences between the miniature and the paper.
        reason: why the result is not the paper's, if so, and what would change the verdict (default: the setup's).
    """

    id: str
    says: str
    printed: str
    setup: str = ""
    experiment: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    derive: Mapping[str, Mapping[str, tuple[str, ...]]] = field(default_factory=dict)
    check: Check
    size: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    needs: tuple[Literal["size", "top_k", "gpu"], ...] = ()
    ours: bool = False
    here: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimSetup:
    """An experiment and its options, shared by several claims, and the reason why their results are not the paper's."""

    experiment: str
    reason: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """Tables and figures of a paper without a claim, and why. Raises: UsageError: ids or reason are missing."""

    ids: tuple[str, ...]
    why: str

    def __post_init__(self) -> None:
        if not (self.ids and self.why):
            raise UsageError("left_out needs ids and why")


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperFacts:
    """Title and reference of a paper."""

    title: str
    reference: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Paper:
    """A recipe.

    Attributes:
        sizes, quick: sizes of the experiments, and those of a smoke test.
        machine: machine and model whose costs time the replays.
        setup: shared experiments by name.
        claim: claims, in the paper's order.
        left_out: tables and figures without a claim.
    """

    paper: PaperFacts
    sizes: Sizes
    quick: Sizes
    machine: MachineChoice = field(default_factory=MachineChoice)
    setup: Mapping[str, ClaimSetup] = field(default_factory=dict)
    claim: tuple[Claim, ...]
    left_out: tuple[LeftOut, ...] = ()


def names() -> list[str]:
    return recipe_names("papers")


def read_paper(name: str) -> Paper:
    """Read a paper's recipe by name, or a user's by a path that ends in `.toml`.

    Raises:
        UsageError: no such paper or file; or the recipe has an unknown experiment or option.
    """
    if name.endswith(".toml"):
        try:
            text = read_bytes(Path(name), TOML_BYTES).decode("utf-8")
        except (OSError, ValueError) as error:
            raise UsageError(f"cannot read the recipe {name}: {error}") from None
        return parse_paper(text, name)
    if name not in names():
        raise unknown_name("paper", name, names())
    text = assets.path("recipes", "papers", f"{name}.toml").read_text(encoding="utf-8")
    return parse_paper(text, f"recipe {name}")


def parse_paper(text: str, where: str) -> Paper:
    """Parse a recipe. Raises: UsageError: see `read_paper`; or it is not valid TOML."""
    try:
        values = parse_toml(text)
    except ValueError as error:
        raise UsageError(f"{where} is not valid TOML: {error}") from None
    paper = config.parse(Paper, values, where)
    paper = replace(paper, claim=tuple(_filled(claim, paper.setup, where) for claim in paper.claim))
    for claim in paper.claim:
        module = plugins.load("experiment", claim.experiment)
        config.parse(module.Options, claim.options, f"{where}, {claim.id}, {claim.experiment}")
    return paper


def _filled(claim: Claim, setups: Mapping[str, ClaimSetup], where: str) -> Claim:
    """A claim merged with its setup. Raises: UsageError: the setup is unknown, or setup and experiment are missing."""
    if bool(claim.setup) == bool(claim.experiment):
        raise UsageError(f"{where}, {claim.id}: expected either a setup or an experiment")
    if not claim.setup:
        return claim
    if claim.setup not in setups:
        raise unknown_name(f"setup of {claim.id}", claim.setup, setups)
    setup = setups[claim.setup]
    options = {**setup.options, **claim.options}
    return replace(claim, experiment=setup.experiment, options=options, reason=claim.reason or setup.reason)


def choose(claims: Sequence[Claim], only: Sequence[str]) -> list[Claim]:
    """Claims of some tables or figures; `Figure 8` includes `Figure 8(a)`; no names select all.

    Raises:
        UsageError: no claim has this name.
    """
    chosen: list[Claim] = []
    for name in only:
        mine = [claim for claim in claims if re.match(rf"{re.escape(name)}(?!\w)", claim.id, re.IGNORECASE)]
        if not mine:
            raise unknown_name("claim", name, {claim.id for claim in claims})
        chosen += mine
    return [claim for claim in claims if claim in chosen] if only else list(claims)
