"""GET /metrics: the engine's counters and client latencies in Prometheus' format."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moetool.runtime.request import EngineLike


class _Entry(NamedTuple):
    """Exposition of one engine value; entries of the same name differ in their label."""

    name: str
    help: str
    label: tuple[str, str] | None = None


_USES = "Experts that forwards needed: resident, prefetched in time, prefetched late, or missed and loaded on demand."
_REQUESTS = "Requests in the engine."

_COUNTERS = {
    "hits_kept": _Entry("moetool_expert_uses", _USES, ("outcome", "kept")),
    "hits_prefetched": _Entry("moetool_expert_uses", _USES, ("outcome", "prefetched")),
    "hits_late": _Entry("moetool_expert_uses", _USES, ("outcome", "late")),
    "misses": _Entry("moetool_expert_uses", _USES, ("outcome", "missed")),
    "hosted": _Entry("moetool_expert_uses_on_host", "Experts that the host computed instead of loading them."),
    "prefetch_wasted": _Entry("moetool_prefetches_wasted", "Prefetched experts that were evicted before any use."),
    "expert_reads": _Entry("moetool_expert_reads", "Experts read from storage."),
    "prefetch_bytes_read": _Entry("moetool_prefetch_read_bytes", "Bytes of prefetched experts read from storage."),
    "reads_retried": _Entry("moetool_reads_retried", "Reads from storage that failed and were retried."),
    "bytes_read": _Entry("moetool_read_bytes", "Bytes of expert weights read from storage."),
    "host_hits": _Entry("moetool_host_hits", "Experts loaded from host memory."),
    "host_bytes": _Entry("moetool_host_bytes", "Bytes of expert weights loaded from host memory."),
    "stall_seconds": _Entry("moetool_stall_seconds", "Seconds that forwards waited for expert weights."),
    "host_stall_seconds": _Entry("moetool_host_stall_seconds", "Seconds of these waits for weights in host memory."),
    "tokens_prompt": _Entry("moetool_prompt_tokens", "Prompt tokens of requests."),
    "tokens_reused": _Entry("moetool_reused_prompt_tokens", "Prompt tokens whose KV cache was reused."),
    "tokens_generated": _Entry("moetool_generated_tokens", "Tokens generated."),
    "kv_pages_evicted": _Entry("moetool_kv_pages_evicted", "KV cache pages of earlier requests that were evicted."),
    "forwards": _Entry("moetool_forwards", "Forward passes of the model."),
    "forward_seconds": _Entry("moetool_forward_seconds", "Duration of forward passes in seconds, stalls included."),
    "requests_preempted": _Entry(
        "moetool_requests_preempted", "Running requests that gave way to a client with fewer, and went on later."
    ),
    "connections_unread": _Entry(
        "moetool_connections_unread", "Connections that were cut because their clients did not read."
    ),
    "failures": _Entry("moetool_failures", "Forward passes that failed."),
    "gate_log_rows_written": _Entry("moetool_gate_log_rows_written", "Rows of the gate log in closed segments."),
    "gate_log_rows_lost": _Entry("moetool_gate_log_rows_lost", "Rows of the gate log that will never be written."),
}
_GAUGES = {
    "queue_waiting": _Entry("moetool_requests", _REQUESTS, ("state", "waiting")),
    "queue_running": _Entry("moetool_requests", _REQUESTS, ("state", "running")),
    "slots": _Entry("moetool_slots", "Expert slots in the pool."),
    "slots_bytes": _Entry("moetool_slots_bytes", "Bytes of the pool of expert slots."),
    "kv_bytes": _Entry("moetool_kv_cache_bytes", "Bytes of the KV cache."),
    "forward_running_seconds": _Entry(
        "moetool_forward_running_seconds", "Age of the running forward pass in seconds; 0 if none runs."
    ),
    "host_pool_bytes": _Entry("moetool_host_pool_bytes", "Bytes of the pool of host memory."),
    "gate_log_rows_waiting": _Entry("moetool_gate_log_rows_waiting", "Rows of the gate log in memory."),
    "gate_log_failing": _Entry("moetool_gate_log_failing", "1 while the gate log cannot be written."),
}
_LAYERS = {
    "needed": _Entry("moetool_layer_needed_experts", "Experts that a layer's events needed (of ranks: its tokens)."),
    "hits": _Entry("moetool_layer_expert_hits", "Those of them that were resident."),
    "loaded": _Entry("moetool_layer_loaded_experts", "Loads of a layer's experts, on demand and ahead."),
    "resident": _Entry("moetool_layer_resident_experts", "Experts of a layer in the pool, or on ranks."),
}


class Metrics:
    """One server's registry.

    Args:
        server_counts: returns the server's own counters by name.
    """

    def __init__(self, engine: EngineLike, server_counts: Callable[[], Mapping[str, float]] = dict) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Collector(engine, server_counts))
        self._first_token = Histogram(
            "moetool_time_to_first_token_seconds",
            "Seconds from the submission of a request to its first token.",
            buckets=(0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 180),
            registry=self._registry,
        )
        self._next_token = Histogram(
            "moetool_inter_token_seconds",
            "Seconds between two tokens of one request.",
            buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10),
            registry=self._registry,
        )

    def observe_token(self, elapsed_s: float, *, first: bool) -> None:
        """Record a token's time since the submission (`first`) or since the previous token."""
        (self._first_token if first else self._next_token).observe(elapsed_s)

    def exposition(self) -> bytes:
        """Return the text for Prometheus."""
        return generate_latest(self._registry)


class _Collector(Collector):
    """Reads the counters of engine and server at every scrape, so that nothing is counted twice."""

    def __init__(self, engine: EngineLike, server_counts: Callable[[], Mapping[str, float]]) -> None:
        self._engine, self._server_counts = engine, server_counts

    def describe(self) -> Iterable[Metric]:
        return []  # registering must not ask an engine that is still starting

    def collect(self) -> Iterable[Metric]:
        ready = GaugeMetricFamily("moetool_ready", "1 while requests are accepted.")
        ready.add_metric([], float(self._engine.state == "ready"))
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {"moetool_ready": ready}
        for key, value in {**self._engine.metrics(), **self._server_counts()}.items():
            counter = key in _COUNTERS
            # Expose a number without an entry in this table, without its unit.
            entry = _COUNTERS.get(key) or _GAUGES.get(key) or _Entry(f"moetool_{key}", f"The engine's {key}.")
            label, label_value = ([entry.label[0]], [entry.label[1]]) if entry.label else ([], [])
            if entry.name not in families:
                make = CounterMetricFamily if counter else GaugeMetricFamily
                families[entry.name] = make(entry.name, entry.help, labels=label)
            families[entry.name].add_metric(label_value, value)
        yield from families.values()
        yield from _by_layer(self._engine.stats())


def _by_layer(stats: Mapping[str, Any]) -> Iterator[Metric]:
    """The counts of each layer, labelled by its number in the model."""
    experts = stats.get("experts") or {"layers": (), "by_layer": {}}
    for name, values in experts["by_layer"].items():
        entry = _LAYERS[name]
        make = GaugeMetricFamily if name == "resident" else CounterMetricFamily
        family = make(entry.name, entry.help, labels=["layer"])
        for layer, value in zip(experts["layers"], values, strict=True):
            family.add_metric([str(layer)], value)
        yield family
