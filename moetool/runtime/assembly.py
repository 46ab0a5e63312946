"""Build an engine from a model, a memory budget and a policy."""

import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from moetool.base import durable
from moetool.base.config import POSITIVE, Span, require_within
from moetool.base.errors import CapacityError, MismatchError, UsageError
from moetool.base.families import require_substitutable
from moetool.caching.devices import Learners, Pool, build_policies, open_pool, split_slots, without_pinned
from moetool.caching.layer_slots import SHARES, equal_slots, require_pool_form, scaled_down
from moetool.caching.plan import CachePlan, PrefetchLimits
from moetool.caching.policy import MIN_SLOTS, Policy, build_policy, policy_class
from moetool.caching.policy_changes import PolicyChanges, PolicyChoice
from moetool.caching.residency import Residency
from moetool.models.checkpoint import Checkpoint
from moetool.models.loading import CPU, LoadedModel, load_lazy, parse_devices, parse_dtype, use_threads
from moetool.runtime.decoding import kv_cache_bytes
from moetool.runtime.experts.copies import stride_of
from moetool.runtime.experts.device_stores import Store, begin_with, fill_device, open_stores
from moetool.runtime.experts.expected_use import read_order
from moetool.runtime.experts.forward import ExpertRuntime
from moetool.runtime.experts.store import ExpertStore, open_store
from moetool.runtime.loop.batching import Batcher
from moetool.runtime.loop.engine import Engine
from moetool.runtime.loop.own_caches import OwnCaches, open_batcher
from moetool.runtime.memory_share import MemoryShare
from moetool.runtime.policy_state import Learned, restore_state, save_state
from moetool.runtime.recording.gate_log import ServeLog
from moetool.runtime.recording.live_oracle import CANDIDATES, LiveOracle, OraclePolicies
from moetool.runtime.returned_memory import return_freed_memory
from moetool.runtime.sizing import GOOD_CONTEXT, LEAST_CHUNK
from moetool.runtime.warm_start import WarmStart, kept_routes
from moetool.trace.rows import KEEP
from moetool.trace.segments import SegmentLimits

_LOG = logging.getLogger(__name__)
_FEW_REQUESTS = 8
_MANY_REQUESTS = 64
_LEAST = {
    "devices": 1,
    "host_memory_bytes": 0,
    "kv_tokens": 16,
    "expected_context": 16,
    "prefill_chunk": 1,
    "borrowed_slots": 0,
    "first_chunk": 1,
    "first_kv_tokens": 0,
    "kv_slots": 0,
    "max_requests": 0,
    "io_threads": 1,
    "threads": 0,
}


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Settings of `moetool serve --set`.

    Attributes:
        device: `cpu` or `cuda`: the device of the model and of the expert slots.
        devices: number of devices that share the experts (`moetool.caching.devices`). Slots and host memory are split
            evenly. The first device also has the dense weights and the KV cache. `--device-memory` is the total over
            all. On the CPU each device is a separate pool.
        first_device: number of the first GPU (default: 0; with `--cluster local:N` a server takes the GPUs after those
            of the server before it).
        host_memory_bytes: host memory for experts, the tier between disk and device (0: only the transfer buffers; see
            `moetool.runtime.experts.store.ExpertStore`). It is not part of the device memory.
        dtype: data type of all weights except the experts, which keep the checkpoint's form.
        kv_tokens: tokens in the KV cache, over all requests; also the longest context of one request.
        expected_context: tokens of the longest expected conversation, for the division of memory between KV cache and
            expert slots (`moetool.runtime.expected_reads`).
        prefill_chunk: most prompt tokens of one forward. A longer prompt takes several forwards, and each may need
            every expert.
        max_prompt_wait: approximate limit in seconds on how long decoding requests wait for another request's prompt
            chunk. Smaller chunks keep to it, and a long prompt then reads experts several times. If a forward's fixed
            time is more than half of it, chunks are larger (`moetool.runtime.loop.prompt_chunks`). A prompt that no
            request waits for has full chunks (0: no limit).
        prefix_caching: keep the KV cache of earlier prompts and answers until its memory is needed, and forward only
            the part of a new prompt that differs from them.
        borrowed_slots: expert slots that a full prompt chunk borrows for its activations; shorter chunks borrow fewer,
            and chunks of up to `first_chunk` tokens none. Needs one device, a CPU, no pinned experts and a policy that
            computes nothing on the host (0: none).
        first_chunk: most tokens of a forward that borrows no slots.
        first_kv_tokens: tokens in the KV cache at first, where slots may be borrowed; it grows to `kv_tokens` on demand
            (0: full size from the start).
        kv_slots: expert slots that the KV cache borrows to grow.
        max_requests: requests per batch; others queue. 0 is automatic: 8 if some experts have no slot, because each
            further request needs more experts at once; otherwise up to 64, with more than 8 only if the KV cache holds
            all of them at full length.
        deterministic: run one request at a time, each prompt from its beginning in chunks of `prefill_chunk` tokens, so
            that answers and log-probabilities depend neither on other requests nor on cached prefixes or experts, in
            any dtype. It sets `max_requests` to 1 and `prefix_caching` to false, and needs a policy that keeps routes
            and, on a GPU, computes nothing on the host.
        io_threads: threads per device that read experts.
        threads: compute threads (0: automatic).
        products: whether slots hold quantized experts in the form that computes fastest on a CPU
            (`moetool.models.experts.expert_files.ExpertFiles`). In bfloat16, 4-bit integers, FP8, int8, MXFP4 and most
            ggml blocks are multiplied packed, without rounding their weights to bfloat16 (`moetool.kernels.cpu.int4`,
            `moetool.kernels.cpu.scaled_weight`); other formats are unpacked. If false, slots hold experts as stored and
            each product unpacks them.
        policy: options of the cache policy.
        pool: `one` for all layers, `layer` (the same number of slots for each layer) or `mixed` (half of the slots per
            layer). None: the plan's pool, else `one`.
        prefetch: limits of prefetching (default: the plan's, else none).
        warm_start: keep residents and statistics in the user's cache folder and load them at the next start (`moetool
            cache`). Off while a gate log is written, so that its replay begins as the server did.
        oracle_s: seconds between comparisons with LRU, the plan's policy and Belady on the server's most recent events,
            for `/stats` and the log (0: no comparison).
        change_policy: switch to another policy without a predictor if these comparisons show that it loads clearly
            fewer experts. Needs one device and no pinned experts.
        remember_policy: with `warm_start` and `change_policy`: keep the name of the current policy and the state of
            each; `moetool.runtime.automatic.choose` starts with them next time.
        state: file that keeps the policy's learned state between runs (empty: none).
        log_segment_s: seconds after which `--log` closes a segment. Closed segments can be read and survive a kill.
    """

    device: str = "cpu"
    devices: int = 1
    first_device: int | None = None
    host_memory_bytes: int = 0
    dtype: str = "float32"
    kv_tokens: int = 4096
    expected_context: int = GOOD_CONTEXT
    prefill_chunk: int = 512
    max_prompt_wait: float = 2.0
    prefix_caching: bool = True
    borrowed_slots: int = 0
    first_chunk: int = LEAST_CHUNK
    first_kv_tokens: int = 0
    kv_slots: int = 0
    max_requests: int = 0
    deterministic: bool = False
    io_threads: int = 2
    threads: int = 0
    products: bool = True
    policy: dict[str, Any] = field(default_factory=dict)
    pool: str | None = None
    prefetch: PrefetchLimits | None = None
    warm_start: bool = False
    oracle_s: float = 60.0
    change_policy: bool = False
    remember_policy: bool = False
    state: str = ""
    log_segment_s: float = 10.0

    def __post_init__(self) -> None:
        if self.pool is not None:
            require_pool_form("pool", self.pool)
        require_within(self, **{name: Span(least) for name, least in _LEAST.items()})
        if self.first_device is not None:
            require_within(self, first_device=Span(0))
        if self.borrowed_slots and self.prefill_chunk <= self.first_chunk:
            raise UsageError(
                f"borrowed_slots is {self.borrowed_slots}, but chunks of prefill_chunk={self.prefill_chunk} tokens "
                f"borrow none; set prefill_chunk above {self.first_chunk}, or borrowed_slots=0"
            )
        if self.deterministic and self.max_requests > 1:
            raise UsageError(
                f"max_requests is {self.max_requests}, but deterministic=true runs one request at a time; leave one out"
            )
        require_within(self, max_prompt_wait=Span(0, below=True), oracle_s=Span(0, below=True), log_segment_s=POSITIVE)


def fixed_bytes(checkpoint: Checkpoint, options: ServeOptions) -> tuple[int, int]:
    """Bytes of a model's dense weights and of its KV cache."""
    dtype = parse_dtype(options.dtype)
    dense = checkpoint.dense_bytes(dtype, options.device, options.products)
    return dense, kv_cache_bytes(checkpoint.config, dtype, options.kv_tokens)


def slot_bytes(checkpoint: Checkpoint, options: ServeOptions) -> int:
    """Bytes of an expert slot."""
    fastest = parse_dtype(options.dtype) if options.products and options.device == "cpu" else None
    return checkpoint.slot_bytes(fastest)


def build_engine(
    checkpoint: Checkpoint,
    *,
    options: ServeOptions,
    plan: CachePlan | None = None,
    policy: str | None = None,
    predictor: Path | None = None,
    device_memory_bytes: int | None = None,
    log: Path | None = None,
    open_runtime: Callable[[LoadedModel, Pool, Store], ExpertRuntime] = ExpertRuntime,
) -> Engine:
    """Load a model without its experts and put an engine around it.

    Args:
        plan: default for policy, predictor and slots.
        policy: cache policy (default: the plan's, else `lru`).
        device_memory_bytes: total for dense weights, KV cache, predictor and expert slots (default: the plan's; without
            a plan, every expert gets a slot).
        log: path of the server's own trace.
        open_runtime: opens the runtime that computes experts (default: on this machine).

    Effects: allocates the memory of all parts but does not start the engine. The engine reads the checkpoint's files
        until it is closed. After a failure nothing stays open. On a CPU with bounded memory, the C library returns
        large blocks as soon as they are freed, for the life of the process.

    Raises:
        UsageError: unknown model, policy or option, or the policy needs a predictor and has none.
        MismatchError: plan, predictor and model do not match, or weights are damaged.
        CapacityError: the model does not fit in the memory.
    """
    device, *_ = parse_devices(options.device, options.devices, options.first_device or 0)
    dtype = parse_dtype(options.dtype)
    name = policy or (plan.policy if plan else "lru")
    kind = policy_class(name)
    if kind.needs_future:
        raise UsageError(f"policy {name} needs future requests, so it works in replay only; choose another one")
    from_plan = plan is not None and plan.policy == name
    with contextlib.ExitStack() as undo:
        # Another runtime may send the content of its slots to other machines.
        products = options.products and open_runtime is ExpertRuntime
        loaded = load_lazy(checkpoint, dtype, device, products=products, packed_linears=options.products)
        undo.callback(loaded.close)
        use_threads(checkpoint.config, options.threads)
        assert loaded.files is not None
        if not kind.lossless:
            require_substitutable(loaded.spec.name, name)
        if plan is not None:
            plan.check(loaded.spec)
        predicts = _predictor(kind, predictor, plan if from_plan else None)
        slots = loaded.spec.total_experts
        if device_memory_bytes is None and plan is not None:
            device_memory_bytes = plan.device_memory_bytes
            slots = plan.slots if from_plan else slots
        if device_memory_bytes is not None:
            dense, kv = fixed_bytes(checkpoint, options)
            extra = predicts.num_bytes if predicts else 0
            slots = min(slots, expert_slots(loaded, device_memory_bytes, dense, kv, extra))
            if device.type == "cpu":
                return_freed_memory()
        policy_options: Mapping[str, Any] = {**(plan.options if plan and from_plan else {}), **options.policy}
        pinned = [loaded.spec.expert_key(*expert) for expert in plan.pinned] if plan and from_plan else []
        shares = [slots] if options.devices == 1 else split_slots(loaded.spec, slots, options.devices)
        limits = options.prefetch or (plan.limits if plan and from_plan else None) or PrefetchLimits()
        shares = without_pinned(shares, pinned)
        policies = build_policies(name, loaded.spec, policy_options, shares, predictor=predicts)
        built = policies[0]
        if options.deterministic and not (built.lossless and (device.type == "cpu" or not built.computes_on_host)):
            why = "computes some experts on the host" if built.lossless else "changes routes"
            raise UsageError(
                f"policy {name} {why} depending on cached experts, but deterministic=true; choose another policy"
            )
        learned: Learned = built if len(policies) == 1 else Learners(policies)
        state = Path(options.state) if options.state else None
        if state is not None:
            durable.require_writable(state)
        layer_slots: tuple[int, ...] = ()
        if plan and from_plan and options.pool is None:
            layer_slots = scaled_down(loaded.spec, plan.layer_slots, built.num_slots)
        if options.pool in SHARES:
            layer_slots = equal_slots(loaded.spec, built.num_slots, SHARES[options.pool])
        facts = {
            "policy": name,
            "options": asdict(built.options),
            "slots": slots,
            "devices": options.devices,
            "layer_slots": layer_slots,
            "pinned": pinned,
            "prefetch": asdict(limits),
            "state": None,
        }
        if state is not None and restore_state(state, name, learned) is not None:
            facts["state"] = durable.sha256_file(state)
        _LOG.info("policy %s of %s: %s", name, checkpoint.name, facts)
        lends = device.type == "cpu" and options.devices == 1 and not pinned and not built.computes_on_host
        batcher = _batcher(
            loaded,
            options if lends else replace(options, first_kv_tokens=0),
            resident=slots - options.borrowed_slots - options.kv_slots >= loaded.spec.total_experts,
        )
        residency = open_pool(policies, pinned=pinned, limits=limits, layer_slots=layer_slots)
        changes: PolicyChanges | None = None
        plain = not pinned and predicts is None and kind.lossless and built.columns <= {"experts"}
        if options.change_policy and isinstance(residency, Residency) and plain and not built.computes_on_host:
            learned = changes = PolicyChanges(residency, PolicyChoice(name, options.pool or "one"), policy_options)
        store = open_stores(loaded, residency, options.io_threads, options.host_memory_bytes or None)
        undo.callback(store.close)
        save: Callable[[], None] | None = None if state is None else partial(save_state, state, name, learned)
        if options.warm_start and log is None and state is None and isinstance(residency, Residency):
            if options.remember_policy and changes is not None:
                warm = WarmStart.of_all(changes, lambda: residency.residents, residency.num_slots)
            else:
                warm = WarmStart(loaded.spec, name, learned, lambda: residency.residents)
            assert isinstance(store, ExpertStore)
            begin_with(warm.restore(), residency, store)
            save = warm.save
        order = ""
        if options.host_memory_bytes:
            routes_NP = kept_routes(loaded.spec) if options.warm_start and log is None else None
            keys, order = read_order(loaded.spec, residency.policy.expected_use(), routes_NP, plan)
            store.read_ahead(keys)
        if log is None:
            fill_device(residency, store)
        runtime = open_runtime(loaded, residency, store)
        undo.callback(runtime.close)
        engine = Engine(
            loaded,
            checkpoint.tokenizer,
            runtime,
            batcher,
            model_name=checkpoint.name,
            log=None
            if log is None
            else ServeLog(
                log,
                {"topk"} | (built.columns & set(KEEP)),
                built.distance,
                facts,
                SegmentLimits(seconds=options.log_segment_s),
            ),
            save=save,
        )
        engine.host_order = order
        serving = PolicyChoice(name, options.pool or "one").name
        others = OraclePolicies(serving=serving, candidates=CANDIDATES if changes is not None else ())
        if plan is not None:
            others = replace(others, plan=plan.policy, plan_options=plan.options)
        oracle = LiveOracle(
            loaded.spec,
            residency.num_slots,
            runtime.window,
            others,
            options.oracle_s,
            on_choice=engine.change_policy,
            changes=changes,
        )
        engine.compare_with(oracle, changes)
        if lends and (options.borrowed_slots or options.kv_slots):
            engine.share_memory(
                MemoryShare(
                    most_slots=options.borrowed_slots,
                    chunk_tokens=options.prefill_chunk,
                    first_chunk=options.first_chunk,
                    kv_slots=options.kv_slots,
                    kv_tokens=max(0, options.kv_tokens - options.first_kv_tokens),
                )
            )
        undo.pop_all()
    return engine


def _batcher(loaded: LoadedModel, options: ServeOptions, *, resident: bool) -> Batcher | OwnCaches:
    limit = 1 if options.deterministic else options.max_requests
    most = limit or (_MANY_REQUESTS if resident else _FEW_REQUESTS)
    return open_batcher(
        loaded.model,
        max_requests=most,
        kv_tokens=options.kv_tokens,
        max_batch_tokens=max(options.prefill_chunk, most),
        unreserved=None if limit else _FEW_REQUESTS,
        prefix_caching=options.prefix_caching and not options.deterministic,
        max_prompt_wait_s=options.max_prompt_wait,
        first_kv_tokens=options.first_kv_tokens,
    )


def open_pooled(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device = CPU,
    *,
    device_memory_bytes: int,
    host_memory_bytes: int | None = None,
    kv_bytes: int = 0,
) -> LoadedModel:
    """Open a model with an expert pool in the memory that dense weights and `kv_bytes` leave free.

    For `moetool.capture.run`: the pool's policy is LRU, and every forward must be announced
    (`LoadedModel.begin_forward`).

    Args:
        host_memory_bytes: memory of the host tier, as in `ServeOptions`.

    Effects: allocates the pool; `LoadedModel.close` ends its threads.

    Raises:
        CapacityError: the smallest possible pool does not fit.
    """
    with contextlib.ExitStack() as undo:
        loaded = load_lazy(checkpoint, dtype, device, products=True)
        undo.callback(loaded.close)
        slots = expert_slots(loaded, device_memory_bytes, checkpoint.dense_bytes(dtype, device.type), kv_bytes)
        residency = Residency(build_policy("lru", loaded.spec, {}, slots))
        store = open_store(loaded, residency, host_memory_bytes=host_memory_bytes)
        undo.callback(store.close)
        pooled = replace(loaded, pool=ExpertRuntime(loaded, residency, store))
        undo.pop_all()
    return pooled


def predictor_bytes(policy: str, predictor: Path | None, plan: CachePlan | None) -> int:
    """Return the device memory of the predictor that `build_engine` would load for this policy; 0 if none."""
    from_plan = plan if plan is not None and plan.policy == policy else None
    loaded = _predictor(policy_class(policy), predictor, from_plan)
    return 0 if loaded is None else int(loaded.num_bytes)


def _predictor(kind: type[Policy], path: Path | None, plan: CachePlan | None) -> Any:
    """Load the predictor; None if there is none, or if the policy does not use it."""
    from moetool.training.predictor import load_predictor

    if not kind.uses():
        return None
    if path is not None:
        predictor = load_predictor(path)
        return predictor if kind.uses(predictor) else None
    if plan is None or plan.predictor is None:
        return None  # build_policy says that one is needed
    predictor = load_predictor(Path(plan.predictor.path))
    if predictor.sha256 != plan.predictor.sha256:
        raise MismatchError(
            f"the predictor at {plan.predictor.path} has sha256 {predictor.sha256[:12]}, but the plan was made with "
            f"{plan.predictor.sha256[:12]}; make a new plan, or give the right predictor with --predictor"
        )
    return predictor if kind.uses(predictor) else None


def expert_slots(loaded: LoadedModel, memory_bytes: int, dense: int, kv: int, predictor: int = 0) -> int:
    """Return the number of expert slots that fit.

    Args:
        memory_bytes: device memory for the whole model.
        dense, kv, predictor: bytes of dense weights, KV cache and predictor.

    Raises:
        CapacityError: fewer than the smallest legal pool fit.
    """
    assert loaded.files is not None
    spec, slot_bytes = loaded.spec, stride_of(loaded.files.slot_bytes)
    slots = (memory_bytes - dense - kv - predictor) // slot_bytes
    if slots < MIN_SLOTS:
        raise CapacityError(
            f"--device-memory {memory_bytes:,} does not hold {spec.name}: {dense:,} bytes of dense weights, {kv:,} of "
            f"KV cache, {predictor:,} of predictor and at least {MIN_SLOTS} expert slots of {slot_bytes:,} make "
            f"{dense + kv + predictor + MIN_SLOTS * slot_bytes:,}; give it that much, or a smaller --set kv_tokens"
        )
    return min(slots, spec.total_experts)
