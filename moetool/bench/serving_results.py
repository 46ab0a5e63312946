"""Results of a bench of serving: medians over paired rounds, ratios, and bounds from bytes and compute."""

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from moetool.base import tables as printed
from moetool.bench.bench_result import BenchResult, Row, median, table

RESIDENT = "all in memory"
_MEDIANS = {
    "ttft_s": ("prefill", "p50_s"),
    "tpot_p50_s": ("decode", "p50_s"),
    "tpot_p95_s": ("decode", "p95_s"),
    "tpot_mean_s": ("decode", "mean_s"),
    "prompt_cpu_s": ("prefill", "mean_cpu_s"),
    "token_cpu_s": ("decode", "mean_cpu_s"),
    "bytes_per_token": ("decode", "mean_bytes"),
    "prompt_bytes": ("prefill", "mean_bytes"),
    "stall_share": ("decode", "stall_share"),
    "booking_share": ("decode", "booking_share"),
}
"""Values of a row by phase and name in `moetool.bench.serving_runs.phase_row`."""


def serving_row(
    policy: str, runs: Sequence[Row], resident: Sequence[Row] | None, rates: Sequence[float], **more: Any
) -> Row:
    """Return the results of one policy with one budget, from its runs, one per round: medians over the rounds.

    Args:
        policy: its name, or `RESIDENT`.
        runs: by `moetool.bench.serving_runs.run_row`.
        resident: the runs of the same rounds with every expert in memory.
        rates: disk rates of the same rounds in bytes per second. These and the resident runs may be of more rounds.
        more: other values.

    Returns:
        The medians; `hit_rate`, the share of the experts needed in decode that were resident; `tokens_s`, output tokens
        per second of a run, prompts included; `prefill` and `decode`, bounds of the phases (`_bound`), None without a
        resident line; `rounds`, the runs.
    """

    def bound(phase: str) -> Row | None:
        if resident is None:
            return None
        return _bound([run[phase] for run in runs], [run[phase] for run in resident], rates)

    return {
        "policy": policy,
        **more,
        **{name: statistics.median(run[phase][key] for run in runs) for name, (phase, key) in _MEDIANS.items()},
        "hit_rate": runs[0]["hit_rate"],
        "tokens_s": median(runs, "tokens_s"),
        "prefill": bound("prefill"),
        "decode": bound("decode"),
        "rounds": list(runs),
    }


def _bound(phases: Sequence[Row], resident: Sequence[Row], rates: Sequence[float]) -> Row:
    """Return bounds of a phase in seconds per forward.

    Returns:
        compute_s: seconds of the same forwards with every expert in memory, in the same round.
        io_s: seconds to read this line's bytes, at the disk's rate in the same round.
        sum_s, larger_s: bounds of a policy without prefetching, and of one that prefetches.
        reads_ahead: whether any byte was prefetched, which selects the bound.
        x_bound, x_resident: the line's seconds over that bound, and over `compute_s`.
    """
    ahead = any(phase["ahead_bytes"] > 0 for phase in phases)
    compute = [phase["mean_s"] for phase in resident]
    io = [phase["mean_bytes"] / rate for phase, rate in zip(phases, rates, strict=False)]
    both = [(c + i, max(c, i)) for c, i in zip(compute, io, strict=False)]
    mine = [phase["mean_s"] for phase in phases]
    return {
        "compute_s": statistics.median(compute),
        "io_s": statistics.median(io),
        "sum_s": statistics.median(total for total, _ in both),
        "larger_s": statistics.median(larger for _, larger in both),
        "reads_ahead": ahead,
        "x_bound": statistics.median(m / pair[ahead] for m, pair in zip(mine, both, strict=False)),
        "x_resident": statistics.median(m / c for m, c in zip(mine, compute, strict=False)),
    }


def tables(made: BenchResult) -> Iterator[Any]:
    """Sentences about model, workload and disk; the table of policies and budgets, with its legend."""
    facts, options = made.facts, made.options
    lengths, rates = facts["prompt_tokens"], facts["disk_bytes_s"]
    prompts = " to ".join(map(str, sorted({min(lengths), max(lengths)})))
    yield (
        f"{facts['model']}: experts of {printed.count(facts['experts_bytes'], 'B')}; batch 1, {len(lengths)} requests, "
        f"prompts of {prompts} tokens, {options['new_tokens']} new tokens each; medians of {options['rounds']} rounds"
    )
    cache = "past the page cache" if facts["direct"] else "THROUGH THE PAGE CACHE"
    yield (
        f"disk: whole experts at {max(rates.values()) / 1e9:.2f} GB/s, {max(rates, key=rates.get)} at a time, {cache}; "
        f"{facts['threads']} compute and {options['io_threads']} I/O threads, {facts['dtype']}"
    )
    layers = facts.get("layers")  # files of earlier versions lack it
    for row in made.of(policy=RESIDENT) if layers else ():
        yield (
            f"{layers} MoE layers; with all in memory a token takes {1e3 * row['token_cpu_s'] / layers:.2f} ms of "
            "processor time a layer, weights included"
        )
    yield table(
        "Times in milliseconds",
        made.rows,
        {
            "policy": (_title, "s"),
            "memory": ("budget_bytes", "bytes"),
            "slots": ("slots", "d"),
            "TTFT": ("ttft_s", "ms"),
            "TPOT p50": ("tpot_p50_s", "ms"),
            "p95": ("tpot_p95_s", "ms"),
            "x all": ("decode.x_resident", ".2f"),
            "hits": ("hit_rate", ".3f"),
            "MB/token": ("bytes_per_token", "MB"),
            "stall": ("stall_share", ".0%"),
            "decisions": ("booking_share", ".2%"),
            "sum": ("decode.sum_s", "ms"),
            "max": ("decode.larger_s", "ms"),
            "x bound": ("decode.x_bound", ".2f"),
        },
        num_keys=2,
    )
    yield "x all: mean time per token, relative to all experts in memory; MB/token: loaded on demand or prefetched"
    yield "stall, decisions: share of the time waiting for loads, and in cache decisions"
    yield "sum, max: bounds from compute plus I/O, and from the larger; x bound: relative to the sum (*: to the max)"
    for row in made.of(as_replayed=False):
        yield f"{row['policy']} with {row['slots']} slots: the counts differ from replay"


def _title(row: Row) -> str:
    return row["policy"] + "*" * (row["decode"] or {}).get("reads_ahead", False)
