"""Putting an engine together: a model, a memory budget and a policy."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from moetool import durable
from moetool.errors import CapacityError, MismatchError, UsageError
from moetool.fleet import Learners, Pool, build_policies, open_pool, split_slots, without_pinned
from moetool.models.batching import Batcher
from moetool.models.decoding import kv_cache_bytes
from moetool.models.families import require_substitutable
from moetool.models.loading import CPU, LoadedModel, load_lazy, load_tokenizer, parse_devices, parse_dtype, use_threads
from moetool.models.sequential import Sequential, open_batcher
from moetool.models.spec import dense_bytes, locate, read_config
from moetool.plan import CachePlan
from moetool.policy import MIN_SLOTS, build_policy, policy_class
from moetool.residency import PrefetchLimits, Residency
from moetool.serving.copies import stride_of
from moetool.serving.engine import Engine
from moetool.serving.experts import ExpertRuntime
from moetool.serving.log import ServeLog
from moetool.serving.state import restore_state, save_state
from moetool.serving.store import ExpertStore, open_store
from moetool.serving.stores import Stores
from moetool.trace.rows import KEEP
from moetool.types import ModelSpec

_FEW_REQUESTS = 8
_MANY_REQUESTS = 64
_LEAST = {"devices": 1, "host_memory_bytes": 0, "kv_tokens": 16, "max_requests": 0, "io_threads": 1, "threads": 0}


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """What `moetool serve --set` sets.

    Attributes:
        device: `cpu` or `cuda`: where the model computes and the expert slots are.
        devices: that share the experts (`moetool.fleet`): their slots and the host memory are shared out evenly. The
            first has the dense weights and the KV cache besides. `--device-memory` is for all together. On the CPU
            each is a pool of its own.
        host_memory_bytes: for experts in host memory, between the disk and the device (0: none but what moving them
            takes; see `moetool.serving.store.ExpertStore`). It comes on top of the device's memory.
        dtype: data type of everything but the experts, which stay as the checkpoint has them.
        kv_tokens: tokens that the KV cache holds, over all requests; the longest context of one.
        max_requests: requests that are forwarded together; the rest queue. 0 chooses 8 where not every expert has a
            slot, because each request more needs more experts at once; where all have one, up to 64, those beyond 8
            as far as the KV cache holds all of them at their full length.
        io_threads: threads that read experts, for each device.
        threads: threads of the model's own arithmetic (0 chooses).
        products: whether experts of four bits are multiplied as they are packed, in bfloat16 on a CPU, where their
            weights are not rounded to bfloat16 first (`moetool.models.packed_product`). Without it they are unpacked
            for each product, to the weights that transformers has.
        policy: options of the cache policy.
        prefetch: limits of its prefetching; the plan's, or none, if not said.
        state: file that what the policy learns is kept in from one run to the next (empty: none).
    """

    device: str = "cpu"
    devices: int = 1
    host_memory_bytes: int = 0
    dtype: str = "float32"
    kv_tokens: int = 4096
    max_requests: int = 0
    io_threads: int = 2
    threads: int = 0
    products: bool = True
    policy: dict[str, Any] = field(default_factory=dict)
    prefetch: PrefetchLimits | None = None
    state: str = ""

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                raise UsageError(f"{name} is {getattr(self, name)}, expected at least {least}")


def fixed_bytes(path: Path, options: ServeOptions) -> tuple[int, int]:
    """What a model takes besides its experts: bytes of its dense weights and of its KV cache."""
    dtype = parse_dtype(options.dtype)
    return dense_bytes(path, dtype), kv_cache_bytes(read_config(path), dtype, options.kv_tokens)


def build_engine(
    model: str,
    *,
    options: ServeOptions,
    plan: CachePlan | None = None,
    policy: str | None = None,
    predictor: Path | None = None,
    device_memory_bytes: int | None = None,
    log: Path | None = None,
    open_runtime: Callable[[LoadedModel, Pool, ExpertStore | Stores], ExpertRuntime] = ExpertRuntime,
) -> Engine:
    """Load a model without its experts and put an engine around it.

    Args:
        plan: decides policy, predictor and slots where the other arguments do not.
        policy: `lru` where neither this nor a plan says.
        device_memory_bytes: for dense weights, KV cache, predictor and expert slots together; without it (and
            without a plan, whose own it is otherwise) every expert gets a slot.
        log: where to write the server's own trace.
        open_runtime: as for `Engine`.

    Effects: allocates all of that. The engine is not started.

    Raises:
        UsageError: unknown model, policy or option, or a policy without the predictor that it needs.
        MismatchError: the plan, the predictor and the model do not belong together, or weights are damaged.
        CapacityError: it does not fit.
    """
    path = locate(model)
    dtype, device = parse_dtype(options.dtype), parse_devices(options.device, options.devices)[0]
    name = policy or (plan.policy if plan else "lru")
    kind = policy_class(name)
    if kind.needs_future:
        raise UsageError(f"policy {name} has to know the future: it works in replay only; choose another to serve")
    from_plan = plan is not None and plan.policy == name
    # Another runtime may send what its slots hold to other machines.
    loaded = load_lazy(path, dtype, device, products=options.products and open_runtime is ExpertRuntime)
    use_threads(loaded.model.config.get_text_config(), options.threads)
    assert loaded.files is not None
    if not kind.lossless:
        require_substitutable(loaded.spec.name, name)
    if plan is not None:
        plan.check(loaded.spec)
    predicts = _predictor(predictor, plan if from_plan else None) if kind.uses() else None
    if predicts is not None and not kind.uses(predicts):
        predicts = None
    slots = loaded.spec.total_experts
    if device_memory_bytes is None and plan is not None:
        device_memory_bytes = plan.device_memory_bytes
        slots = plan.slots if from_plan else slots
    if device_memory_bytes is not None:
        dense, kv = fixed_bytes(path, options)
        extra = predicts.num_bytes if predicts else 0
        slots = min(slots, _slots(loaded.spec, device_memory_bytes, dense, kv, extra))
    policy_options: Mapping[str, Any] = {**(plan.options if plan and from_plan else {}), **options.policy}
    pinned = [loaded.spec.expert_key(*expert) for expert in plan.pinned] if plan and from_plan else []
    shares = [slots] if options.devices == 1 else split_slots(loaded.spec, slots, options.devices)
    limits = options.prefetch or (plan.limits if plan and from_plan else None) or PrefetchLimits()
    shares = without_pinned(shares, pinned)
    policies = build_policies(name, loaded.spec, policy_options, shares, predictor=predicts)
    built = policies[0]
    learned = built if len(policies) == 1 else Learners(policies)
    state = Path(options.state) if options.state else None
    if state is not None:
        durable.require_writable(state)
    facts = {
        "policy": name,
        "options": asdict(built.options),
        "slots": slots,
        "devices": options.devices,
        "pinned": pinned,
        "prefetch": asdict(limits),
        "state": durable.sha256_file(state) if state is not None and restore_state(state, name, learned) else None,
    }
    return Engine(
        loaded,
        load_tokenizer(path),
        open_pool(policies, pinned=pinned, limits=limits),
        _batcher(loaded, options, resident=slots >= loaded.spec.total_experts),
        model_name=model,
        io_threads=options.io_threads,
        host_memory_bytes=options.host_memory_bytes or None,
        log=None if log is None else ServeLog(log, {"topk"} | (built.columns & set(KEEP)), built.distance, facts),
        save=None if state is None else partial(save_state, state, name, learned),
        open_runtime=open_runtime,
    )


def _batcher(loaded: LoadedModel, options: ServeOptions, *, resident: bool) -> Batcher | Sequential:
    if options.max_requests:
        return open_batcher(loaded.model, max_requests=options.max_requests, kv_tokens=options.kv_tokens)
    most = _MANY_REQUESTS if resident else _FEW_REQUESTS
    return open_batcher(loaded.model, max_requests=most, kv_tokens=options.kv_tokens, unreserved=_FEW_REQUESTS)


def open_pooled(
    path: Path,
    dtype: torch.dtype,
    device: torch.device = CPU,
    *,
    device_memory_bytes: int,
    host_memory_bytes: int | None = None,
    kv_bytes: int = 0,
) -> LoadedModel:
    """A model whose experts live in a pool of what the memory leaves beside its dense weights and `kv_bytes`.

    For `moetool.capture.run`: the pool is LRU, and every forward must be announced (`LoadedModel.begin_forward`).

    Args:
        host_memory_bytes: for the tier below it, as in `ServeOptions`.

    Effects: allocates the pool; `LoadedModel.close` ends its threads.

    Raises:
        CapacityError: not even the smallest legal pool fits.
    """
    loaded = load_lazy(path, dtype, device, products=True)
    slots = _slots(loaded.spec, device_memory_bytes, dense_bytes(path, dtype), kv_bytes, 0)
    residency = Residency(build_policy("lru", loaded.spec, {}, slots))
    store = open_store(loaded, residency, host_memory_bytes=host_memory_bytes)
    return replace(loaded, pool=ExpertRuntime(loaded, residency, store))


def _predictor(path: Path | None, plan: CachePlan | None) -> Any:
    from moetool.predictor import load_predictor

    if path is not None:
        return load_predictor(path)
    if plan is None or plan.predictor is None:
        return None  # build_policy says that one is needed
    predictor = load_predictor(Path(plan.predictor.path))
    if predictor.sha256 != plan.predictor.sha256:
        raise MismatchError(
            f"the predictor at {plan.predictor.path} is {predictor.sha256[:12]}, but the plan was made with "
            f"{plan.predictor.sha256[:12]}; make the plan again, or give the right one with --predictor"
        )
    return predictor


def expert_slots(spec: ModelSpec, budget_bytes: int) -> int:
    """How many experts a budget for experts alone holds in the server's pool. Raises: CapacityError."""
    return _slots(spec, budget_bytes, 0, 0, 0)


def _slots(spec: ModelSpec, memory_bytes: int, dense: int, kv: int, predictor: int) -> int:
    slot_bytes = stride_of(spec.slot_bytes)
    slots = (memory_bytes - dense - kv - predictor) // slot_bytes
    if slots < MIN_SLOTS:
        raise CapacityError(
            f"--device-memory {memory_bytes:,} does not hold {spec.name}: {dense:,} bytes of dense weights, {kv:,} of "
            f"KV cache, {predictor:,} of predictor and at least {MIN_SLOTS} expert slots of {slot_bytes:,} make "
            f"{dense + kv + predictor + MIN_SLOTS * slot_bytes:,}; give it that much or set fewer kv_tokens"
        )
    return min(slots, spec.total_experts)
