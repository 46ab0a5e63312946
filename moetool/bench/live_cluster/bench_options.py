"""Options of a bench of a cluster."""

from collections.abc import Sequence
from dataclasses import dataclass

from moetool.config import POSITIVE, Span, require_within
from moetool.errors import UsageError, unknown_name
from moetool.placement import _planner as planner

PLACEMENTS = ("uniform", "redundant", "smartmoe", "eplb", "prism", "prism_exact")
"""Prism's baselines, Prism, and the optimum of its objective."""
ALONE, REDIRECTED = "alone", "alone, redirected"
"""A server by itself with the experts that fit and the rest on its disk; and the same, with requests sent on."""
WHERES = ("processes", "threads", "namespaces")
STATIC = ("uniform", "redundant")
"""Placements that Prism § IV-A leaves as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterBenchOptions:
    """Options of `--set bench.NAME=VALUE`.

    Attributes:
        rounds: in each of which every line runs once, under the same arrivals.
        requests: of each server in a run.
        prompts: of each task; every other one is planned from, the rest are served.
        prompt_tokens: the most of a prompt's words that are kept (0: all), counted at blanks.
        new_tokens: of each answer.
        gaps_s: mean seconds between a server's requests; the first is for the tables, all for the sweep.
        links: link rates, in units of that at which moving a hidden state takes as long as computing an expert; the
            first is for the tables, all for the sweep.
        memory: of each server for experts, as a share of all experts. Prism's servers have 1, 1 and 2 GPUs of 30 %.
        migrate: whether lines but uniform and redundant place anew while they run, as Prism has them.
        interval_s: between two of these decisions.
        shift: whether to run the last placement twice more, with tasks that change servers in the middle: with
            migration and without (Prism's Fig. 7).
        where: `processes`: each server is one; `threads`: all of them share this one, and its interpreter;
            `namespaces`: each is on a host of its own, a network namespace, and `tc tbf` of the kernel makes the links
            slow, which else a token bucket of the servers does. For that be root and have iproute2.
        profile_s: how long to measure the costs.
        expert_us: microseconds that an expert takes for one token, by which links are scaled (0: as measured).
        seed: of arrivals and of the choice of prompts.

    Raises:
        UsageError: a value that makes no sense.
    """

    rounds: int = 3
    requests: int = 20
    prompts: int = 24
    prompt_tokens: int = 0
    new_tokens: int = 8
    gaps_s: tuple[float, ...] = (2.0,)
    links: tuple[float, ...] = (1.0,)
    memory: tuple[float, ...] = (0.3, 0.3, 0.6)
    migrate: bool = True
    interval_s: float = 30.0
    shift: bool = True
    where: str = "processes"
    profile_s: float = 10.0
    expert_us: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        one, finite = Span(1), Span(0, below=True)
        require_within(self, "bench.", rounds=one, requests=one, prompts=Span(2), new_tokens=one, prompt_tokens=Span(0))
        require_within(self, "bench.", gaps_s=POSITIVE, links=POSITIVE, memory=POSITIVE, interval_s=POSITIVE)
        require_within(self, "bench.", expert_us=finite)
        if empty := [name for name in ("gaps_s", "links", "memory") if not getattr(self, name)]:
            raise UsageError(f"bench.{empty[0]} is empty, expected numbers above 0")
        if self.where not in WHERES:
            raise unknown_name("--set bench.where", self.where, WHERES)


QUICK = {
    "rounds": 1,
    "requests": 2,
    "prompts": 4,
    "prompt_tokens": 24,
    "new_tokens": 2,
    "gaps_s": (0.5,),
    "migrate": False,
    "shift": False,
    "profile_s": 0.0,
    "expert_us": 200.0,
}
"""Sizes of a smoke test: its results mean nothing."""


def parse_lines(given: Sequence[str]) -> tuple[str, ...]:
    """Lines by name: placements, `alone` and `redirected`; all of them by default.

    Raises:
        UsageError: one is neither of these nor a planner.
    """
    names = [name.strip() for text in given for name in text.split(",") if name.strip()]
    if not names:
        return (ALONE, REDIRECTED, *PLACEMENTS)
    lines = []
    for name in names:
        if name in (ALONE, "redirected"):
            lines.append(ALONE if name == ALONE else REDIRECTED)
            continue
        planner.find(name, option="--line", others=(ALONE, "redirected"))
        lines.append(name)
    return tuple(dict.fromkeys(lines))
