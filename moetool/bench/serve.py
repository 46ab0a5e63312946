"""Compare policies in a live engine: TTFT, time per token and bytes, next to their bounds.

Every line runs once per round, so that a slow minute of the machine affects all lines. Each run starts cold, with a new
policy and an empty pool, so decisions are equal in every round and only times differ.
"""

import contextlib
import copy
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moetool.base.config import parse_bytes
from moetool.base.errors import CapacityError
from moetool.base.machine import memory_bytes
from moetool.base.tables import count
from moetool.base.types import ModelSpec
from moetool.bench.bench_result import BenchResult, Row, in_rounds, recorded
from moetool.bench.serving_results import RESIDENT, serving_row
from moetool.bench.serving_runs import run_engine
from moetool.bench.serving_setup import BenchModel, ServingBenchOptions, ServingSetup, open_setup
from moetool.caching.policy import Policy, build_policy, parse_options, policy_class, slots_within
from moetool.measuring.probes.disk import THREADS, DiskProbe
from moetool.models.experts.expert_files import ExpertFiles
from moetool.models.loading import LoadedModel
from moetool.runtime.decoding import cache_bytes
from moetool.runtime.experts.resident_forward import options_beside_gpu
from moetool.tuning.replay import ReplayRow, ReplaySetup, replay

READINGS = 4  # disk readings per round and number of threads; the first is warm-up


@dataclass(frozen=True, slots=True)
class BenchLine:
    """A line to measure.

    Attributes:
        policy: its name, or `RESIDENT`.
        build: makes the policy, anew for each run.
        budget_bytes, slots: size of the pool.
        replayed: counts from `moetool replay`.
        warm: whether one unmeasured run precedes.
    """

    policy: str
    build: Callable[[], Policy]
    budget_bytes: int
    slots: int
    replayed: ReplayRow | None = None
    warm: bool = False


def bench_serve(
    subject: BenchModel,
    *,
    policies: Sequence[str],
    budgets: Sequence[str],
    options: ServingBenchOptions | None = None,
    policy_options: Mapping[str, Mapping[str, Any]] | None = None,
    on_progress: Callable[[int], None] = lambda done: None,
    file: Path | None = None,
) -> BenchResult:
    """Time every policy with every budget at batch 1, next to the same engine with all experts in memory.

    Args:
        policies: names of policies that need no future requests.
        budgets: expert memory in bytes, or a share like `25%`.
        policy_options: values for the policies' `Options`, by name.
        on_progress: called with the percentage done.
        file: see `BenchResult`.

    Effects: writes a random checkpoint and a part of the trace into `subject.work`; sets torch's number of threads;
        allocates one pool at a time, the largest that of all experts.

    Raises:
        UsageError: an unknown name or option, too few requests, or incompatible arguments.
        MismatchError: model, routes and predictor do not match.
        CapacityError: disk, memory or a budget is too small.
    """
    chosen, values = options or ServingBenchOptions(), policy_options or {}
    kinds = {name: policy_class(name) for name in policies}
    with contextlib.ExitStack() as stack, recorded("serve", chosen, file) as made:
        setup = open_setup(subject, chosen, kinds, stack)
        spec = setup.loaded.spec
        whole = spec.total_experts * _files(setup.loaded).slot_bytes
        sizes = sorted({parse_bytes(text, whole) for text in budgets})
        entries, made.notes = _entries(setup, kinds, sizes, values, chosen.pool)
        if chosen.resident:
            build = _builder("lru", setup, {}, spec.total_experts)
            resident = BenchLine(RESIDENT, build, whole, spec.total_experts, warm=True)
            entries.insert(0, resident)
        if not entries:
            why = "; ".join(made.notes)
            raise CapacityError(f"no line can be served: {why}; give larger budgets or other policies")
        _require_memory(setup, entries)
        made.facts = {
            "model": setup.name,
            "layers": len(spec.layer_ids_L),
            "experts_bytes": whole,
            "routes": None if setup.part is None else str(setup.part.path),
            "threads": torch.get_num_threads(),
            "dtype": str(setup.loaded.model.dtype).removeprefix("torch."),
            "direct": _files(setup.loaded).shards.direct,
            "prompt_tokens": [*map(len, setup.workload.prompts)],
        }
        _measure(made, entries, setup, chosen, on_progress)
    return made


def _files(loaded: LoadedModel) -> ExpertFiles:
    assert loaded.files is not None, "experts are read lazily"
    return loaded.files


def _entries(
    setup: ServingSetup,
    kinds: Mapping[str, type[Policy]],
    sizes: Sequence[int],
    values: Mapping[str, Mapping[str, Any]],
    pool: str,
) -> tuple[list[BenchLine], list[str]]:
    """Lines to serve, and notes about them."""
    spec = setup.loaded.spec
    entries: list[BenchLine] = []
    notes: list[str] = []
    for name, kind in kinds.items():
        given = values.get(name, {})
        fewest = kind.min_slots(spec, parse_options(name, given))
        fitting = [size for size in sizes if slots_within(spec, size) >= fewest]
        if tight := [size for size in sizes if size not in fitting]:
            notes.append(f"{name} needs {fewest} slots: left out with {_sizes(tight)}")
        predictor = setup.predictor if kind.uses(setup.predictor) else None
        rows: dict[int, ReplayRow] = {}
        if setup.part is not None and fitting:
            replaying = ReplaySetup(predictor=predictor, options={name: given}, pool=pool, pool_unit="slots")
            made = replay(setup.part, [name], fitting, replaying)
            rows = {row.budget_bytes: row for row in made}
        same: dict[int, list[int]] = {}
        for size in fitting:
            build = _builder(name, setup, given, slots_within(spec, size))
            slots = build().num_slots
            same.setdefault(slots, []).append(size)
            if len(same[slots]) == 1:
                row = rows.get(size)
                entries.append(BenchLine(name, build, size, slots, replayed=row))
        notes += [
            f"{name} uses {slots} slots with {_sizes(more)} too: measured once"
            for slots, (_, *more) in same.items()
            if more
        ]
    return entries, notes


def _sizes(sizes: Sequence[int]) -> str:
    return " and ".join(count(size, "B") for size in sizes)


def _builder(name: str, setup: ServingSetup, values: Mapping[str, Any], slots: int) -> Callable[[], Policy]:
    spec: ModelSpec = setup.loaded.spec
    predictor = setup.predictor if policy_class(name).uses(setup.predictor) else None
    chosen = options_beside_gpu(policy_class(name), values, setup.loaded, slots)
    # A predictor with memory starts each run without it.
    return lambda: build_policy(name, spec, chosen, slots, predictor=copy.deepcopy(predictor))


def _require_memory(setup: ServingSetup, entries: Sequence[BenchLine]) -> None:
    """Raises: CapacityError: the largest pool does not fit."""
    loaded, kv_tokens = setup.loaded, setup.workload.kv_tokens
    kv = cache_bytes(loaded.checkpoint, loaded.model.dtype, kv_tokens, 1)
    largest = max(entry.slots for entry in entries) * _files(loaded).slot_bytes
    if largest + kv > (free := memory_bytes()[1]):
        raise CapacityError(
            f"the largest pool takes {largest:,} bytes beside {kv:,} of KV cache, and {free:,} are free; give fewer "
            "--layers, smaller budgets, or leave out the line with all experts: --set bench.resident=false"
        )


def _measure(
    made: BenchResult,
    lines: Sequence[BenchLine],
    setup: ServingSetup,
    options: ServingBenchOptions,
    on_progress: Callable[[int], None],
) -> None:
    """Run every line once per round, after reading experts, and keep the rows.

    Args:
        on_progress: called with the percentage done.

    Effects: adds the fact `disk_bytes_s`, median read rates of whole experts by number of threads.
    """
    disk: dict[int, list[float]] = {threads: [] for threads in THREADS}

    def run(line: BenchLine, number: int) -> Row:
        if len(disk[THREADS[0]]) == number:  # the round begins
            for threads, rate in _disk_rates(_files(setup.loaded), THREADS).items():
                disk[threads].append(rate)
        slots, warm = options.layer_slots(setup.loaded.spec, line.slots), line.build() if line.warm else None
        how: dict[str, Any] = {"io_threads": options.io_threads, "layer_slots": slots, "warm": warm}
        return run_engine(setup.loaded, line.build(), setup.workload, forced=setup.forced, **how)

    def rows(measured: list[tuple[BenchLine, list[Row]]]) -> Iterator[Row]:
        medians = {threads: statistics.median(rates) for threads, rates in disk.items()}
        made.facts["disk_bytes_s"] = medians
        rates = disk[max(medians, key=lambda threads: medians[threads])]
        base = next((runs for line, runs in measured if line.policy == RESIDENT), None)
        yield from (_row(line, runs, base, rates) for line, runs in measured)

    in_rounds(made, lines, options.rounds, run, rows, on_progress)


def _disk_rates(files: ExpertFiles, counts: Sequence[int]) -> dict[int, float]:
    """Read rate of whole experts into slots in bytes per second, by number of threads."""
    rates = {}
    for threads in counts:
        probe = DiskProbe(files.shards, files.stored_bytes, threads, files)
        try:
            seconds = [probe.seconds(files.stored_bytes) for _ in range(READINGS)][1:]
        finally:
            probe.close()
        rates[threads] = files.stored_bytes / statistics.median(seconds)
    return rates


def _row(entry: BenchLine, runs: Sequence[Row], resident: Sequence[Row] | None, rates: Sequence[float]) -> Row:
    """Return the results of a line; arguments and values as of `serving_row`.

    `as_replayed` is whether the counts of every round are those of `moetool replay`; None without a trace.
    """
    row = entry.replayed
    equal = None
    if row is not None:
        counts = row.prefill.to_json(), row.decode.to_json()
        equal = all((run["prefill_counts"], run["decode_counts"]) == counts for run in runs)
    sizes = {"budget_bytes": entry.budget_bytes, "slots": entry.slots, "as_replayed": equal}
    return serving_row(entry.policy, runs, resident, rates, **sizes)
