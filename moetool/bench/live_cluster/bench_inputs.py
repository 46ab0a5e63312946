"""Inputs of all lines of a cluster bench: prompts, traces, costs, the cluster, and the placements."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from moetool.base.errors import UsageError
from moetool.base.tables import numbered
from moetool.base.types import Cluster, Gpu, ModelSpec, Server
from moetool.bench.live_cluster.bench_options import ALONE, REDIRECTED, ClusterBenchOptions
from moetool.costing.costs import CostProfile
from moetool.models.checkpoint import Checkpoint
from moetool.models.loading import CPU, DTYPES, served_dtype
from moetool.placement.demand import loads
from moetool.placement.plan import PlacementPlan
from moetool.placement.planning import plan_placement
from moetool.prompts.gather import Prompt, gather
from moetool.trace.edit import split
from moetool.trace.reader import Trace

_PARTS = ("planned", "served")


@dataclass(frozen=True, kw_only=True)
class BenchInputs:
    """Inputs of the runs.

    Attributes:
        dtype: data type in which servers compute.
        texts: served prompts, by server.
        planned: traces for planning, by server name.
        served: traces of the served prompts.
        profile: this machine's cost profile.
        expert_s: seconds of one expert for one token (default: the profile's).
        even_bytes_s: link rate at which sending a hidden state takes as long.
    """

    model: str
    dtype: str
    spec: ModelSpec
    tasks: tuple[str, ...]
    texts: tuple[tuple[str, ...], ...]
    planned: Mapping[str, Trace]
    served: Mapping[str, Trace]
    profile: CostProfile
    expert_s: float
    even_bytes_s: float

    def cluster(self, options: ClusterBenchOptions) -> Cluster:
        """Servers with the options' memory and links."""
        return Cluster(
            servers=tuple(
                Server(name=task, gpus=(Gpu(memory_bytes=self.slots(share) * self.spec.slot_bytes),))
                for task, share in zip(self.tasks, options.memory, strict=True)
            ),
            link_bytes_s=self.even_bytes_s * options.link,
        )

    def slots(self, share: float) -> int:
        """Number of experts in a share of the memory of all."""
        return min(self.spec.total_experts, int(share * self.spec.total_experts))

    def plans(self, cluster: Cluster, lines: Sequence[str], seed: int) -> dict[str, PlacementPlan]:
        """The placement of each line with a planner."""
        from moetool.placement.planning import Setting

        names = [name for name in lines if name not in (ALONE, REDIRECTED)]
        return {name: plan_placement(self.planned, cluster, name, {}, setting=Setting(seed=seed))[0] for name in names}

    def expected_local(self, plan: PlacementPlan, drawn: Sequence[Sequence[int]]) -> float:
        """Local compute share of a placement for these requests, from their traces.

        Args:
            drawn: prompt indices of each server's requests.
        """
        local = pairs = 0.0
        for n, trace in enumerate(self.served.values()):
            numbers = trace.requests["request"].to_pylist()
            counts = np.bincount(drawn[n], minlength=len(numbers))
            for number, tokens_LE in loads(trace, set(numbers)):
                weight = counts[numbers.index(number)]
                pairs += weight * tokens_LE.sum()
                local += weight * tokens_LE[plan.placed_GLE[n]].sum()
        return float(local / pairs) if pairs else 0.0


def prepare(model: str, tasks: Sequence[str], options: ClusterBenchOptions, work: Path) -> BenchInputs:
    """Read the prompts, capture them, and measure compute costs.

    Args:
        work: a folder for the traces.

    Raises:
        UsageError: too few prompts, or not one task for each server.
        As `capture` and `gather`.
    """
    from moetool.capture.job import CaptureOptions
    from moetool.capture.run import capture
    from moetool.measuring.profile import ProfileOptions
    from moetool.measuring.profile import profile as measure

    if len(tasks) != len(options.memory) or len(set(tasks)) != len(tasks):
        raise UsageError(
            f"{numbered(len(tasks), 'set')} of prompts for {numbered(len(options.memory), 'server')}; give "
            f"one set per server with --data, or set as many servers with --set bench.memory"
        )
    checkpoint = Checkpoint.open(model)
    spec, dtype = checkpoint.spec, served_dtype(checkpoint, CPU)[0]
    parts: tuple[dict[str, list[Prompt]], ...] = ({}, {})
    for task in tasks:
        found = [_cut(prompt, options.prompt_tokens) for prompt in gather([task], max_prompts=options.prompts).prompts]
        if len(found) < 2:
            raise UsageError(f"{task} has {len(found)} prompt, expected at least 2: one to plan from, one to serve")
        for part in (0, 1):
            parts[part][task] = found[part::2]
    names = {task: Path(task).stem for task in tasks}
    every = [
        replace(prompt, task=f"{part}-{n}")
        for part, by_task in zip(_PARTS, parts, strict=True)
        for n, task in enumerate(tasks)
        for prompt in by_task[task]
    ]
    how = CaptureOptions(max_new_tokens=options.new_tokens, batch_size=8, keep=("topk",), threads=1, dtype=dtype)
    made = capture(model, every, work / "trace", how)
    if made.skipped:
        raise UsageError(
            f"prompts that do not fit into the context of {model}: {made.skipped}; shorten them with --set "
            f"bench.prompt_tokens=200"
        )
    traces = split(Trace(work / "trace"), work / "parts", by="task")
    planned, served = ({names[task]: traces[f"{part}-{n}"] for n, task in enumerate(tasks)} for part in _PARTS)
    profile = measure(model, ProfileOptions(dtype=dtype, seconds=options.profile_s, threads=1, scratch=work))
    expert_s = options.expert_us * 1e-6 or profile.on("cpu").expert(1)
    return BenchInputs(
        model=model,
        dtype=dtype,
        spec=spec,
        tasks=tuple(names.values()),
        texts=tuple(tuple(prompt.text for prompt in parts[1][task]) for task in tasks),
        planned=planned,
        served=served,
        profile=profile,
        expert_s=expert_s,
        even_bytes_s=spec.hidden_size * DTYPES[dtype].itemsize / expert_s,
    )


def _cut(prompt: Prompt, words: int) -> Prompt:
    return replace(prompt, text=" ".join(prompt.text.split(" ")[-words:])) if words else prompt
