"""Setup of a serving bench: a model in memory, its workload, and forced routes."""

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from moetool.base.config import Span, require_within
from moetool.base.errors import UsageError
from moetool.base.types import ModelSpec
from moetool.bench.forced_routes import (
    CutPredictor,
    ForcedRoutes,
    ReplayedRequest,
    bench_spec,
    choose,
    write_part,
)
from moetool.bench.random_checkpoint import cut_spec, random_checkpoint
from moetool.bench.serving_runs import Workload
from moetool.caching.layer_slots import SHARES, equal_slots, require_pool_form
from moetool.caching.policy import Policy
from moetool.models.checkpoint import Checkpoint
from moetool.models.loading import LoadedModel, load_lazy, parse_device, parse_dtype, use_threads
from moetool.prompts import gather as prompt_sets
from moetool.runtime import automatic
from moetool.trace.reader import Trace
from moetool.trace.same_prompts import digest_of_tokens
from moetool.training.predictor import load_predictor


@dataclass(frozen=True, kw_only=True)
class ServingBenchOptions:
    """Options of `moetool bench serve --set bench.NAME=VALUE`.

    Attributes:
        rounds: number of runs per line.
        requests: requests per run, one after the other.
        new_tokens: generated tokens per request; the first comes from the prompt's forward.
        prompt_share: share of a traced request's tokens in its prompt (default: the trace's, or a third if the imported
            file has none).
        dtype: data type of all weights except the experts (default: as in `moetool serve`).
        prefill_chunk: most prompt tokens of one forward (default: as in `moetool serve`).
        pool: `one` for all layers, `layer` or `mixed`, as for `moetool serve`.
        device: compute device: `cpu` or `cuda`.
        threads, io_threads: compute threads (0: automatic), threads for reads.
        seed: seed of random weights and prompts.
        resident: whether to run a line with every expert in memory, which the bounds need.
        products: as for `moetool.runtime.serve_options.ServeOptions`.
    """

    rounds: int = 5
    requests: int = 3
    new_tokens: int = 48
    prompt_share: float | None = None
    dtype: str | None = None
    prefill_chunk: int | None = None
    pool: str = "one"
    device: str = "cpu"
    threads: int = 0
    io_threads: int = 2
    seed: int = 0
    resident: bool = True
    products: bool = True

    def layer_slots(self, spec: ModelSpec, num_slots: int) -> tuple[int, ...]:
        """Guaranteed slots per layer in a pool of this size. Raises: CapacityError: a layer would get none."""
        if self.pool not in SHARES or num_slots == spec.total_experts:
            return ()
        return equal_slots(spec, num_slots, SHARES[self.pool])

    def __post_init__(self) -> None:
        one, part = Span(1), Span(0, 1, above=True, below=True)
        require_within(self, "bench.", rounds=one, requests=one, new_tokens=Span(2), threads=Span(0), io_threads=one)
        require_within(self, "bench.", prompt_share=part, prefill_chunk=one)
        require_pool_form("bench.pool", self.pool)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchModel:
    """The model, routes and prompts of a bench.

    Attributes:
        model: a checkpoint: `reference`, a folder, a hub name; or none with `shape`.
        shape: a config without weights; random ones are written to disk.
        layers: MoE layers of the shape (default: all).
        routes: folder of a trace whose routes the model follows, layer by layer; required for a shape, whose own
            routing is meaningless.
        data: prompts for a checkpoint with its own routing, as `moetool.prompts.gather.load` takes them.
        predictor: folder of a trained predictor. Only requests outside its training data are used.
        work: folder of random checkpoints and parts of traces.
    """

    model: str | None = None
    shape: str | None = None
    layers: int | None = None
    routes: Path | None = None
    data: tuple[str, ...] = ()
    predictor: Path | None = None
    work: Path = Path("moetool-bench")

    def __post_init__(self) -> None:
        if (self.model is None) == (self.shape is None):
            raise UsageError("bench serve takes a MODEL or a --shape; give one of them")
        if self.layers is not None and self.shape is None:
            raise UsageError("--layers works with --shape only; a checkpoint keeps all layers")
        if self.shape is not None and self.routes is None:
            raise UsageError("a --shape has random weights, whose own routing is meaningless; give --routes DIR")
        if (self.routes is None) == (not self.data):
            raise UsageError("bench serve takes --routes DIR, or --data for a MODEL with its own routing")


@dataclass(frozen=True, kw_only=True)
class ServingSetup:
    """A model in memory without its experts, with the workload of all lines.

    Attributes:
        name: display name of the model.
        predictor: for policies that need one; None without one.
        part: the forced routes, as a trace of this model; None if its routers choose.
        forced: forces them.
    """

    name: str
    loaded: LoadedModel
    workload: Workload
    predictor: Any
    part: Trace | None
    forced: ForcedRoutes | None


def open_setup(
    subject: BenchModel, options: ServingBenchOptions, kinds: Mapping[str, type[Policy]], stack: contextlib.ExitStack
) -> ServingSetup:
    """Load the model and choose its workload.

    Args:
        stack: closes and removes the created objects at its end.

    Effects: writes the random checkpoint and the part of the trace; sets torch's number of threads.

    Raises:
        UsageError, MismatchError, CapacityError: see `moetool.bench.serve.bench_serve`.
    """
    trace = Trace(subject.routes) if subject.routes is not None else None
    for name, kind in kinds.items():
        if trace is not None:
            require_routes(f"policy {name}", kind.needs)
        if kind.needs_future:
            raise UsageError(f"policy {name} needs future requests; replay it: moetool replay TRACE --policy {name}")
        if kind.needs_predictor and subject.predictor is None:
            raise UsageError(f"policy {name} needs a predictor and got none; pass one with --predictor DIR")
    predictor = load_predictor(subject.predictor) if subject.predictor is not None else None
    if trace is not None and predictor is not None:
        trace.spec.require_same(predictor.spec, "the routes", "the predictor")
        require_routes("the predictor", predictor.needs)
    requests: list[ReplayedRequest] = []
    if trace is not None:
        if subject.shape is not None:
            bench_spec(cut_spec(subject.shape, subject.layers), trace)  # refused before gigabytes are written
        sizes = {name: getattr(options, name) for name in ("requests", "new_tokens", "prompt_share")}
        requests = choose(trace, **sizes, predictor=predictor)
    name = subject.shape or str(subject.model)
    if subject.shape is not None:
        path = random_checkpoint(subject.shape, subject.layers, subject.work, seed=options.seed)
        checkpoint = Checkpoint(path)
        name += f" ({path.name}, random weights)"
    else:
        checkpoint = Checkpoint.open(str(subject.model))
    given = {"dtype": options.dtype, "prefill_chunk": options.prefill_chunk, "device": options.device}
    served = automatic.choose(checkpoint, {name: value for name, value in given.items() if value is not None}).options
    dtype, device = parse_dtype(served.dtype), parse_device(options.device)
    loaded = load_lazy(checkpoint, dtype, device, products=options.products)
    stack.callback(loaded.close)
    use_threads(checkpoint.config, options.threads)
    if trace is not None:
        made = _following(trace, requests, name, loaded, predictor, subject.work, options, stack)
        return replace(made, workload=replace(made.workload, chunk_tokens=served.prefill_chunk))
    if predictor is not None:
        loaded.spec.require_same(predictor.spec, "the model", "the predictor")
    seen = predictor.card["seen_prompts"] if predictor is not None else ()
    workload = prompts_of(checkpoint, subject.data, set(seen), options)
    workload = replace(workload, chunk_tokens=served.prefill_chunk)
    return ServingSetup(name=name, loaded=loaded, workload=workload, predictor=predictor, part=None, forced=None)


def require_routes(user: str, needs: frozenset[str]) -> None:
    """Raises: UsageError: a policy or predictor needs more than expert ids."""
    if more := sorted(needs - {"experts", "weights"}):
        raise UsageError(
            f"{user} needs {', '.join(more)}, which are meaningless in a model with forced routes; bench it "
            "on a MODEL with its own routing, with --data"
        )


def _following(
    trace: Trace,
    requests: Sequence[ReplayedRequest],
    name: str,
    loaded: LoadedModel,
    predictor: Any,
    work: Path,
    options: ServingBenchOptions,
    stack: contextlib.ExitStack,
) -> ServingSetup:
    """Open a model that follows a trace's routes; its prompts are random tokens, since only routes matter."""
    loaded = replace(loaded, spec=bench_spec(loaded.spec, trace))
    part = write_part(trace, loaded.spec, requests, work)
    forced = ForcedRoutes(loaded.layers, part)
    stack.callback(forced.close)
    vocabulary = int(loaded.model.config.get_text_config().vocab_size)
    generator = torch.Generator().manual_seed(options.seed)
    ids = [torch.randint(vocabulary, (request.prompt_tokens,), generator=generator).tolist() for request in requests]
    return ServingSetup(
        name=f"{name}, following {trace.path}",
        loaded=loaded,
        workload=Workload(prompts=tuple(map(tuple, ids)), new_tokens=options.new_tokens),
        predictor=None if predictor is None else CutPredictor(predictor, loaded.spec),
        part=part,
        forced=forced,
    )


def prompts_of(
    checkpoint: Checkpoint, data: tuple[str, ...], seen: Collection[str], options: ServingBenchOptions
) -> Workload:
    """Prompts for a model with its own routing, from each set of the data in turn.

    Args:
        seen: keys of training prompts (`moetool.trace.same_prompts`), or their `dataset/prompt_id`; they are left out.

    Raises:
        UsageError: there are too few.
        MismatchError: one has a token that the model does not embed.
    """
    by_set: dict[str, list[tuple[int, ...]]] = defaultdict(list)
    for prompt in prompt_sets.load(data, max_prompts=options.requests + len(seen)):
        ids = tuple(prompt.token_ids(checkpoint.tokenizer, checkpoint.vocab_size))
        if {digest_of_tokens(ids), f"{prompt.dataset}/{prompt.prompt_id}"}.isdisjoint(seen):
            by_set[prompt.dataset].append(ids)
    turns = itertools.chain.from_iterable(itertools.zip_longest(*by_set.values()))
    prompts = tuple(itertools.islice((ids for ids in turns if ids is not None), options.requests))
    if len(prompts) < options.requests:
        raise UsageError(
            f"{', '.join(data)} holds {len(prompts)} prompts{' outside the training data' if seen else ''}, "
            f"expected {options.requests}; set bench.requests lower"
        )
    return Workload(prompts=prompts, new_tokens=options.new_tokens)
