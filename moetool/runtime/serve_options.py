"""Settings of a server."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from moetool.base.config import MOST_THREADS, POSITIVE, Span, require_within
from moetool.base.errors import UsageError, unknown_name
from moetool.caching.layer_slots import require_pool_form
from moetool.runtime.sizing import GOOD_CONTEXT

_LEAST = {
    "devices": 1,
    "host_memory_bytes": 0,
    "kv_tokens": 16,
    "expected_context": 16,
    "prefill_chunk": 1,
    "max_requests": 0,
    "io_threads": 1,
    "threads": 0,
}

HOST_COMPUTE = ("auto", "on", "off")


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
        keep_prefixes: keep these prefixes in a file between runs: beside `state`, else in the user's cache folder
            (`moetool cache`). Written at the end, as large as the KV cache; unusable with another checkpoint, dtype or
            device. Not for families whose requests have caches of their own, or policies that change routes.
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
        host_compute: whether the host computes some misses beside a GPU while it loads others, so that each event ends
            first (`moetool.runtime.split_costs`). `auto` stops that where measured steps are slower with it; `on` does
            not. Answers are then equal up to rounding. `off` loads every miss: one batch composition gives the same
            bits under every budget and every lossless policy that does not compute on the host itself. No effect
            where every expert has a slot.
        warm_start: keep residents and statistics in the user's cache folder and load them at the next start (`moetool
            cache`). Off while a gate log is written, so that its replay begins as the server did.
        oracle_s: seconds between comparisons with LRU, the plan's policy and Belady on the server's most recent events,
            for `/stats` and the log (0: no comparison).
        state: file that keeps the policy's learned state between runs (empty: none).
        log_segment_s: seconds after which `--log` closes a segment. Closed segments can be read and survive a kill.
    """

    REFUSED: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("change_policy", "remember_policy"), "the policy stays as it is; set --policy"),
        "borrowed_slots": "the server chooses it; set prefill_chunk, and prompts borrow no slots",
        "first_chunk": "the server chooses it; set prefill_chunk, and prompts borrow no slots",
        "first_kv_tokens": "the server chooses it; set kv_tokens, and the KV cache borrows no slots",
        "kv_slots": "the server chooses it; set kv_tokens, and the KV cache borrows no slots",
        "prefetch": "prefetching has no limits; choose a policy that does not prefetch, such as lru",
    }
    """Earlier settings, and what to do instead."""

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
    keep_prefixes: bool = False
    max_requests: int = 0
    deterministic: bool = False
    io_threads: int = 2
    threads: int = 0
    products: bool = True
    policy: dict[str, Any] = field(default_factory=dict)
    pool: str | None = None
    host_compute: str = "auto"
    warm_start: bool = False
    oracle_s: float = 60.0
    state: str = ""
    log_segment_s: float = 10.0

    def __post_init__(self) -> None:
        if self.pool is not None:
            require_pool_form("pool", self.pool)
        if self.host_compute not in HOST_COMPUTE:
            raise unknown_name("host_compute", self.host_compute, HOST_COMPUTE)
        require_within(self, **{name: Span(least) for name, least in _LEAST.items()})
        require_within(self, threads=Span(0, MOST_THREADS), io_threads=Span(1, MOST_THREADS))
        if self.first_device is not None:
            require_within(self, first_device=Span(0))
        if self.deterministic and self.max_requests > 1:
            raise UsageError(
                f"max_requests is {self.max_requests}, but deterministic=true runs one request at a time; leave one out"
            )
        if self.keep_prefixes and (self.deterministic or not self.prefix_caching):
            other = "deterministic=true" if self.deterministic else "prefix_caching=false"
            raise UsageError(f"keep_prefixes is true, but {other} keeps no prefixes; leave one out")
        require_within(self, max_prompt_wait=Span(0, below=True), oracle_s=Span(0, below=True), log_segment_s=POSITIVE)
