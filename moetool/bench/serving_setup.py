"""Setup of a bench of serving: a model in memory, its workload, and the routes that it follows."""

import contextlib
import itertools
import shutil
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from moetool.bench.forced_routes import CutPredictor, ForcedRoutes, bench_spec, choose, write_part
from moetool.bench.random_checkpoint import random_checkpoint, remove_checkpoint
from moetool.bench.serving_runs import Workload
from moetool.caching._layer_slots import SHARES, equal_slots, require_pool_form
from moetool.caching._policy import Policy
from moetool.config import Span, require_within
from moetool.errors import UsageError
from moetool.learning.predictor import load_predictor
from moetool.models.checkpoint import Checkpoint
from moetool.models.loading import LoadedModel, load_lazy, parse_device, parse_dtype, use_threads
from moetool.prompts import gather as prompt_sets
from moetool.runtime import automatic
from moetool.trace.reader import Trace
from moetool.trace.same_prompts import digest_of_tokens
from moetool.types import ModelSpec


@dataclass(frozen=True, kw_only=True)
class ServingBenchOptions:
    """Options of `moetool bench serve --set bench.NAME=VALUE`.

    Attributes:
        rounds: how often every line runs.
        requests: requests of a run, one after the other.
        new_tokens: tokens that each generates; the first comes of the prompt's forward.
        prompt_share: share of a traced request's tokens that make its prompt; by default as the trace says, and a
            third where it was imported from a file that does not say.
        task: of the traced requests; any by default.
        dtype: of everything but the experts; by default what `moetool serve` chooses.
        prefill_chunk: prompt tokens of one forward at most; by default what `moetool serve` chooses.
        pool: `one` for all layers, `layer` or `mixed`, as for `moetool serve`.
        device: where the model computes: `cpu` or `cuda`.
        threads, io_threads: of the arithmetic (0 chooses), of the reads.
        seed: of random weights and prompts.
        resident: whether a line has every expert in memory; without it there are no bounds.
        offload: whether transformers is asked to run the model offloaded.
        group: inputs that share a scale, in the packed form of a shape (`--beside int4`).
        products: as for `moetool.runtime.assembly.ServeOptions`.
        keep: whether the random checkpoints and the part of the trace stay for the next bench.
    """

    rounds: int = 5
    requests: int = 3
    new_tokens: int = 48
    prompt_share: float | None = None
    task: str | None = None
    dtype: str | None = None
    prefill_chunk: int | None = None
    pool: str = "one"
    device: str = "cpu"
    threads: int = 0
    io_threads: int = 2
    seed: int = 0
    resident: bool = True
    offload: bool = True
    group: int = 128
    products: bool = True
    keep: bool = True

    def layer_slots(self, spec: ModelSpec, num_slots: int) -> tuple[int, ...]:
        """Slots that each layer is guaranteed in a pool of so many. Raises: CapacityError: a layer would get none."""
        if self.pool not in SHARES or num_slots == spec.total_experts:
            return ()
        return equal_slots(spec, num_slots, SHARES[self.pool])

    def __post_init__(self) -> None:
        one, part = Span(1), Span(0, 1, above=True, below=True)
        require_within(self, "bench.", rounds=one, requests=one, new_tokens=Span(2), threads=Span(0), io_threads=one)
        require_within(self, "bench.", prompt_share=part, prefill_chunk=one)
        require_pool_form("bench.pool", self.pool)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The model, routes and prompts of a bench.

    Attributes:
        model: a checkpoint: `reference`, a folder, a hub name; or none, and `shape`.
        shape: a config alone; its weights are made up on disk.
        layers: MoE layers of the shape; all of them by default.
        routes: folder of a trace whose routing the model is made to follow, MoE layer i that of layer i; always
            needed for a shape, whose own routing would mean nothing.
        data: prompts for a checkpoint that routes by itself, as `moetool.prompts.gather.load` takes them.
        predictor: folder of a trained one. Only requests that it has not seen are used.
        work: where random checkpoints and parts of traces are kept.
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
            raise UsageError("--layers cuts a --shape; a checkpoint is taken as it is")
        if self.shape is not None and self.routes is None:
            raise UsageError(
                "a --shape has random weights, whose own routing means nothing; give --routes DIR to follow"
            )
        if (self.routes is None) == (not self.data):
            raise UsageError("bench serve takes --routes DIR to follow, or --data of a model that routes by itself")


@dataclass(frozen=True, kw_only=True)
class ServingSetup:
    """A model in memory without its experts, and what every line runs on it.

    Attributes:
        name: of the model, for people.
        predictor: for the policies that need one; None if there is none.
        part: the routes that are followed, as a trace of this model; None where it routes by itself.
        forced: makes it follow them.
    """

    name: str
    loaded: LoadedModel
    workload: Workload
    predictor: Any
    part: Trace | None
    forced: ForcedRoutes | None


def open_stage(
    subject: Subject, options: ServingBenchOptions, kinds: Mapping[str, type[Policy]], stack: contextlib.ExitStack
) -> ServingSetup:
    """Bring the model into memory and choose its workload.

    Args:
        kinds: the policies, by name.
        stack: closes and removes, at its end, what is made here.

    Effects: writes the random checkpoint and the part of the trace; sets torch's number of threads.

    Raises:
        UsageError, MismatchError, CapacityError: as `moetool.bench.serve.bench_serve`.
    """
    trace = Trace(subject.routes) if subject.routes is not None else None
    for name, kind in kinds.items():
        if trace is not None:
            require_routes(f"policy {name}", kind.needs)
        elif kind.needs_future:
            raise UsageError(f"policy {name} needs future requests: give --routes DIR, or leave it out")
        if kind.needs_predictor and subject.predictor is None:
            raise UsageError(f"policy {name} needs a predictor and got none; pass one with --predictor DIR")
    predictor = load_predictor(subject.predictor) if subject.predictor is not None else None
    if trace is not None and predictor is not None:
        trace.spec.require_same(predictor.spec, "the routes", "the predictor")
        require_routes("the predictor", predictor.needs)
    name = subject.shape or str(subject.model)
    if subject.shape is not None:
        path = random_checkpoint(subject.shape, subject.layers, subject.work, seed=options.seed)
        checkpoint = Checkpoint(path)
        if not options.keep:
            stack.callback(remove_checkpoint, path)
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
        made = _following(trace, name, loaded, predictor, subject.work, options, stack)
        return replace(made, workload=replace(made.workload, chunk_tokens=served.prefill_chunk))
    if predictor is not None:
        loaded.spec.require_same(predictor.spec, "the model", "the predictor")
    seen = predictor.card["seen_prompts"] if predictor is not None else ()
    workload = prompts_of(checkpoint.tokenizer, subject.data, set(seen), options)
    workload = replace(workload, chunk_tokens=served.prefill_chunk)
    return ServingSetup(name=name, loaded=loaded, workload=workload, predictor=predictor, part=None, forced=None)


def require_routes(user: str, needs: frozenset[str]) -> None:
    """Raises: UsageError for a policy or predictor that looks at more than which experts are chosen."""
    if more := sorted(needs - {"experts", "weights"}):
        raise UsageError(
            f"{user} looks at {', '.join(more)}, which mean nothing in a model that is made to follow routes; bench it "
            "on a MODEL that routes by itself, with --data"
        )


def _following(
    trace: Trace,
    name: str,
    loaded: LoadedModel,
    predictor: Any,
    work: Path,
    options: ServingBenchOptions,
    stack: contextlib.ExitStack,
) -> ServingSetup:
    """A model that follows the routes of a trace; its prompts are random tokens, since the routes say it all."""
    loaded = replace(loaded, spec=bench_spec(loaded.spec, trace))
    chosen = choose(
        trace,
        requests=options.requests,
        new_tokens=options.new_tokens,
        prompt_share=options.prompt_share,
        task=options.task,
        predictor=predictor,
    )
    part = write_part(trace, loaded.spec, chosen, work)
    if not options.keep:
        stack.callback(shutil.rmtree, part.path)
    forced = ForcedRoutes(loaded.layers, part)
    stack.callback(forced.close)
    vocabulary = int(loaded.model.config.get_text_config().vocab_size)
    generator = torch.Generator().manual_seed(options.seed)
    ids = [torch.randint(vocabulary, (one.prompt_tokens,), generator=generator).tolist() for one in chosen]
    return ServingSetup(
        name=f"{name}, following {trace.path}",
        loaded=loaded,
        workload=Workload(prompts=tuple(map(tuple, ids)), new_tokens=options.new_tokens),
        predictor=None if predictor is None else CutPredictor(predictor, loaded.spec),
        part=part,
        forced=forced,
    )


def prompts_of(tokenizer: Any, data: tuple[str, ...], seen: Collection[str], options: ServingBenchOptions) -> Workload:
    """Prompts for a model that routes by itself, from each set of the data in turn.

    Args:
        seen: what those that something was made from are known by (`moetool.trace.same_prompts`), or their
            `dataset/prompt_id`; they are left out.

    Raises:
        UsageError: there are too few.
    """
    by_set: dict[str, list[str]] = defaultdict(list)
    for prompt in prompt_sets.load(data, max_prompts=options.requests + len(seen)):
        known_by = {digest_of_tokens(tokenizer(prompt.text)["input_ids"]), f"{prompt.dataset}/{prompt.prompt_id}"}
        if known_by.isdisjoint(seen):
            by_set[prompt.dataset].append(prompt.text)
    turns = itertools.chain.from_iterable(itertools.zip_longest(*by_set.values()))
    texts = list(itertools.islice((text for text in turns if text is not None), options.requests))
    if len(texts) < options.requests:
        raise UsageError(
            f"{', '.join(data)} holds {len(texts)} prompts{' that nothing was made from' if seen else ''}, "
            f"expected {options.requests}; set bench.requests lower"
        )
    ids = tuple(tuple(tokenizer(text)["input_ids"]) for text in texts)
    return Workload(prompts=ids, new_tokens=options.new_tokens)
