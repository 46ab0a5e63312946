"""Build an engine from a model, a memory budget and a policy."""

import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from moetool import __version__
from moetool.base import durable
from moetool.base.errors import MismatchError, UsageError
from moetool.base.families import require_substitutable
from moetool.caching.devices import DevicePolicies, Pool, build_policies, open_pool, split_slots
from moetool.caching.layer_slots import SHARES, equal_slots, policy_label, scaled_down
from moetool.caching.machine_split import MachineSplit
from moetool.caching.plan import CachePlan
from moetool.caching.policy import Policy, build_policy, policy_class
from moetool.caching.residency import Residency
from moetool.models.checkpoint import Checkpoint
from moetool.models.loading import CPU, LoadedModel, load_lazy, parse_devices, parse_dtype, use_threads
from moetool.runtime.budget import Budget, Wishes, divide_memory
from moetool.runtime.experts.copies import is_staged, stride_of
from moetool.runtime.experts.device_stores import Store, fill_device, load_residents, open_stores
from moetool.runtime.experts.expected_use import read_order
from moetool.runtime.experts.forward import ExpertRuntime
from moetool.runtime.experts.resident_forward import options_beside_gpu
from moetool.runtime.experts.store import ExpertStore, open_store
from moetool.runtime.loop.batching import Batcher
from moetool.runtime.loop.engine import Engine
from moetool.runtime.loop.own_caches import OwnCaches, open_batcher
from moetool.runtime.loop.split_guard import SplitGuard
from moetool.runtime.policy_state import Learned, restore_state, save_state
from moetool.runtime.recording.live_oracle import LiveOracle, OraclePolicies
from moetool.runtime.returned_memory import release_code, return_freed_memory, trim_heap
from moetool.runtime.serve_options import ServeOptions
from moetool.runtime.split_costs import split_costs
from moetool.runtime.warm_start import PREFIXES_SUFFIX, WarmStart, kept_routes, prefix_file
from moetool.trace.rows import KEEP

if TYPE_CHECKING:
    from moetool.runtime.recording.gate_log import ServeLog

_LOG = logging.getLogger(__name__)
_FEW_REQUESTS = 8
_MANY_REQUESTS = 64


def build_engine(
    checkpoint: Checkpoint,
    *,
    options: ServeOptions,
    plan: CachePlan | None = None,
    policy: str | None = None,
    predictor: Path | None = None,
    device_memory_bytes: int | Budget | None = None,
    log: Path | None = None,
    open_runtime: Callable[[LoadedModel, Pool, Store], ExpertRuntime] = ExpertRuntime,
) -> Engine:
    """Load a model without its experts and put an engine around it.

    Args:
        plan: default for policy, predictor and slots.
        policy: cache policy (default: the plan's, else `lru`).
        device_memory_bytes: total for dense weights, KV cache, predictor and expert slots, divided with the options' KV
            cache and chunks; or its division (default: the plan's total; without a plan, every expert gets a slot).
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
        if isinstance(device_memory_bytes, Budget):
            budget = device_memory_bytes
        else:
            planned = plan is not None and device_memory_bytes is None
            wishes = Wishes(
                options=options,
                device_memory_bytes=plan.device_memory_bytes if plan and planned else device_memory_bytes,
                predictor_bytes=predicts.num_bytes if predicts else 0,
                slots=plan.slots if plan and planned and from_plan else None,
            )
            budget = divide_memory(checkpoint, wishes)
        slots = budget.slots
        if budget.limit_bytes is not None and device.type == "cpu":
            return_freed_memory(budget.activation_bytes)
        policy_options: Mapping[str, Any] = {**(plan.options if plan and from_plan else {}), **options.policy}
        shares = [slots] if options.devices == 1 else split_slots(loaded.spec, slots, options.devices)
        if options.devices == 1 and open_runtime is ExpertRuntime:
            policy_options = options_beside_gpu(kind, policy_options, loaded, slots)
        policies = build_policies(name, loaded.spec, policy_options, shares, predictor=predicts)
        built = policies[0]
        if options.deterministic and not (built.lossless and (device.type == "cpu" or not built.computes_on_host)):
            why = "computes some experts on the host" if built.lossless else "changes routes"
            raise UsageError(
                f"policy {name} {why} depending on cached experts, but deterministic=true; choose another policy"
            )
        if options.keep_prefixes and not built.lossless:
            raise UsageError(
                f"policy {name} changes routes, and so keys and values, but keep_prefixes=true; choose another policy "
                "or leave keep_prefixes out"
            )
        learned: Learned = built if len(policies) == 1 else DevicePolicies(policies)
        splits = _splits(options, built, device, open_runtime is ExpertRuntime) and slots < loaded.spec.total_experts
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
            "predictor": predicts.sha256 if predicts is not None else None,
            "state": None,
        }
        if state is not None and restore_state(state, name, learned) is not None:
            facts["state"] = durable.sha256_file(state)
        _LOG.info("policy %s of %s: %s", name, checkpoint.name, facts)
        hosts = splits or built.computes_on_host
        shares_memory = device.type == "cpu" and options.devices == 1 and not hosts
        split = MachineSplit(loaded.spec) if splits else None
        residency = open_pool(policies, layer_slots=layer_slots, split=split)
        single = residency.residencies[0]
        store = open_stores(loaded, residency, options.io_threads, options.host_memory_bytes or None, hosts=splits)
        undo.callback(store.close)
        if split is not None:
            assert isinstance(store, ExpertStore)
            held = store.host_pool_bytes // stride_of(store.files.stored_bytes)
            in_memory = held >= loaded.spec.total_experts
            split.begin(split_costs(loaded, single, store), None if in_memory else held)
            facts["host_compute"] = split.to_json()
        batcher = _batcher(
            loaded,
            options,
            first_kv_tokens=budget.first_kv_tokens if shares_memory else 0,
            resident=budget.kept_slots >= loaded.spec.total_experts,
        )
        save: Callable[[], None] | None = None if state is None else partial(save_state, state, name, learned)
        if options.warm_start and log is None and state is None and options.devices == 1:
            warm = WarmStart(loaded.spec, name, learned, lambda: single.residents)
            load_residents(warm.restore(), residency, store)
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
            log=None if log is None else _open_log(log, built, facts, options.log_segment_s),
            save=save,
        )
        engine.host_order = order
        others = OraclePolicies(serving=policy_label(name, options.pool or "one"))
        if plan is not None:
            others = replace(others, plan=plan.policy, plan_options=plan.options)
        engine.compare_with(LiveOracle(loaded.spec, residency.num_slots, runtime.window, others, options.oracle_s))
        if split is not None:
            engine.split_misses(split, SplitGuard() if options.host_compute == "auto" else None)
        if shares_memory and budget.kept_slots < slots:
            engine.share_memory(budget.share)
        undo.pop_all()
    trim_heap()
    release_code()
    return engine


def _open_log(out: Path, policy: Policy, facts: Mapping[str, Any], segment_s: float) -> "ServeLog":
    from moetool.runtime.recording.gate_log import ServeLog  # with Arrow, which other servers do without
    from moetool.trace.segments import SegmentLimits

    columns = {"topk"} | (policy.columns & set(KEEP))
    return ServeLog(out, columns, policy.distance, facts, SegmentLimits(seconds=segment_s))


def _splits(options: ServeOptions, policy: Policy, device: torch.device, alone: bool) -> bool:
    """Whether the host computes some misses beside a device. Args: alone: whether no other machine computes experts.

    Raises:
        UsageError: the options ask for it where it is impossible.
    """
    reasons = {
        "no GPU computes beside the host": not is_staged(device),
        f"{options.devices} devices share the experts": options.devices > 1,
        "other machines compute experts": not alone,
        "the policy itself places misses": policy.computes_on_host,
        "deterministic=true": options.deterministic,
    }
    why = next((reason for reason, holds in reasons.items() if holds), None)
    if why is not None and options.host_compute == "on":
        raise UsageError(f"host_compute=on, but {why}; leave out one of them")
    return why is None and options.host_compute != "off"


def _batcher(
    loaded: LoadedModel, options: ServeOptions, *, first_kv_tokens: int, resident: bool
) -> Batcher | OwnCaches:
    limit = 1 if options.deterministic else options.max_requests
    most = limit or (_MANY_REQUESTS if resident else _FEW_REQUESTS)
    batcher = open_batcher(
        loaded.model,
        max_requests=most,
        kv_tokens=options.kv_tokens,
        max_batch_tokens=max(options.prefill_chunk, most),
        unreserved=None if limit else _FEW_REQUESTS,
        prefix_caching=options.prefix_caching and not options.deterministic,
        max_prompt_wait_s=options.max_prompt_wait,
        first_kv_tokens=first_kv_tokens,
        own=loaded.checkpoint.cache_size(loaded.model.dtype),
    )
    if options.keep_prefixes:
        if not isinstance(batcher, Batcher):
            batcher.close()
            raise UsageError(
                f"keep_prefixes is true, but the caches of {loaded.spec.name} are not in pages; leave it out"
            )
        state = Path(options.state) if options.state else None
        path = prefix_file(loaded.spec, loaded.model.dtype, loaded.model.device)
        if state is not None:
            path = state.with_name(f"{state.name}{PREFIXES_SUFFIX}")
        batcher.restore_prefixes(path, {"revision": loaded.spec.revision, "version": __version__})
    return batcher


def open_pooled(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device = CPU,
    *,
    device_memory_bytes: int | Budget,
    host_memory_bytes: int | None = None,
    io_threads: int = 2,
    policy: str = "lru",
    pool: str = "one",
) -> LoadedModel:
    """Open a model with an expert pool in the memory that dense weights leave free.

    For `moetool.capture.run`: every forward must be announced (`LoadedModel.begin_forward`).

    Args:
        device_memory_bytes: total for dense weights and expert slots, or its division.
        host_memory_bytes: memory of the host tier, as in `ServeOptions`.
        io_threads: threads that read experts.
        policy: cache policy without a predictor.
        pool: form of the pool, as in `ServeOptions`.

    Effects: allocates the pool; `LoadedModel.close` ends its threads. On a CPU with a divided memory, the C library
        returns large blocks as soon as they are freed, for the life of the process.

    Raises:
        UsageError: the policy is unknown or needs a predictor or the future.
        CapacityError: the smallest possible pool does not fit.
    """
    kind = policy_class(policy)
    if kind.needs_future or kind.needs_predictor or not kind.lossless or kind.computes_on_host:
        raise UsageError(
            f"capture cannot use policy {policy}, which needs a predictor or the future, changes routes or computes on "
            "the host; choose lru, lfu, lfru or foresight"
        )
    with contextlib.ExitStack() as undo:
        loaded = load_lazy(checkpoint, dtype, device, products=True)
        undo.callback(loaded.close)
        if isinstance(device_memory_bytes, Budget):
            budget = device_memory_bytes
            if device.type == "cpu" and budget.limit_bytes is not None:
                return_freed_memory(budget.activation_bytes)
        else:
            options = ServeOptions(device=device.type, dtype=str(dtype).removeprefix("torch."))
            wishes = Wishes(options=options, device_memory_bytes=device_memory_bytes, kv_cache=False)
            budget = divide_memory(checkpoint, wishes)
        layer_slots = equal_slots(loaded.spec, budget.slots, SHARES[pool]) if pool in SHARES else ()
        residency = Residency(build_policy(policy, loaded.spec, {}, budget.slots), layer_slots=layer_slots)
        store = open_store(loaded, residency, io_threads, host_memory_bytes=host_memory_bytes)
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
    if not kind.uses() or (path is None and (plan is None or plan.predictor is None)):
        return None  # build_policy says if one is needed
    from moetool.training.predictor import load_predictor

    if path is not None:
        predictor = load_predictor(path)
        return predictor if kind.uses(predictor) else None
    assert plan is not None and plan.predictor is not None
    predictor = load_predictor(Path(plan.predictor.path))
    if predictor.sha256 != plan.predictor.sha256:
        raise MismatchError(
            f"the predictor at {plan.predictor.path} has sha256 {predictor.sha256[:12]}, but the plan was made with "
            f"{plan.predictor.sha256[:12]}; make a new plan, or give the right predictor with --predictor"
        )
    return predictor if kind.uses(predictor) else None
