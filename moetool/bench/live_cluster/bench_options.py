"""Options of a bench of a cluster."""

from collections.abc import Sequence
from dataclasses import dataclass

from moetool.base.config import POSITIVE, Span, require_within
from moetool.base.errors import UsageError, unknown_name
from moetool.placement import planner

PLACEMENTS = ("uniform", "redundant", "smartmoe", "eplb", "prism", "prism_exact")
"""Prism's baselines, Prism, and the optimum of its objective."""
ALONE, REDIRECTED = "alone", "alone, redirected"
"""A single server with the experts that fit in memory and the rest on disk; and the same with redirected requests."""
TASKS = ("arithmetic", "ascii_words", "narratives")
"""Prism's first setup has three BIG-bench tasks; these embedded sets are the closest."""
WHERES = ("processes", "threads", "namespaces")
STATIC = ("uniform", "redundant")
"""Placements that Prism § IV-A never changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterBenchOptions:
    """Options of `--set bench.NAME=VALUE`.

    Attributes:
        rounds: every line runs once per round, under the same arrivals.
        requests: requests per server and run.
        prompts: prompts per task; every other one is for planning, the rest are served.
        prompt_tokens: most words of a prompt that are kept (0: all), split at blanks.
        new_tokens: tokens of each answer.
        gap_s: mean seconds between a server's requests.
        link: link rate, in units of that at which moving a hidden state takes as long as computing an expert.
        memory: expert memory of each server, as a share of all experts. Prism's servers have 1, 1 and 2 GPUs of 30 %.
        migrate: whether lines re-place experts while they run, except uniform and redundant, as in Prism.
        interval_s: seconds between these decisions.
        shift: whether to run the last placement twice more, with and without migration, with tasks that change servers
            in the middle (Prism's Fig. 7).
        where: `processes`: one per server; `threads`: all servers in this process; `namespaces`: each server on its own
            host, a network namespace, with links shaped by the kernel's `tc tbf` instead of the servers' token buckets.
            That needs root and iproute2.
        profile_s: seconds to measure the costs.
        expert_us: microseconds of an expert for one token, which scale the links (0: as measured).
        seed: seed of arrivals and of the choice of prompts.

    Raises:
        UsageError: a value is invalid.
    """

    rounds: int = 3
    requests: int = 20
    prompts: int = 24
    prompt_tokens: int = 0
    new_tokens: int = 8
    gap_s: float = 2.0
    link: float = 1.0
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
        require_within(self, "bench.", gap_s=POSITIVE, link=POSITIVE, memory=POSITIVE, interval_s=POSITIVE)
        require_within(self, "bench.", expert_us=finite)
        if not self.memory:
            raise UsageError("bench.memory is empty, expected numbers above 0")
        if self.where not in WHERES:
            raise unknown_name("--set bench.where", self.where, WHERES)


QUICK = {
    "rounds": 1,
    "requests": 2,
    "prompts": 4,
    "prompt_tokens": 24,
    "new_tokens": 2,
    "gap_s": 0.5,
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
        planner.find(name, option="--planner", others=(ALONE, "redirected"))
        lines.append(name)
    return tuple(dict.fromkeys(lines))
