"""Results of a bench of serving: medians over paired rounds, ratios, and bounds from bytes and compute."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from moetool import tables
from moetool.bench.serving_runs import PhaseTimes, ServingRun
from moetool.json_files import JsonRecord
from moetool.machine import Machine

RESIDENT = "all in memory"
PLAIN = "transformers, all in memory"
OFFLOADED = "transformers, offloaded"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """Bounds of one phase of a line, in seconds per forward.

    Attributes:
        compute_s: seconds of the same forwards with every expert in memory, in the same round.
        io_s: seconds to read this line's bytes per forward, at the disk's rate in the same round.
        sum_s: sum of both: the bound of a policy without prefetching.
        larger_s: maximum of both: the bound of a policy that prefetches.
        reads_ahead: whether any byte of this phase was prefetched, which selects the bound.
        x_bound: the line's seconds over that bound.
        x_resident: the line's seconds over `compute_s`.
    """

    compute_s: float
    io_s: float
    sum_s: float
    larger_s: float
    reads_ahead: bool
    x_bound: float
    x_resident: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingLine:
    """Results of one policy with one budget: medians over the rounds.

    Attributes:
        policy: its name, or the baseline: `RESIDENT`, `PLAIN`, `OFFLOADED`.
        budget_bytes, slots: size of the pool; None without one.
        ttft_s: seconds of a prompt's forwards, median over requests.
        tpot_p50_s, tpot_p95_s, tpot_mean_s: seconds per output token.
        hit_rate: share of the experts needed in decode that were resident.
        bytes_per_token: bytes read per decoded token.
        prompt_bytes: bytes read per prompt.
        stall_share: share of decode time spent waiting for bytes.
        booking_share: share of decode time spent in policy, predictor and residency.
        prefill, decode: the bounds of the two phases; None without a resident line.
        as_replayed: whether the counts of every round are those of `moetool replay`; None without a trace.
        rounds: raw values.
        prompt_cpu_s, token_cpu_s: CPU seconds per prompt and per output token, over all threads.
        tokens_s: output tokens per second of a run, prompts included.
        form: data type of the experts, if forms are compared.
        memory_bytes: total memory, if forms are compared; equal for all forms.
    """

    policy: str
    budget_bytes: int | None
    slots: int | None
    ttft_s: float
    tpot_p50_s: float
    tpot_p95_s: float
    tpot_mean_s: float
    hit_rate: float | None
    bytes_per_token: float
    prompt_bytes: float
    stall_share: float
    booking_share: float
    prefill: Bound | None
    decode: Bound | None
    as_replayed: bool | None = None
    rounds: tuple[dict[str, Any], ...] = ()
    prompt_cpu_s: float = 0.0
    token_cpu_s: float = 0.0
    tokens_s: float = 0.0
    form: str = ""
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """A policy that needs the future, from replay: the fewest bytes, and their bounds.

    Attributes:
        sum_s, larger_s: as in `Bound`, per decoded token; None without a resident line.
    """

    policy: str
    budget_bytes: int
    slots: int
    hit_rate: float
    bytes_per_token: float
    sum_s: float | None
    larger_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingConditions(JsonRecord):
    """Conditions and workload of a bench of serving.

    Attributes:
        machine, threads, io_threads, dtype, command: the conditions.
        load_average: load average before the run.
        direct: whether reads bypass the page cache.
        requests, prompt_tokens, new_tokens, rounds: the workload; prompt tokens of each request.
        notes: notes for the reader.
    """

    machine: Machine
    load_average: float
    threads: int
    io_threads: int
    dtype: str
    command: str
    direct: bool
    requests: int
    prompt_tokens: tuple[int, ...]
    new_tokens: int
    rounds: int
    notes: tuple[str, ...] = ()

    def print_header(self, subject: str, disk: str) -> None:
        """The conditions, one per line.

        Args:
            subject: description of the model.
            disk: read rate of whole experts.
        """
        prompts = " to ".join(map(str, sorted({min(self.prompt_tokens), max(self.prompt_tokens)})))
        tables.print_paragraph(
            f"{subject}; batch 1, requests: {self.requests}, prompts of {prompts} tokens, {self.new_tokens} new tokens "
            f"each; medians of {self.rounds} rounds"
        )
        tables.print_paragraph(
            f"{self.machine.cpu}, {self.threads} of {self.machine.cores} cores for compute, {self.io_threads} I/O "
            f"threads, {self.dtype}, load {self.load_average:.1f}, torch {self.machine.torch}"
        )
        print(f"{disk}, {'past the page cache' if self.direct else 'THROUGH THE PAGE CACHE'}")
        print(self.command)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeBench(ServingConditions):
    """Results of a bench of policies and budgets.

    Attributes:
        model: name of the model.
        experts_bytes: bytes of all its experts in slots.
        disk_bytes_s: disk rate for whole experts with the best number of threads; median over rounds.
        disk_threads: that number.
        disk_rates: rate by number of threads.
        routes: folder of the forced routes; None if the routers chose.
        lines: one per policy and budget, and the baselines.
        replayed: policies that cannot be served.
        refused: transformers' refusal to run the model offloaded.
    """

    model: str
    experts_bytes: int
    disk_bytes_s: float
    disk_threads: int
    disk_rates: dict[int, float]
    routes: str | None
    lines: tuple[ServingLine, ...]
    replayed: tuple[Replayed, ...]
    refused: str | None


def summarize(
    policy: str,
    runs: Sequence[ServingRun],
    resident: Sequence[ServingRun] | None,
    rates: Sequence[float],
    *,
    budget_bytes: int | None = None,
    slots: int | None = None,
    **more: Any,
) -> ServingLine:
    """Make a line from its runs, one per round.

    Args:
        resident: the runs of the same rounds with every expert in memory.
        rates: disk rates of the same rounds in bytes per second.
        more: other fields of the line.
    """

    def median(value: Callable[[ServingRun], float]) -> float:
        return statistics.median(map(value, runs))

    def bound(phase: Callable[[ServingRun], PhaseTimes]) -> Bound | None:
        return None if resident is None else _bound([*map(phase, runs)], [*map(phase, resident)], rates)

    counts = runs[0].decode_counts
    return ServingLine(
        policy=policy,
        budget_bytes=budget_bytes,
        slots=slots,
        ttft_s=median(lambda run: run.prefill.quantile_s(0.5)),
        tpot_p50_s=median(lambda run: run.decode.quantile_s(0.5)),
        tpot_p95_s=median(lambda run: run.decode.quantile_s(0.95)),
        tpot_mean_s=median(lambda run: run.decode.mean_s),
        hit_rate=None if counts is None else counts.hit_rate,
        bytes_per_token=median(lambda run: run.decode.bytes_per_forward),
        prompt_bytes=median(lambda run: run.prefill.bytes_per_forward),
        stall_share=median(lambda run: run.decode.stall_share),
        booking_share=median(lambda run: run.decode.booking_share),
        prefill=bound(lambda run: run.prefill),
        decode=bound(lambda run: run.decode),
        rounds=tuple(run.to_json() for run in runs),
        prompt_cpu_s=median(lambda run: run.prefill.mean_cpu_s),
        token_cpu_s=median(lambda run: run.decode.mean_cpu_s),
        tokens_s=median(lambda run: run.tokens_s),
        **more,
    )


def _bound(phases: Sequence[PhaseTimes], resident: Sequence[PhaseTimes], rates: Sequence[float]) -> Bound:
    ahead = any(phase.ahead_bytes > 0 for phase in phases)
    compute = [phase.mean_s for phase in resident]
    io = [phase.bytes_per_forward / rate for phase, rate in zip(phases, rates, strict=True)]
    both = [(c + i, max(c, i)) for c, i in zip(compute, io, strict=True)]
    mine = [phase.mean_s for phase in phases]
    return Bound(
        compute_s=statistics.median(compute),
        io_s=statistics.median(io),
        sum_s=statistics.median(total for total, _ in both),
        larger_s=statistics.median(larger for _, larger in both),
        reads_ahead=ahead,
        x_bound=statistics.median(m / pair[ahead] for m, pair in zip(mine, both, strict=True)),
        x_resident=statistics.median(m / c for m, c in zip(mine, compute, strict=True)),
    )


def print_serve_bench(made: ServeBench) -> None:
    """Print the table, with conditions above and notes below."""
    made.print_header(
        f"{made.model}: experts of {tables.count(made.experts_bytes, 'B')}",
        f"disk {made.disk_bytes_s / 1e9:.2f} GB/s in whole experts, {made.disk_threads} at a time",
    )
    replayed = [
        {
            "policy": f"{one.policy} (replay)",
            "memory": tables.count(one.budget_bytes, "B"),
            "slots": str(one.slots),
            "hits": f"{one.hit_rate:.3f}",
            "MB/token": f"{one.bytes_per_token / 1e6:,.1f}",
            "sum": _ms(one.sum_s),
            "max": _ms(one.larger_s),
        }
        for one in made.replayed
    ]
    rows = [[cells.get(head, "") for head in _HEADS] for cells in (*map(_cells, made.lines), *replayed)]
    tables.print_table("Times in milliseconds", _HEADS, rows, num_keys=2)
    for note in _LEGEND:
        tables.print_paragraph(note)
    if made.refused is not None:
        tables.print_paragraph(f"{OFFLOADED}: {made.refused}")
    for note in made.notes:
        tables.print_paragraph(note)


_HEADS: tuple[str, ...] = (
    "policy",
    "memory",
    "slots",
    "TTFT",
    "TPOT p50",
    "p95",
    "x all",
    "hits",
    "MB/token",
    "stall",
    "decisions",
)
_HEADS += ("sum", "max", "x bound")
_LEGEND = (
    "x all: mean time per token, relative to all experts in memory; MB/token: loaded on demand or prefetched",
    "stall, decisions: share of the time waiting for loads, and in cache decisions",
    "sum, max: bounds from compute plus I/O, and from the larger; x bound: relative to the sum (*: to the max)",
)


def _cells(line: ServingLine) -> dict[str, str]:
    """Return the known cells of a line, by heading."""
    bound = line.decode
    cells = {"policy": f"{line.policy}{'*' * (bound is not None and bound.reads_ahead)}"}
    cells |= {"TTFT": _ms(line.ttft_s), "TPOT p50": _ms(line.tpot_p50_s), "p95": _ms(line.tpot_p95_s)}
    if bound is not None:
        cells["x all"] = f"{bound.x_resident:.2f}"
    if line.hit_rate is not None:
        cells["hits"] = f"{line.hit_rate:.3f}"
    if line.slots is not None:
        cells |= {"memory": tables.count(line.budget_bytes or 0, "B"), "slots": str(line.slots)}
        cells["MB/token"] = f"{line.bytes_per_token / 1e6:,.1f}"
        cells |= {
            "stall": tables.percent(line.stall_share, ".0f"),
            "decisions": tables.percent(line.booking_share, ".2f"),
        }
        if bound is not None:
            cells |= {"sum": _ms(bound.sum_s), "max": _ms(bound.larger_s), "x bound": f"{bound.x_bound:.2f}"}
    return cells


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{seconds * 1e3:,.1f}" if seconds < 1 else f"{seconds * 1e3:,.0f}"
