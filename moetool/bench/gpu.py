"""Measure a device cell by cell: shapes, policies and shares of the experts, each cell written at once.

The experts follow published routes (`moetool.bench.forced_routes`). All experts fit in host memory, so a miss costs a
copy, and a disk read only once. Policies that need more than routes follow the random routers, at the middle
share and next to lru on the same. `--device cpu` runs the same code on a CPU.
"""

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from moetool.base.errors import MoetoolError, UsageError, first_line
from moetool.base.tables import narrate, percent
from moetool.bench.bench_result import BenchResult, Row, not_measured, recorded, table
from moetool.bench.plain_generation import time_tokens
from moetool.bench.serving_runs import phase_row, run_engine
from moetool.bench.serving_setup import BenchModel, ServingBenchOptions, ServingSetup, open_setup
from moetool.caching.policy import MIN_SLOTS, build_policy, policy_class
from moetool.models.loading import load_full, parse_device
from moetool.runtime.experts.copies import copy_seconds, is_staged, stride_of
from moetool.runtime.experts.resident_forward import options_beside_gpu

POLICIES = ("on_demand", "lru", "foresight", "duoserve", "finemoe", "smoe")
_COPY_BYTES = 2**27
_OF_ROUTES = frozenset({"experts", "weights"})
_SPLIT = ", split"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuBenchOptions:
    """Settings of `moetool bench gpu --set`.

    Attributes:
        layers: MoE layers of each shape.
        shares: shares of experts with a slot.
        policies: cache policies of the shares below 1.
        new_tokens: generated tokens of the one request.
        limit_s: seconds after which no further cell starts.
        plain: whether transformers also runs the model, all on the device.
        io_threads: threads that read experts into host memory.
    """

    layers: int = 8
    shares: tuple[float, ...] = (0.5, 0.25, 0.125)
    policies: tuple[str, ...] = POLICIES
    new_tokens: int = 32
    limit_s: float = 400.0
    plain: bool = True
    io_threads: int = 2

    def __post_init__(self) -> None:
        if not all(0 < share < 1 for share in self.shares):
            raise UsageError(f"shares is {list(self.shares)}, expected shares above 0 and below 1")
        for name in self.policies:
            policy_class(name)


def bench_gpu(
    shapes: Sequence[str], routes: Path, *, device: str, options: GpuBenchOptions, work: Path, file: Path | None = None
) -> BenchResult:
    """Measure every cell, the most informative first.

    A row has the shape, the policy (or `all` experts in memory, or `transformers`), the share of experts with a slot,
    whether the model follows its own routers instead of published routes, and `why` it is not measured, or:
    `prefill_s`, seconds of the prompt's forward; `decode_s` and `decode_p95_s`, median and 95th percentile per decoded
    token; `moved_token_bytes` copied to the device per decoded token; `bound_s`, their time at the measured bandwidth;
    `hit_rate` of decoding. Means per decoded token: `policy_s` of the policy's decisions, `wait_s` for copies,
    `rest_s` of the device's work and its synchronization, and `hosted_s` of products on the host, beside these. Beside
    a device, lru and foresight run with the split of misses too (`moetool.caching.machine_split`).

    Args:
        shapes: configs without weights; weights are random (`moetool.bench.random_checkpoint`).
        routes: folder with one trace per shape, named after it.
        work: folder of random checkpoints.
        file: see `BenchResult`.

    Raises:
        UsageError: there is no such device.
    """
    where, began = parse_device(device), time.monotonic()
    looking = [name for name in options.policies if policy_class(name).needs - _OF_ROUTES]
    following = [name for name in options.policies if name not in looking]
    looking = ["lru", *looking] if looking else []
    with recorded("gpu", options, file) as made:
        device_name = torch.cuda.get_device_name(where) if where.type == "cuda" else "CPU"
        made.facts = {"device": device_name, "host_bytes_s": _COPY_BYTES / copy_seconds(where, _COPY_BYTES)}
        for shape in shapes:
            name = Path(shape).name
            middle = sorted(options.shares)[len(options.shares) // 2 : len(options.shares) // 2 + 1]
            planned = [("all", 1.0, False), *([("transformers", 1.0, True)] if options.plain else [])]
            both = [f"{name}{_SPLIT}" for name in following if name in ("lru", "foresight") and is_staged(where)]
            planned += [(policy, share, False) for share in options.shares for policy in (*following, *both)]
            planned += [("all", 1.0, True), *((policy, share, True) for share in middle for policy in looking)]
            with contextlib.ExitStack() as stack:
                setup: ServingSetup | None = None
                for policy, share, routers in planned:
                    cell: Row = {"shape": name, "policy": policy, "share": share, "routers": routers}
                    try:
                        if time.monotonic() - began > options.limit_s:
                            raise MoetoolError(f"not started within {options.limit_s:.0f} s")
                        if setup is None:
                            setup = _open(shape, routes / name, where, options, work, stack)
                        cell |= _measure(cell, setup, where, made.facts["host_bytes_s"], options)
                    except (MoetoolError, torch.OutOfMemoryError) as error:
                        cell["why"] = first_line(error)
                    made.add(**cell)
                    told = cell.get("why") or f"{1e3 * cell['decode_s']:.2f} ms/token"
                    narrate(f"moetool: {name} {policy}{' (own)' * routers} {percent(share)}: {told}")
    return made


def tables(made: BenchResult) -> Iterator[Any]:
    """One table, a row per measured cell, and why others were not measured."""
    layers = made.options.get("layers")  # files of earlier versions may lack it
    yield table(
        f"{made.facts['device']}: {made.facts['host_bytes_s'] / 1e9:.1f} GB/s from host memory",
        [row for row in made.rows if "why" not in row],
        {
            "shape": ("shape", "s"),
            "policy": (lambda row: row["policy"] + (" (own)" if row["routers"] else ""), "s"),
            "experts": ("share", ".1%"),
            "prefill s": ("prefill_s", ".3f"),
            "ms/token": (lambda row: 1e3 * row["decode_s"], ".2f"),
            "p95": (lambda row: 1e3 * row["decode_p95_s"], ".2f"),
            "decisions": ("policy_s", "ms"),
            "waits": ("wait_s", "ms"),
            "host": ("hosted_s", "ms"),
            "rest": ("rest_s", "ms"),
            "ms/layer": (lambda row: layers and 1e3 * row["decode_s"] / layers, ".2f"),
            "MB/token": ("moved_token_bytes", "MB"),
            "bound ms": ("bound_s", "ms"),
            "hits": ("hit_rate", ".2f"),
        },
        num_text=2,
    )
    yield "bound: time of the moved bytes at that bandwidth; (own): routes of the model's random routers"
    yield "decisions, waits (for copies), rest (the device and its synchronization): mean ms a token"
    yield "host: ms of products on the host, beside the others"
    yield from not_measured(made, lambda row: f"{row['shape']} {row['policy']} {percent(row['share'])}")


def _open(
    shape: str, routes: Path, device: torch.device, options: GpuBenchOptions, work: Path, stack: contextlib.ExitStack
) -> ServingSetup:
    if not routes.is_dir():
        raise MoetoolError(f"no routes at {routes}")
    subject = BenchModel(shape=shape, layers=options.layers, routes=routes, work=work)
    settings = ServingBenchOptions(requests=1, new_tokens=options.new_tokens, device=device.type)
    return open_setup(subject, settings, {}, stack)


def _measure(cell: Row, setup: ServingSetup, device: torch.device, rate: float, options: GpuBenchOptions) -> Row:
    loaded = setup.loaded
    assert loaded.files is not None
    stored_bytes = loaded.files.stored_bytes
    if cell["policy"] == "transformers":
        full = load_full(loaded.checkpoint, next(iter(loaded.model.parameters())).dtype, device)
        for _ in range(2):  # the first one warms up
            prefill_s, seconds = time_tokens(full.model, setup.workload.prompts[0], setup.workload.new_tokens)
        return _times(prefill_s, phase_row(seconds))
    name = "lru" if cell["policy"] == "all" else cell["policy"].removesuffix(_SPLIT)
    kind = policy_class(name)
    if kind.needs_predictor:
        raise MoetoolError(f"policy {name} needs a predictor of these routes")
    if kind.needs_future:
        raise MoetoolError(f"policy {name} needs future requests")
    if cell["routers"] and setup.forced is not None:
        setup.forced.close()
        loaded = replace(loaded, spec=loaded.checkpoint.spec)
    total = loaded.spec.total_experts
    slots = max(MIN_SLOTS, int(cell["share"] * total))
    chosen = options_beside_gpu(kind, {}, loaded, slots)
    run = run_engine(
        loaded,
        build_policy(name, loaded.spec, chosen, slots),
        replace(setup.workload, splits=cell["policy"].endswith(_SPLIT)),
        io_threads=options.io_threads,
        forced=None if cell["routers"] else setup.forced,
        warm=build_policy(name, loaded.spec, chosen, slots),  # host memory then holds the experts
        host_memory_bytes=None if cell["share"] == 1 else total * stride_of(stored_bytes),
    )
    moved = run["decode"]["mean_moved_bytes"]
    times, decode = _times(run["prefill"]["p50_s"], run["decode"]), run["decode"]
    count = len(decode["seconds"])
    parts = {"policy_s": decode["booking_s"], "wait_s": decode["stall_s"], "hosted_s": decode["hosted_s"]}
    times |= {name: seconds / count for name, seconds in parts.items()}
    times["rest_s"] = decode["mean_s"] - times["policy_s"] - times["wait_s"]
    return {**times, "moved_token_bytes": moved, "bound_s": moved / rate, "hit_rate": run["hit_rate"]}


def _times(prefill_s: float, decode: Row) -> Row:
    times = {"prefill_s": prefill_s, "decode_s": decode["p50_s"], "decode_p95_s": decode["p95_s"]}
    return {**times, "rounds": [decode["seconds"]]}
