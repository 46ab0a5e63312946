"""Compare policies in a live engine: TTFT, time per token and bytes, next to their bounds.

Every line runs once per round, so that a slow minute of the machine affects all lines. Each run starts cold, with a new
policy and an empty pool, so decisions are equal in every round and only times differ.
"""

import contextlib
import copy
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from moetool.bench.bench_result import BenchResult, Row, in_rounds, recorded
from moetool.bench.forced_routes import ForcedRoutes
from moetool.bench.serving_results import OFFLOADED, PLAIN, RESIDENT, serving_row
from moetool.bench.serving_runs import Workload, run_engine, run_plain
from moetool.bench.serving_setup import ServingBenchOptions, ServingSetup, Subject, open_setup
from moetool.bench.transformers_offload import open_offloaded, refusal
from moetool.caching._policy import Policy, build_policy, parse_options, policy_class, slots_within
from moetool.config import parse_bytes
from moetool.errors import CapacityError
from moetool.machine import memory_bytes
from moetool.models.expert_files import ExpertFiles
from moetool.models.loading import LoadedModel, load_full
from moetool.runtime.decoding import kv_cache_bytes
from moetool.tables import count
from moetool.tuning.probes.disk import THREADS, DiskProbe
from moetool.tuning.replay import ReplayRow, ReplaySetup, replay
from moetool.types import ModelSpec

_PLAIN_BYTES = 2**30  # models with at most this many bytes of experts also run whole in transformers
READINGS = 4  # disk readings per round and number of threads; the first is warm-up


@dataclass(frozen=True, slots=True)
class LineToServe:
    """A line to measure.

    Attributes:
        loaded: the model that serves it.
        policy: its name, or that of a baseline.
        build: makes the policy, anew for each run; returns transformers' own model instead of a policy for a baseline
            without a pool.
        budget_bytes, slots: size of the pool; None without one.
        replayed: counts from `moetool replay`.
        warm: whether one unmeasured run precedes.
        form: data type of the experts, if forms are compared.
        more: other values of its row.
    """

    loaded: LoadedModel
    policy: str
    build: Callable[[], Any]
    budget_bytes: int | None = None
    slots: int | None = None
    replayed: ReplayRow | None = None
    warm: bool = False
    form: str = ""
    more: Row = field(default_factory=dict)


def bench_serve(
    subject: Subject,
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
        policies: names; policies that need the future are replayed only.
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
        futures, entries, made.notes = _entries(setup, kinds, sizes, values, chosen.pool)
        if chosen.resident:
            build = _builder("lru", setup, {}, spec.total_experts)
            resident = LineToServe(setup.loaded, RESIDENT, build, whole, spec.total_experts, warm=True)
            entries.insert(0, resident)
        if not entries:
            why = "; ".join(made.notes) or "policies that need future requests are replayed only"
            raise CapacityError(f"no line can be served: {why}; give larger budgets or other policies")
        dense = _require_memory(setup, entries, chosen.products)
        others, refused = _of_transformers(setup, chosen, dense + sizes[0], whole, stack)
        entries += others
        made.facts = {
            "model": setup.name,
            "experts_bytes": whole,
            "routes": None if setup.part is None else str(setup.part.path),
            "refused": refused,
            **workload_facts([setup.loaded], setup.workload),
        }
        measure_rounds(made, entries, setup.workload, setup.forced, chosen, on_progress, futures)
    return made


def workload_facts(forms: Sequence[LoadedModel], workload: Workload) -> Row:
    """Facts of the rows of a bench of serving: threads, data type, whether reads bypass the page cache, prompts."""
    return {
        "threads": torch.get_num_threads(),
        "dtype": str(forms[0].model.dtype).removeprefix("torch."),
        "direct": all(_files(loaded).shards.direct for loaded in forms),
        "prompt_tokens": [*map(len, workload.prompts)],
    }


def _files(loaded: LoadedModel) -> ExpertFiles:
    assert loaded.files is not None, "experts are read lazily"
    return loaded.files


def _entries(
    setup: ServingSetup,
    kinds: Mapping[str, type[Policy]],
    sizes: Sequence[int],
    values: Mapping[str, Mapping[str, Any]],
    pool: str,
) -> tuple[list[ReplayRow], list[LineToServe], list[str]]:
    """Rows of policies that are only replayed, lines to serve, and notes about them."""
    spec = setup.loaded.spec
    futures: list[ReplayRow] = []
    entries: list[LineToServe] = []
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
        if kind.needs_future:
            futures += rows.values()
            continue
        same: dict[int, list[int]] = {}
        for size in fitting:
            build = _builder(name, setup, given, slots_within(spec, size))
            slots = build().num_slots
            same.setdefault(slots, []).append(size)
            if len(same[slots]) == 1:
                row = rows.get(size)
                entries.append(LineToServe(setup.loaded, name, build, size, slots, replayed=row))
        notes += [
            f"{name} uses {slots} slots with {_sizes(more)} too: measured once"
            for slots, (_, *more) in same.items()
            if more
        ]
    return futures, entries, notes


def _sizes(sizes: Sequence[int]) -> str:
    return " and ".join(count(size, "B") for size in sizes)


def _builder(name: str, setup: ServingSetup, values: Mapping[str, Any], slots: int) -> Callable[[], Policy]:
    spec: ModelSpec = setup.loaded.spec
    predictor = setup.predictor if policy_class(name).uses(setup.predictor) else None
    # A predictor with memory starts each run without it.
    return lambda: build_policy(name, spec, values, slots, predictor=copy.deepcopy(predictor))


def _require_memory(setup: ServingSetup, entries: Sequence[LineToServe], products: bool) -> int:
    """Bytes of the model without experts. Raises: CapacityError: the largest pool does not fit."""
    loaded, kv_tokens = setup.loaded, setup.workload.kv_tokens
    dense = loaded.checkpoint.dense_bytes(loaded.model.dtype, loaded.device.type, products)
    kv = kv_cache_bytes(loaded.model.config.get_text_config(), loaded.model.dtype, kv_tokens)
    largest = max(entry.slots or 0 for entry in entries) * _files(loaded).slot_bytes
    if largest + kv > (free := memory_bytes()[1]):
        raise CapacityError(
            f"the largest pool takes {largest:,} bytes beside {kv:,} of KV cache, and {free:,} are free; give fewer "
            "--layers, smaller budgets, or leave out the line with all experts: --set bench.resident=false"
        )
    return dense + kv


def _of_transformers(
    setup: ServingSetup,
    options: ServingBenchOptions,
    offload_bytes: int,
    experts_bytes: int,
    stack: contextlib.ExitStack,
) -> tuple[list[LineToServe], str | None]:
    """Lines of transformers' own models, and why one is missing."""
    others: list[LineToServe] = []
    checkpoint, dtype = setup.loaded.checkpoint, setup.loaded.model.dtype
    if options.resident and experts_bytes <= _PLAIN_BYTES:
        full = load_full(checkpoint, dtype)
        others.append(LineToServe(setup.loaded, PLAIN, lambda: full.model))
        if setup.forced is not None:
            setup.forced.attach(full.layers)
    if not options.offload:
        return others, None
    scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="moetool-bench-"))
    opened = open_offloaded(checkpoint.path, dtype, offload_bytes, scratch)
    if isinstance(opened, str):
        return others, opened
    model, layers = opened
    if setup.forced is not None:
        setup.forced.attach(layers)
    return [*others, LineToServe(setup.loaded, OFFLOADED, lambda: model)], None


def measure_rounds(
    made: BenchResult,
    lines: Sequence[LineToServe],
    workload: Workload,
    forced: ForcedRoutes | None,
    options: ServingBenchOptions,
    on_progress: Callable[[int], None],
    futures: Sequence[ReplayRow] = (),
) -> None:
    """Run every line once per round, after reading each form's experts, and keep the rows.

    Args:
        on_progress: called with the percentage done.
        futures: rows of policies that are only replayed.

    Effects: adds the facts `disk_bytes_s`, median read rates of whole experts by form and number of threads, and
        `refused`, transformers' refusal to run the model offloaded.
    """
    forms = {line.form: _files(line.loaded) for line in lines}
    disk: dict[str, dict[int, list[float]]] = {form: {threads: [] for threads in THREADS} for form in forms}

    def run(line: LineToServe, number: int) -> Row | None:
        for form, files in forms.items():
            if len(disk[form][THREADS[0]]) == number:  # the round begins
                for threads, rate in disk_rates(files, THREADS).items():
                    disk[form][threads].append(rate)
        if line.slots is not None:
            slots, warm = options.layer_slots(line.loaded.spec, line.slots), line.build() if line.warm else None
            how: dict[str, Any] = {"io_threads": options.io_threads, "layer_slots": slots, "warm": warm}
            return run_engine(line.loaded, line.build(), workload, forced=forced, **how)
        if line.policy == OFFLOADED and made.facts["refused"]:
            return None
        try:
            return run_plain(line.build(), workload, forced)
        except Exception as error:
            if line.policy != OFFLOADED:
                raise
            made.facts["refused"] = refusal(error)
            return None

    def rows(measured: list[tuple[LineToServe, list[Row]]]) -> Iterator[Row]:
        medians = {form: {n: statistics.median(rates) for n, rates in each.items()} for form, each in disk.items()}
        made.facts["disk_bytes_s"] = medians
        rates = {form: disk[form][max(each, key=lambda n: each[n])] for form, each in medians.items()}
        base = next((runs for line, runs in measured if line.policy == RESIDENT), None)
        for line, runs in measured:
            if line.policy != OFFLOADED or not made.facts["refused"]:
                yield _row(line, runs, base, rates[line.form])
        yield from (_foreseen(one, base, rates[""]) for one in futures)

    in_rounds(made, lines, options.rounds, run, rows, on_progress)


def disk_rates(files: ExpertFiles, counts: Sequence[int]) -> dict[int, float]:
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


def _row(entry: LineToServe, runs: Sequence[Row], resident: Sequence[Row] | None, rates: Sequence[float]) -> Row:
    """Return the results of a line; arguments and values as of `serving_row`.

    `as_replayed` is whether the counts of every round are those of `moetool replay`; None without a trace.
    """
    row = entry.replayed
    equal = None
    if row is not None:
        counts = row.prefill.to_json(), row.decode.to_json()
        equal = all((run["prefill_counts"], run["decode_counts"]) == counts for run in runs)
    sizes = {"budget_bytes": entry.budget_bytes, "slots": entry.slots, "as_replayed": equal}
    return serving_row(entry.policy, runs, resident, rates, **sizes, **entry.more)


def _foreseen(row: ReplayRow, resident: Sequence[Row] | None, rates: Sequence[float]) -> Row:
    """Results of a policy that needs the future, from replay: the fewest bytes, and their bounds."""
    io = [row.bytes_per_decode_token / rate for rate in rates]
    both = [] if resident is None else [(run["decode"]["mean_s"], i) for run, i in zip(resident, io, strict=False)]
    return {
        "policy": row.policy,
        "budget_bytes": row.budget_bytes,
        "slots": row.slots,
        "hit_rate": row.decode.hit_rate,
        "bytes_per_token": row.bytes_per_decode_token,
        "decode": {"sum_s": statistics.median(map(sum, both)), "larger_s": statistics.median(map(max, both))}
        if both
        else None,
    }
