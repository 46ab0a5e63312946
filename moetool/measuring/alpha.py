"""Choice of SMoE's alpha by live time and loss of several values on held-out text."""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from statistics import fmean, median

import torch

from moetool.base import tables
from moetool.base.errors import MismatchError, UsageError
from moetool.base.families import require_substitutable
from moetool.base.types import ForwardInfo, Phase
from moetool.base.validation import outside_vocabulary
from moetool.caching.plan import CachePlan
from moetool.caching.policies.smoe import Policy, choose_alpha
from moetool.caching.policy import build_policy
from moetool.caching.residency import Residency
from moetool.models.cache_argument import cache_argument
from moetool.models.checkpoint import Checkpoint
from moetool.models.loading import load_lazy, parse_devices, parse_dtype, use_threads
from moetool.runtime.budget import Budget
from moetool.runtime.experts.forward import ExpertRuntime
from moetool.runtime.experts.resident_forward import options_beside_gpu
from moetool.runtime.experts.store import open_store
from moetool.runtime.serve_options import ServeOptions


@dataclass(frozen=True, kw_only=True)
class AlphaOptions:
    """Options of the measurement.

    Attributes:
        alphas: values to measure, in addition to 0, the lossless one.
        tokens: length of each text; shorter ones are left out.
        known: prompt tokens of each text; the rest are fed one at a time, as in decoding.
        texts: maximum number of texts, evenly drawn from those of sufficient length.
        rounds: timings of every alpha in turn, of which the median counts; the loss is from the first.
    """

    alphas: tuple[float, ...] = (0.0, 0.1, 0.2, 0.3, 0.5, 0.8)
    tokens: int = 64
    known: int = 8
    texts: int = 8
    rounds: int = 3

    def __post_init__(self) -> None:
        if len(set(self.alphas)) < 2 or not all(0 <= alpha <= 1 for alpha in self.alphas):
            raise UsageError(f"alphas are {list(self.alphas)}, expected two or more different ones from 0 to 1")
        if not 0 < self.known < self.tokens - 1 or self.texts < 1 or self.rounds < 1:
            raise UsageError("expected 0 < known < tokens - 1, and at least one text and one round")


@dataclass(frozen=True, slots=True, kw_only=True)
class AlphaPoint:
    """Time and loss under one alpha.

    Attributes:
        tpot_s: mean seconds per token fed alone.
        nats: mean cross-entropy of the text's next tokens.
        same: share of tokens with the same likeliest next token as under the first alpha.
        hit_rate: hit rate in decoding.
        bytes_per_token: loaded bytes per token in decoding.
    """

    alpha: float
    tpot_s: float
    nats: float
    same: float
    hit_rate: float
    bytes_per_token: float


@dataclass(frozen=True, slots=True)
class _Pass:
    seconds: float
    nats: float
    likeliest: tuple[int, ...]
    hit_rate: float
    bytes_per_token: float


def plan_alpha(
    checkpoint: Checkpoint,
    texts: Sequence[str],
    budget: Budget,
    target_tpot_s: float,
    *,
    serve: ServeOptions | None = None,
    options: AlphaOptions | None = None,
    on_pass: Callable[[int], object] = lambda number: None,
    on_points: Callable[[Sequence[AlphaPoint]], object] = lambda points: None,
) -> CachePlan:
    """Plan the policy smoe with the smallest alpha that is fast enough, by a curve through measured values.

    A pass over the first text warms up. Each round begins with another alpha.

    Args:
        texts: held-out texts.
        budget: the division of the device's memory.
        target_tpot_s: R, the maximum seconds per token.
        serve: serving options of the plan: device, host memory, threads, and smoe's own in `policy`, of which alpha is
            chosen here.
        on_pass: called after every pass over the texts.
        on_points: called with the measured values, before an alpha is chosen.

    Source: SMoE, Eq. 5 and section V-C (`moetool.caching.policies.smoe.choose_alpha`). The paper minimises the loss by
        taking the smallest alpha; the loss is measured here too, in the plan's evidence, to check that for this model.

    Raises:
        UsageError: no alpha is fast enough, there is no such device or several, the texts are too short, or the model
            allows no substitution.
        MismatchError: a text has a token that the model does not embed.
    """
    serve, options = serve or ServeOptions(), options or AlphaOptions()
    parse_devices(serve.device, serve.devices, serve.first_device or 0)
    if serve.devices != 1:
        raise UsageError(
            f"alpha is measured on one device, but devices is {serve.devices}; give devices to 'moetool serve' only"
        )
    tokenizer = checkpoint.tokenizer
    ids = [tokenizer(text)["input_ids"][: options.tokens] for text in texts]
    for number, row in enumerate(ids, start=1):
        if why := outside_vocabulary(row, checkpoint.vocab_size):
            raise MismatchError(f"text {number} of the data: {why}; leave it out, or use the model's own tokenizer")
    long = [row for row in ids if len(row) == options.tokens]
    count = min(options.texts, len(long))
    ids_ST = [long[place * len(long) // count] for place in range(count)]
    alphas = sorted({0.0, *options.alphas})
    if not ids_ST:
        raise UsageError(f"none of {len(texts)} texts has {options.tokens} tokens; give longer ones, or --set tokens=N")
    _feed(checkpoint, ids_ST[:1], 0.0, budget.slots, serve, options.known)
    passes: dict[float, list[_Pass]] = {alpha: [] for alpha in alphas}
    for number in range(options.rounds):
        turn = number % len(alphas)
        for place, alpha in enumerate(alphas[turn:] + alphas[:turn]):
            passes[alpha].append(_feed(checkpoint, ids_ST, alpha, budget.slots, serve, options.known))
            on_pass(number * len(alphas) + place + 1)
    points = [_point(alpha, made, passes[0.0][0].likeliest) for alpha, made in passes.items()]
    on_points(points)
    alpha = choose_alpha([p.alpha for p in points], [p.tpot_s for p in points], target_tpot_s)
    return _plan(checkpoint, ids_ST, alpha, points, budget, target_tpot_s, serve)


def print_points(slots: int, total_experts: int, points: Sequence[AlphaPoint]) -> None:
    tables.print_table(
        f"smoe with {slots} of {total_experts} experts, live",
        ("alpha", "ms / token", "nats / token", "more than alpha 0", "same token", "hit rate", "MB / token"),
        [
            [
                f"{point.alpha:g}",
                f"{point.tpot_s * 1e3:.2f}",
                f"{point.nats:.4f}",
                f"{point.nats - points[0].nats:+.4f}",
                tables.percent(point.same),
                f"{point.hit_rate:.3f}",
                f"{point.bytes_per_token / 1e6:.3f}",
            ]
            for point in points
        ],
    )


def _feed(
    checkpoint: Checkpoint, ids_ST: Sequence[Sequence[int]], alpha: float, slots: int, serve: ServeOptions, known: int
) -> _Pass:
    """Feed the texts in turn to an initially empty pool: the first tokens together, the others alone."""
    seconds, nats, likeliest, forwards = [], [], [], 0
    dtype, (device, *_) = parse_dtype(serve.dtype), parse_devices(serve.device, serve.devices, serve.first_device or 0)
    with contextlib.closing(load_lazy(checkpoint, dtype, device, products=serve.products)) as loaded:
        require_substitutable(loaded.spec.name, "smoe")
        use_threads(checkpoint.config, serve.threads)
        given = options_beside_gpu(Policy, {**serve.policy, "alpha": alpha}, loaded, slots)
        residency = Residency(build_policy("smoe", loaded.spec, given, slots))
        store = open_store(loaded, residency, serve.io_threads, serve.host_memory_bytes or None)
        runtime, cache_name = ExpertRuntime(loaded, residency, store), cache_argument(loaded.model)
        with contextlib.closing(runtime):
            for request, row in enumerate(ids_ST):
                ids_1T, cache = torch.tensor([row], device=device), None
                for begin, end in [(0, known), *((i, i + 1) for i in range(known, len(row) - 1))]:
                    info = ForwardInfo(
                        forward_id=forwards,
                        request_T=(request,) * (end - begin),
                        phase_T=(Phase.DECODE if begin else Phase.PREFILL,) * (end - begin),
                        position_T=tuple(range(begin, end)),
                        token_id_T=tuple(row[begin:end]),
                    )
                    began = time.perf_counter()
                    with torch.inference_mode():
                        runtime.begin_forward(info)
                        made = loaded.model(ids_1T[:, begin:end], use_cache=True, **{cache_name: cache})
                        last_V = made.logits[0, -1].float().cpu()  # waits for the device
                        runtime.end_forward()
                    cache, forwards = made[cache_name], forwards + 1
                    if begin:
                        seconds.append(time.perf_counter() - began)
                        scores_V = last_V.log_softmax(-1)
                        nats.append(-float(scores_V[row[end]]))
                        likeliest.append(int(scores_V.argmax()))
                residency.end_request(request)
            counts = residency.decode
    moved = counts.loads * loaded.spec.slot_bytes / len(seconds)
    return _Pass(fmean(seconds), fmean(nats), tuple(likeliest), counts.hit_rate, moved)


def _point(alpha: float, passes: Sequence[_Pass], reference: Sequence[int]) -> AlphaPoint:
    first = passes[0]
    return AlphaPoint(
        alpha=alpha,
        tpot_s=median(made.seconds for made in passes),
        nats=first.nats,
        same=fmean(map(int.__eq__, first.likeliest, reference)),
        hit_rate=first.hit_rate,
        bytes_per_token=first.bytes_per_token,
    )


def _plan(
    checkpoint: Checkpoint,
    ids_ST: Sequence[Sequence[int]],
    alpha: float,
    points: Sequence[AlphaPoint],
    budget: Budget,
    target_tpot_s: float,
    serve: ServeOptions,
) -> CachePlan:
    spec = checkpoint.spec
    built = build_policy("smoe", spec, {**serve.policy, "alpha": alpha}, budget.slots)
    nearest = min(points, key=lambda point: abs(point.alpha - alpha))
    text = "\n".join(" ".join(map(str, row)) for row in ids_ST)
    return CachePlan(
        spec=spec,
        policy="smoe",
        options=asdict(built.options),
        slots=budget.slots,
        prefetch_distance=built.distance if built.options.prefetch else 0,
        device_memory_bytes=budget.device_bytes + budget.unused_bytes,
        dense_bytes=budget.dense_bytes,
        kv_bytes=budget.kv_bytes,
        kv_tokens=budget.kv_tokens,
        dtype=serve.dtype,
        predictor_bytes=0,
        budget_bytes=budget.slots_bytes,
        predictor=None,
        trace_sha256=sha256(text.encode()).hexdigest(),
        profile_sha256=None,
        requests_used=tuple(range(len(ids_ST))),
        requests_held_out=(),
        evidence=tuple(asdict(point) for point in points),
        target_tpot_s=target_tpot_s,
        reason=(
            f"alpha {alpha:.3f} is the smallest for which a curve through the measured times reaches "
            f"{target_tpot_s * 1e3:.4g} ms per token (SMoE, Eq. 5); at {nearest.alpha:g}, the nearest measured one, "
            f"a token took {nearest.tpot_s * 1e3:.2f} ms and the text lost {nearest.nats - points[0].nats:+.4f} nats a "
            f"token against alpha {points[0].alpha:g}"
        ),
    )
