"""Policies against each other in a live engine: time to first token, time per token, bytes, beside their bounds.

Every line runs once a round, so that a slow minute of the machine hits all of them, and each run begins cold: the
same tokens, a new policy, an empty pool. Decisions are then the same in every round, and only time differs.
"""

import contextlib
import copy
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from moetool.bench.offload import open_offloaded, refusal
from moetool.bench.serving_results import OFFLOADED, PLAIN, RESIDENT, Replayed, ServeBench, ServingLine, summarize
from moetool.bench.serving_runs import ServingRun, run_engine, run_plain
from moetool.bench.serving_setup import ServingBenchOptions, ServingSetup, Subject, open_stage
from moetool.caching._policy import Policy, build_policy, parse_options, policy_class, slots_within
from moetool.config import parse_bytes
from moetool.errors import CapacityError
from moetool.machine import load_average, memory_bytes, read_machine
from moetool.models.expert_files import ExpertFiles
from moetool.models.loading import load_full
from moetool.runtime.decoding import kv_cache_bytes
from moetool.tables import count
from moetool.tuning.probes.disk import THREADS, DiskProbe
from moetool.tuning.replay import ReplayRow, ReplaySetup, replay
from moetool.types import ModelSpec

_PLAIN_BYTES = 2**30  # a model whose experts take no more than this is also run by transformers, whole
READINGS = 4  # of the disk, a round and number of threads; the first warms up


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """A line to be.

    Attributes:
        build: makes its policy, anew for each run.
        replayed: what replay says of it.
        warm: whether it runs once unmeasured before.
    """

    policy: str
    budget_bytes: int
    slots: int
    build: Callable[[], Policy]
    replayed: ReplayRow | None = None
    warm: bool = False


def bench_serve(
    subject: Subject,
    *,
    policies: Sequence[str],
    budgets: Sequence[str],
    options: ServingBenchOptions | None = None,
    policy_options: Mapping[str, Mapping[str, Any]] | None = None,
    command: str = "",
    on_progress: Callable[[int], None] | None = None,
) -> ServeBench:
    """Time every policy with every budget, batch 1, beside the same engine with all experts in memory.

    Args:
        policies: names; those that must know the future are replayed and not served.
        budgets: for experts: bytes, or a share like `25%`.
        policy_options: values for the policies' `Options`, by name.
        command: what was typed, to be printed.
        on_progress: called with how much is measured, in percent.

    Effects: writes a random checkpoint and a part of the trace into `subject.work`; sets torch's number of threads;
        allocates one pool at a time, the largest that of all experts.

    Raises:
        UsageError: an unknown name or option, too few requests, or arguments that do not go together.
        MismatchError: model, routes and predictor do not belong together.
        CapacityError: disk, memory or a budget is too small.
    """
    chosen, values = options or ServingBenchOptions(), policy_options or {}
    kinds = {name: policy_class(name) for name in policies}
    busy = load_average()
    with contextlib.ExitStack() as stack:
        stage = open_stage(subject, chosen, kinds, stack)
        files = stage.loaded.files
        assert files is not None
        spec = stage.loaded.spec
        whole = spec.total_experts * files.slot_bytes
        sizes = sorted({parse_bytes(text, whole) for text in budgets})
        futures, entries, notes = _entries(stage, kinds, sizes, values)
        if chosen.resident:
            build = _builder("lru", stage, {}, spec.total_experts)
            resident = _Entry(policy=RESIDENT, budget_bytes=whole, slots=spec.total_experts, build=build, warm=True)
            entries.insert(0, resident)
        if not entries:
            why = "; ".join(notes) or "policies that must know the future are replayed only"
            raise CapacityError(f"there is nothing to serve: {why}; give larger budgets or other policies")
        dense = _require_memory(stage, entries)
        others, refused = _of_transformers(stage, chosen, dense + sizes[0], whole, stack)
        runs, disk, later = _measure(stage, files, entries, others, chosen, on_progress)

        threads = max(disk, key=lambda number: statistics.median(disk[number]))
        base = runs[0] if chosen.resident else None
        lines = [_line(entry, runs[i], base, disk[threads]) for i, entry in enumerate(entries)]
        lines += [
            summarize(name, made, base, disk[threads])
            for name, made in zip(others, runs[len(entries) :], strict=True)
            if len(made) == chosen.rounds
        ]
        notes += [
            f"{line.policy} with {line.slots} slots: the counts are not those of replay"
            for line in lines
            if line.as_replayed is False
        ]
        return ServeBench(
            model=stage.name,
            experts_bytes=whole,
            machine=read_machine(),
            load_average=busy,
            threads=torch.get_num_threads(),
            io_threads=chosen.io_threads,
            dtype=str(stage.loaded.model.dtype).removeprefix("torch."),
            command=command,
            direct=files.shards.direct,
            disk_bytes_s=statistics.median(disk[threads]),
            disk_threads=threads,
            disk_rates={number: statistics.median(rates) for number, rates in disk.items()},
            routes=None if stage.part is None else str(stage.part.path),
            requests=len(stage.workload.prompts),
            prompt_tokens=tuple(map(len, stage.workload.prompts)),
            new_tokens=stage.workload.new_tokens,
            rounds=chosen.rounds,
            lines=tuple(lines),
            replayed=tuple(_foreseen(row, base, disk[threads]) for row in futures),
            refused=later or refused,
            notes=tuple(notes),
        )


def _entries(
    stage: ServingSetup,
    kinds: Mapping[str, type[Policy]],
    sizes: Sequence[int],
    values: Mapping[str, Mapping[str, Any]],
) -> tuple[list[ReplayRow], list[_Entry], list[str]]:
    """The rows of policies that are only replayed, the lines to serve, and what there is to say about them."""
    spec = stage.loaded.spec
    futures: list[ReplayRow] = []
    entries: list[_Entry] = []
    notes: list[str] = []
    for name, kind in kinds.items():
        given = values.get(name, {})
        fewest = kind.min_slots(spec, parse_options(name, given))
        fitting = [size for size in sizes if slots_within(spec, size) >= fewest]
        if tight := [size for size in sizes if size not in fitting]:
            notes.append(f"{name} needs {fewest} slots: left out with {_sizes(tight)}")
        predictor = stage.predictor if kind.uses(stage.predictor) else None
        rows: dict[int, ReplayRow] = {}
        if stage.part is not None and fitting:
            setup = ReplaySetup(predictor=predictor, options={name: given}, pool="slots")
            made = replay(stage.part, [name], fitting, setup)
            rows = {row.budget_bytes: row for row in made}
        if kind.needs_future:
            futures += rows.values()
            continue
        same: dict[int, list[int]] = {}
        for size in fitting:
            build = _builder(name, stage, given, slots_within(spec, size))
            slots = build().num_slots
            same.setdefault(slots, []).append(size)
            if len(same[slots]) == 1:
                row = rows.get(size)
                entries.append(_Entry(policy=name, budget_bytes=size, slots=slots, build=build, replayed=row))
        notes += [
            f"{name} uses {slots} slots with {_sizes(more)} too: measured once"
            for slots, (_, *more) in same.items()
            if more
        ]
    return futures, entries, notes


def _sizes(sizes: Sequence[int]) -> str:
    return " and ".join(count(size, "B") for size in sizes)


def _builder(name: str, stage: ServingSetup, values: Mapping[str, Any], slots: int) -> Callable[[], Policy]:
    spec: ModelSpec = stage.loaded.spec
    predictor = stage.predictor if policy_class(name).uses(stage.predictor) else None
    # One that remembers what it was shown begins each run afresh.
    return lambda: build_policy(name, spec, values, slots, predictor=copy.deepcopy(predictor))


def _require_memory(stage: ServingSetup, entries: Sequence[_Entry]) -> int:
    """The bytes that the model takes without experts. Raises: CapacityError where the largest pool does not fit."""
    loaded, kv_tokens = stage.loaded, stage.workload.kv_tokens
    dense = loaded.checkpoint.dense_bytes(loaded.model.dtype)
    kv = kv_cache_bytes(loaded.model.config.get_text_config(), loaded.model.dtype, kv_tokens)
    assert loaded.files is not None
    largest = max(entry.slots for entry in entries) * loaded.files.slot_bytes
    if largest + kv > (free := memory_bytes()[1]):
        raise CapacityError(
            f"the largest pool takes {largest:,} bytes beside {kv:,} of KV cache, and {free:,} are free; give fewer "
            "--layers, smaller budgets, or leave out the line with all experts: --set bench.resident=false"
        )
    return dense + kv


def _of_transformers(
    stage: ServingSetup,
    options: ServingBenchOptions,
    offload_bytes: int,
    experts_bytes: int,
    stack: contextlib.ExitStack,
) -> tuple[dict[str, Any], str | None]:
    """transformers' own models to run beside, by the name of their line, and why one is missing."""
    others: dict[str, Any] = {}
    checkpoint, dtype = stage.loaded.checkpoint, stage.loaded.model.dtype
    if options.resident and experts_bytes <= _PLAIN_BYTES:
        full = load_full(checkpoint, dtype)
        others[PLAIN] = full.model
        if stage.forced is not None:
            stage.forced.attach(full.layers)
    if not options.offload:
        return others, None
    scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="moetool-bench-"))
    opened = open_offloaded(checkpoint.path, dtype, offload_bytes, scratch)
    if isinstance(opened, str):
        return others, opened
    others[OFFLOADED] = opened[0]
    if stage.forced is not None:
        stage.forced.attach(opened[1])
    return others, None


def _measure(
    stage: ServingSetup,
    files: ExpertFiles,
    entries: Sequence[_Entry],
    others: Mapping[str, Any],
    options: ServingBenchOptions,
    on_progress: Callable[[int], None] | None,
) -> tuple[list[list[ServingRun]], dict[int, list[float]], str | None]:
    """The runs of the entries, then of the others; the disk's rates by threads; what transformers refused to run."""
    runs: list[list[ServingRun]] = [[] for _ in (*entries, *others)]
    disk: dict[int, list[float]] = {threads: [] for threads in THREADS}
    refused = None
    done = 0

    def tick() -> None:
        nonlocal done
        done += 1
        if on_progress is not None:
            on_progress(100 * done // (options.rounds * len(runs)))

    for _ in range(options.rounds):
        for threads, rate in disk_rates(files, THREADS).items():
            disk[threads].append(rate)
        for entry, made in zip(entries, runs, strict=False):
            made.append(
                run_engine(
                    stage.loaded,
                    entry.build(),
                    stage.workload,
                    io_threads=options.io_threads,
                    forced=stage.forced,
                    warm=entry.warm,
                )
            )
            tick()
        for (name, model), made in zip(others.items(), runs[len(entries) :], strict=True):
            if name == OFFLOADED and refused is not None:
                continue
            try:
                made.append(run_plain(model, stage.workload, stage.forced))
            except Exception as error:
                if name != OFFLOADED:
                    raise
                refused = refusal(error)
            tick()
    return runs, disk, refused


def disk_rates(files: ExpertFiles, counts: Sequence[int]) -> dict[int, float]:
    """Bytes a second of reading whole experts into slots, by the number of threads that read."""
    rates = {}
    for threads in counts:
        probe = DiskProbe(files.shards, files.stored_bytes, threads, files)
        try:
            seconds = [probe.seconds(files.stored_bytes) for _ in range(READINGS)][1:]
        finally:
            probe.close()
        rates[threads] = files.stored_bytes / statistics.median(seconds)
    return rates


def _line(
    entry: _Entry, runs: Sequence[ServingRun], resident: Sequence[ServingRun] | None, rates: Sequence[float]
) -> ServingLine:
    row = entry.replayed
    equal = None
    if row is not None:
        equal = all((run.prefill_counts, run.decode_counts) == (row.prefill, row.decode) for run in runs)
    return summarize(
        entry.policy,
        runs,
        resident,
        rates,
        budget_bytes=entry.budget_bytes,
        slots=entry.slots,
        as_replayed=equal,
    )


def _foreseen(row: ReplayRow, resident: Sequence[ServingRun] | None, rates: Sequence[float]) -> Replayed:
    io = [row.bytes_per_decode_token / rate for rate in rates]
    compute = [run.decode.mean_s for run in resident] if resident is not None else None
    return Replayed(
        policy=row.policy,
        budget_bytes=row.budget_bytes,
        slots=row.slots,
        hit_rate=row.decode.hit_rate,
        bytes_per_token=row.bytes_per_decode_token,
        sum_s=None if compute is None else statistics.median(c + i for c, i in zip(compute, io, strict=True)),
        larger_s=None if compute is None else statistics.median(max(c, i) for c, i in zip(compute, io, strict=True)),
    )
