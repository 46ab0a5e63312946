"""moetool: capture the routing of Mixture-of-Experts models, predict it, plan by it, serve by the plan.

Three buildings under one roof. A package imports only packages listed before it, lazy imports included; plugins are
loaded by name. The core decides over integers and arrays, and imports neither torch nor transformers:

    base          the ground floor: types, errors, settings, plugins, durable files, JSON, machine facts, logs, tables
    trace         the trace: Parquet schema, reader, writer, edit, diff; formats/ of other programs, one per file
    prompts       data sets and recipes of prompts
    prediction    predictions from routes alone: memories of tokens, expert maps, activation matrices
    caching       the contract of a cache policy, residency, plans; policies/, one per file
    costing       measured cost curves; prices and the timeline
    placement     demand, scoring, migration, the re-placement decision; planners/, one per file; exports/ to engines
    simulation    a cluster, event by event
    tuning        replay, cache plans, advice
    report        pages and figures

Kernels multiply stored numbers; they know no models:

    kernels       products, attention, norms: cpu/ compiled, gpu/ in Triton

The engine runs models:

    models        what a checkpoint is: spec, loading; files/, families/, weights/, one stored form per file
    training      predictors as torch modules: contract, training, evaluation; quantize/, replicas of few bits
    predictors    (next to this package) predictors, one per file
    runtime       running a model larger than memory: loop/, kv/, experts/, recording/
    measuring     profile, doctor, fit, alpha, verify: a machine, and a served model against transformers
    capture       from a model and prompts to a trace
    serving       the OpenAI-compatible HTTP API
    cluster       live servers: edge (Prism) and parallel (DIRECTOR)
    bench         paired measurements, and the claims of the papers
    cli           the commands, one module per subject; the only importer of typer

The glossary, with one word per concept, for code, help, tables and guides:

    checkpoint    a model's files: config, tokenizer, weights
    expert        one feed-forward network of a MoE layer, logical; its key is layer * experts + number
    shared expert  an expert that every token uses; part of the dense weights, never in the pool
    dense weights  everything but the routed experts
    router, gate  the network that scores the experts of a layer for each token; logits before, scores after it
    top-k         the experts that a token uses; routing: the top-k of many tokens
    event         the distinct experts that one forward needs at one layer; the unit of every cache decision
    forward       one pass of a batch through the model
    phase         prefill (prompt tokens) or decode (one new token per request), by the request's state
    iteration     the number of a forward within its request: 0 is the prompt
    slot          device memory for one expert, physical
    pool          all slots of a device
    residency     which experts are in the pool
    policy        the algorithm that decides prefetches, evictions, and loading or host compute for each miss
    hit           an expert that was resident when needed: kept (since its last use) or prefetched in time
    hit rate      hits / needed experts, each counted once per event
    late hit      a prefetched expert whose copy had not finished: a hit, with stall
    miss          an expert that was not resident: an on-demand load, or computed on the host
    on-demand load  loading an expert that an event is waiting for; prefetch: loading one before it is needed
    eviction      removing an expert from its slot to make room for another
    stall         seconds that the model waits for bytes
    tier          a level of storage: device, host or disk
    predictor     a model that predicts the experts used next; its distance is the number of layers ahead
    match         share of the true top-k among the predicted top-k
    replica       a second copy: of an expert on another GPU, or of a model in fewer bits
    trace         a recorded routing, token by token; spec: a model's MoE shape, which every artefact carries
    replay        running policies over a trace without the model
    held out      not used to train the predictor or make the plan that is scored
    profile       measured costs of a machine and a model; timeline: the clock of a replay, driven by these costs
    plan          a decision in a file: cache plan, placement plan, migration plan
    placement     the assignment of experts to GPUs; demand: how often each expert is used, and where
    migration     moving experts from one placement to another; re-placement: the decision to migrate
    server        one machine of an edge cluster; rank: one process of an expert-parallel group; head: their coordinator
    worker        a process that computes for a head
    load          tokens routed to an expert or a GPU; load balance: how even the loads are
    TTFT, TPOT    time to the first token, time per output token
"""

import os

# Instead of typing's, whose slow import would delay the handler of Ctrl-C.
TYPE_CHECKING = False

__version__ = "0.2.0"

_PUBLIC = {
    "CaptureOptions": "capture.run:CaptureOptions",
    "ModelSpec": "base.types:ModelSpec",
    "MoetoolError": "base.errors:MoetoolError",
    "ReplaySetup": "tuning.replay:ReplaySetup",
    "ServeOptions": "runtime.serve_options:ServeOptions",
    "build_engine": "runtime.assembly:build_engine",
    "capture_trace": "capture.run:capture",
    "evaluate_predictors": "training.evaluate:evaluate",
    "load_cache_plan": "caching.plan:CachePlan.load",
    "load_placement_plan": "placement.plan:PlacementPlan.load",
    "load_predictor": "training.predictor:load_predictor",
    "load_profile": "costing.costs:CostProfile.load",
    "open_trace": "trace.reader:Trace",
    "plan_cache": "tuning.cache_planning:plan_cache",
    "record": "runtime.recording.model_recording:record",
    "replay_trace": "tuning.replay:replay",
    "train_predictor": "training.training:train",
}
"""The public API: names and where they are defined. Importing moetool imports none of it; using a name does."""

if TYPE_CHECKING:
    from typing import Any

    from moetool.base.errors import MoetoolError as MoetoolError
    from moetool.base.types import ModelSpec as ModelSpec
    from moetool.caching.plan import CachePlan
    from moetool.capture.run import CaptureOptions as CaptureOptions
    from moetool.capture.run import capture as capture_trace
    from moetool.costing.costs import CostProfile
    from moetool.placement.plan import PlacementPlan
    from moetool.runtime.assembly import build_engine as build_engine
    from moetool.runtime.recording.model_recording import record as record
    from moetool.runtime.serve_options import ServeOptions as ServeOptions
    from moetool.trace.reader import Trace as open_trace
    from moetool.training.evaluate import evaluate as evaluate_predictors
    from moetool.training.predictor import load_predictor as load_predictor
    from moetool.training.training import train as train_predictor
    from moetool.tuning.cache_planning import plan_cache as plan_cache
    from moetool.tuning.replay import ReplaySetup as ReplaySetup
    from moetool.tuning.replay import replay as replay_trace

    load_cache_plan = CachePlan.load
    load_placement_plan = PlacementPlan.load
    load_profile = CostProfile.load

__all__ = ["__version__", *sorted(_PUBLIC)]


def __getattr__(name: str) -> "Any":
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, path = _PUBLIC[name].partition(":")
    import importlib
    from operator import attrgetter

    return attrgetter(path)(importlib.import_module(f"{__name__}.{module}"))


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})


if os.environ.get("MOETOOL_LOG"):  # in every process of moetool, whatever it imports first
    from moetool.base import logs

    logs.configure_if_readable()
