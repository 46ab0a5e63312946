"""Measure a device cell by cell: shapes, policies and shares of the experts, each cell written at once.

The experts follow published routes (`moetool.bench.forced_routes`). All experts fit in host memory, so a miss costs a
copy, and a disk read only once. Policies that need more than routes follow the random routers, at the middle
share and next to lru on the same. `--device cpu` runs the same code on a CPU.
"""

import contextlib
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from moetool import tables
from moetool.bench.plain_generation import time_tokens
from moetool.bench.serving_runs import run_engine
from moetool.bench.serving_setup import ServingBenchOptions, ServingSetup, Subject, open_setup
from moetool.caching._policy import MIN_SLOTS, build_policy, policy_class
from moetool.errors import MoetoolError, UsageError, first_line
from moetool.json_files import JsonRecord
from moetool.models.loading import load_full, parse_device
from moetool.runtime.copies import open_copies, stride_of

POLICIES = ("on_demand", "lru", "foresight", "duoserve", "finemoe", "smoe")
_COPY_BYTES, _COPIES = 2**27, 8
_OF_ROUTES = frozenset({"experts", "weights"})


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


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCell:
    """Results of a policy with a share of the experts, of all experts in memory, or of plain transformers.

    Attributes:
        share: share of experts with a slot.
        routers: whether the model follows its own routers instead of published routes.
        prefill_s: seconds of the prompt's forward.
        decode_s, decode_p95_s: median and 95th percentile of seconds per decoded token.
        moved_token_bytes: bytes copied to the device per decoded token.
        bound_s: seconds for those bytes at the measured bandwidth; 0 if nothing moves.
        hit_rate: hit rate of decoding.
        why: why it is not measured.
    """

    shape: str
    policy: str
    share: float
    routers: bool = False
    prefill_s: float | None = None
    decode_s: float | None = None
    decode_p95_s: float | None = None
    moved_token_bytes: float | None = None
    bound_s: float | None = None
    hit_rate: float | None = None
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuBench(JsonRecord):
    """All cells; `host_bytes_s` is the measured bandwidth from host memory to the device."""

    device: str
    host_bytes_s: float
    options: GpuBenchOptions
    cells: tuple[DeviceCell, ...]
    command: str


def bench_gpu(
    shapes: Sequence[str], routes: Path, *, device: str, options: GpuBenchOptions, folder: Path, command: str
) -> GpuBench:
    """Measure every cell, the most informative first, and write each into `folder`.

    Args:
        shapes: configs without weights; weights are random (`moetool.bench.random_checkpoint`).
        routes: folder with one trace per shape, named after it.

    Raises:
        UsageError: there is no such device.
    """
    where, began = parse_device(device), time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    rate = host_bandwidth(where)
    cells: list[DeviceCell] = []
    looking = [name for name in options.policies if policy_class(name).needs - _OF_ROUTES]
    following = [name for name in options.policies if name not in looking]
    looking = ["lru", *looking] if looking else []
    for shape in shapes:
        name = Path(shape).name
        middle = sorted(options.shares)[len(options.shares) // 2 : len(options.shares) // 2 + 1]
        planned = [("all", 1.0, False), *([("transformers", 1.0, True)] if options.plain else [])]
        planned += [(policy, share, False) for share in options.shares for policy in following]
        planned += [("all", 1.0, True), *((policy, share, True) for share in middle for policy in looking)]
        with contextlib.ExitStack() as stack:
            setup: ServingSetup | None = None
            for policy, share, routers in planned:
                cell = DeviceCell(shape=name, policy=policy, share=share, routers=routers)
                try:
                    if time.monotonic() - began > options.limit_s:
                        raise MoetoolError(f"not started within {options.limit_s:.0f} s")
                    if setup is None:
                        setup = _open(shape, routes / name, where, options, folder, stack)
                    cell = _measure(cell, setup, where, rate, options)
                except (MoetoolError, torch.OutOfMemoryError) as error:
                    cell = replace(cell, why=first_line(error))
                file = f"{name}-{cell.policy}-{cell.share:g}{'-routers' * cell.routers}.json"
                (folder / file).write_text(json.dumps(asdict(cell)) + "\n")
                tables.narrate(f"moetool: {' '.join(_row(cell))}")
                cells.append(cell)
    return GpuBench(device=_device_name(where), host_bytes_s=rate, options=options, cells=tuple(cells), command=command)


def host_bandwidth(device: torch.device) -> float:
    """Bytes per second of copies from host memory (pinned for a GPU) to the device; best of several."""
    copies = open_copies(device)
    try:
        source, target = copies.host_memory(_COPY_BYTES), copies.device_memory(_COPY_BYTES)
        best = float("inf")
        for _ in range(_COPIES):
            began = time.perf_counter()
            copies.finish(copies.copy(source, target, None))
            best = min(best, time.perf_counter() - began)
        return _COPY_BYTES / best
    finally:
        copies.close()


def print_gpu(made: GpuBench) -> None:
    """Print one table, a row per cell."""
    heads = ("shape", "policy", "experts", "prefill s", "ms/token", "p95", "MB/token", "bound ms", "hits")
    title = f"{made.device}: {made.host_bytes_s / 1e9:.1f} GB/s from host memory"
    tables.print_table(title, heads, [_row(cell) for cell in made.cells if not cell.why], num_text=2)
    print("bound: time of the moved bytes at that bandwidth; (own): routes of the model's random routers")
    for why in dict.fromkeys(cell.why for cell in made.cells if cell.why):
        missing = [f"{cell.shape} {cell.policy} {tables.percent(cell.share)}" for cell in made.cells if cell.why == why]
        tables.print_paragraph(f"not measured: {', '.join(missing)}: {why}")
    print(made.command)


def _open(
    shape: str, routes: Path, device: torch.device, options: GpuBenchOptions, folder: Path, stack: contextlib.ExitStack
) -> ServingSetup:
    if not routes.is_dir():
        raise MoetoolError(f"no routes at {routes}")
    subject = Subject(shape=shape, layers=options.layers, routes=routes, work=folder / "work")
    settings = ServingBenchOptions(requests=1, new_tokens=options.new_tokens, device=device.type)
    return open_setup(subject, settings, {}, stack)


def _measure(
    cell: DeviceCell, setup: ServingSetup, device: torch.device, rate: float, options: GpuBenchOptions
) -> DeviceCell:
    loaded = setup.loaded
    assert loaded.files is not None
    stored_bytes = loaded.files.stored_bytes
    if cell.policy == "transformers":
        full = load_full(loaded.checkpoint, next(iter(loaded.model.parameters())).dtype, device)
        for _ in range(2):  # the first one warms up
            prefill_s, seconds = time_tokens(full.model, setup.workload.prompts[0], setup.workload.new_tokens)
        return _filled(cell, prefill_s, seconds)
    name = "lru" if cell.policy == "all" else cell.policy
    kind = policy_class(name)
    if kind.needs_predictor:
        raise MoetoolError(f"policy {name} needs a predictor of these routes")
    if kind.needs_future:
        raise MoetoolError(f"policy {name} needs future requests")
    if cell.routers and setup.forced is not None:
        setup.forced.close()
        loaded = replace(loaded, spec=loaded.checkpoint.spec)
    total = loaded.spec.total_experts
    slots = max(MIN_SLOTS, int(cell.share * total))
    run = run_engine(
        loaded,
        build_policy(name, loaded.spec, {}, slots),
        setup.workload,
        io_threads=options.io_threads,
        forced=None if cell.routers else setup.forced,
        warm=build_policy(name, loaded.spec, {}, slots),  # host memory then holds the experts
        host_memory_bytes=None if cell.share == 1 else total * stride_of(stored_bytes),
    )
    moved = run.decode.moved_bytes / len(run.decode.seconds)
    return replace(
        _filled(cell, statistics.median(run.prefill.seconds), run.decode.seconds),
        moved_token_bytes=moved,
        bound_s=moved / rate,
        hit_rate=None if run.decode_counts is None else run.decode_counts.hit_rate,
    )


def _filled(cell: DeviceCell, prefill_s: float, seconds: Sequence[float]) -> DeviceCell:
    p95 = float(np.quantile(seconds, 0.95))
    return replace(cell, prefill_s=prefill_s, decode_s=statistics.median(seconds), decode_p95_s=p95)


def _row(cell: DeviceCell) -> tuple[str, ...]:
    first = (cell.shape, cell.policy + " (own)" * cell.routers, tables.percent(cell.share))
    if cell.prefill_s is None or cell.decode_s is None or cell.decode_p95_s is None:
        return (*first, "not measured:", cell.why)
    return (
        *first,
        f"{cell.prefill_s:.3f}",
        f"{1e3 * cell.decode_s:.2f}",
        f"{1e3 * cell.decode_p95_s:.2f}",
        f"{(cell.moved_token_bytes or 0) / 1e6:.1f}",
        f"{1e3 * (cell.bound_s or 0):.2f}",
        "" if cell.hit_rate is None else f"{cell.hit_rate:.2f}",
    )


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
