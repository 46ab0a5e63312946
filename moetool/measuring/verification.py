"""Comparison of a served model with plain transformers: tokens, logits, chosen experts, weights.

The server's engine generates greedily. Engine and plain transformers then forward each prompt with its answer once,
which gives transformers' choice at every position. In addition, transformers computes each layer on the engine's hidden
states, so that differences are named by layer and expert.
"""

import gc
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moetool.base import plugins
from moetool.base.errors import CapacityError, UsageError
from moetool.base.machine import memory_bytes
from moetool.base.tables import count
from moetool.caching.policy import MIN_SLOTS, policy_class
from moetool.measuring.layer_comparison import MEMORY_SHARE, LayerComparison, LayerResult, Progress, differences
from moetool.measuring.served_answers import Answers, Served
from moetool.models.checkpoint import Checkpoint
from moetool.models.loading import parse_device, parse_dtype, use_threads
from moetool.prompts import gather
from moetool.runtime.budget import divide_with_slots
from moetool.runtime.serve_options import ServeOptions
from moetool.training.predictor import build, save
from moetool.training.tokens import Tokens

TIE = 1e-4
"""Difference of logits below which two tokens are a tie: either is right."""
POLICIES = ("lru", "foresight", "hybrimoe")
"""Default policies: on-demand loading, prefetching, and computing on the host."""
_PROMPT_TOKENS = 48  # at most, of each prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    """Settings of a comparison.

    Attributes:
        policies: cache policies; empty for `POLICIES`, `all` for every lossless one that serves.
        prompts: number of prompts from the embedded sets, cut after 48 tokens.
        tokens: number of tokens to generate for each.
        device: `cpu` or `cuda`.
        dtype: compute data type of both sides. In float32 rounding hides nothing.
        device_memory_bytes: memory for dense weights, KV cache and expert pool (default: a pool of half of the experts,
            at most the free memory).
        layer_by_layer: hold one layer of plain transformers in memory at a time, even if all fits.
    """

    policies: tuple[str, ...] = ()
    prompts: int = 24
    tokens: int = 8
    device: str = "cpu"
    dtype: str = "float32"
    device_memory_bytes: int | None = None
    layer_by_layer: bool = False


@dataclass(slots=True, kw_only=True)
class PolicyResult:
    """One policy against plain transformers.

    Attributes:
        slots: number of slots in its pool.
        exact, ties, differing: numbers of answers that are equal; first differ at a tie; differ.
        first: first difference, or else first tie.
        logits_max, logits_mean: largest and mean difference of logits.
        same_bits: whether its logits equal those of the first policy bit by bit.
        differs_at: first decoder layer whose output differs from the first policy's; None without a difference.
        skipped: reason for skipping it; empty if it ran.
    """

    policy: str
    slots: int = 0
    exact: int = 0
    ties: int = 0
    differing: int = 0
    first: str = ""
    logits_max: float = 0.0
    logits_mean: float = 0.0
    same_bits: bool = True
    differs_at: int | None = None
    skipped: str = ""


@dataclass(slots=True, kw_only=True)
class Comparison:
    """The result of a comparison.

    Attributes:
        oracle: origin of plain transformers' weights.
        whole: whether plain transformers was wholly in memory.
        read_by: the reader of each part of plain transformers; `moetool` where no other one is used.
        contradictions: where the served model contradicts its files, as the library of their format reads them.
        prompts: ids of the embedded prompts.
        base: the policy whose answers were forwarded.
        yardstick_max, yardstick_mean: difference of logits between transformers' own grouped and eager experts; None
            where the family has one implementation.
        tolerance: share of a layer's largest output that its difference may be: the root of the rounding error.
    """

    oracle: str
    whole: bool
    read_by: dict[str, str]
    contradictions: list[str]
    dtype: str
    prompts: list[str]
    num_tokens: int
    base: str
    policies: list[PolicyResult]
    layers: list[LayerResult]
    yardstick_max: float | None
    yardstick_mean: float | None
    tolerance: float
    logits_scale: float
    seconds: float

    @property
    def problems(self) -> list[str]:
        """Return all differences beyond ties, causes first."""
        found = [*self.contradictions, *(text for layer in self.layers for text in layer.problems(self.tolerance))]
        for row in self.policies:
            if row.differing:
                found.append(f"{row.policy}: {row.first}")
            elif not row.skipped and not row.logits_max <= self.logits_limit:
                found.append(
                    f"{row.policy}: logits differ by {row.logits_max:.3g}, expected at most {self.logits_limit:.3g}"
                )
            if row.differs_at is not None and not row.logits_max <= self.logits_limit:
                found.append(f"{row.policy}: layer {row.differs_at} is the first to differ from {self.base}")
        return found

    @property
    def logits_limit(self) -> float:
        """Return the largest difference of logits that counts as rounding."""
        return max(2 * (self.yardstick_max or 0.0), self.tolerance * self.logits_scale)

    @property
    def verdict(self) -> str:
        """Return `exact`, `ties` or `differs`."""
        if self.problems:
            return "differs"
        return "ties" if any(row.ties for row in self.policies) else "exact"

    @property
    def first(self) -> str:
        """Return the first difference, or tie; empty without any."""
        return next(iter(self.problems), "") or next((row.first for row in self.policies if row.ties), "")


def verify(checkpoint: Checkpoint, options: VerifyOptions, on_progress: Progress) -> Comparison:
    """Compare a served model with plain transformers.

    Effects: loads the model once for each policy, and plain transformers once, one after the other.

    Raises:
        UsageError: a policy is unknown or cannot be compared.
        CapacityError: the dense weights and the smallest pool do not fit.
        MismatchError: weights are damaged.
    """
    began = time.perf_counter()
    dtype, device = parse_dtype(options.dtype), parse_device(options.device)
    use_threads(checkpoint.config)
    names, prompts = _prompts(checkpoint, options)
    wanted = [*dict.fromkeys(options.policies or POLICIES)]
    everything = wanted == ["all"]
    policies = plugins.names("policy") if everything else wanted
    reasons = {name: _unfit(name) for name in policies}
    if not everything and (bad := next((name for name in policies if reasons[name]), None)):
        raise UsageError(f"policy {bad} cannot be verified: {reasons[bad]}; choose others")
    policies.sort(key=lambda name: name != POLICIES[0])
    serve, memory = _pool(checkpoint, options, prompts)
    served = Served(
        checkpoint=checkpoint, options=serve, prompts=prompts, num_tokens=options.tokens, device_memory_bytes=memory
    )

    fastest = dtype if serve.products and device.type == "cpu" else None

    def run(policy: str, predictor: Path | None = None, sequences: Any = None) -> Answers:
        def report(done: int) -> None:
            on_progress(f"serving under {policy}", done, 2 * len(prompts))

        return served.answer(policy, predictor=predictor, sequences=sequences, on_progress=report)

    with ExitStack() as stack:
        needing = [name for name in policies if not reasons[name] and policy_class(name).needs_predictor]
        base = next((name for name in policies if not reasons[name] and name not in needing), POLICIES[0])
        reference, predictor = run(base), None
        if needing:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="moetool-verify-"))
            predictor = _counted(checkpoint, reference, Path(folder))
        rows = LayerComparison(checkpoint, reference.computed, dtype, device, fastest)
        plain, yardstick = rows.compare(prompts, reference, options.layer_by_layer, on_progress)
        gc.collect()  # frees plain transformers, which is in reference cycles
        results = []
        for name in policies:
            if reasons[name]:
                results.append(PolicyResult(policy=name, skipped=reasons[name]))
                continue
            try:
                made = reference
                if name != base:
                    made = run(name, predictor if name in needing else None, reference.tokens)
            except (CapacityError, UsageError) as error:
                if not everything:
                    raise
                results.append(PolicyResult(policy=name, skipped=str(error)))
                continue
            results.append(_judge(name, made, reference, plain, rows.decoded, names))
    return Comparison(
        oracle=rows.oracle,
        whole=rows.whole,
        read_by=rows.read_by,
        contradictions=rows.contradictions,
        dtype=options.dtype,
        prompts=names,
        num_tokens=options.tokens,
        base=base,
        policies=results,
        layers=list(rows.results.values()),
        yardstick_max=None if yardstick is None else yardstick[0],
        yardstick_mean=None if yardstick is None else yardstick[1],
        tolerance=rows.tolerance,
        logits_scale=max(float(logits.abs().max()) for logits in plain),
        seconds=time.perf_counter() - began,
    )


def _judge(
    policy: str,
    made: Answers,
    reference: Answers,
    plain: Sequence[torch.Tensor],
    decoded: Mapping[int, torch.Tensor],
    names: Sequence[str],
) -> PolicyResult:
    result = PolicyResult(policy=policy, slots=made.slots)
    result.logits_max, result.logits_mean = differences(
        [(computed.logits, logits) for computed, logits in zip(made.computed, plain, strict=True)]
    )
    for number, tokens in enumerate(made.tokens):
        if number in decoded:
            where = _first_difference(tokens, decoded[number].argmax(dim=-1).tolist(), decoded[number])
        else:
            where = _first_difference(tokens, reference.tokens[number], plain[number])
        if where is None:
            result.exact += 1
            continue
        position, expected, gap = where
        text = (
            f"prompt {names[number]}, token {position + 1}: {tokens[position]} instead of {expected}, "
            f"{gap:.3g} apart in logits"
        )
        tie = gap < TIE
        if tie:
            result.ties += 1
        else:
            result.differing += 1
        if not result.first or (result.differing == 1 and not tie):
            result.first = text
    for ours, first in zip(made.computed, reference.computed, strict=True):
        if torch.equal(ours.logits, first.logits):
            continue
        result.same_bits = False
        layers = [n for n, pair in enumerate(zip(ours.outputs, first.outputs, strict=True)) if not torch.equal(*pair)]
        if layers and (result.differs_at is None or layers[0] < result.differs_at):
            result.differs_at = layers[0]
    return result


def _first_difference(
    tokens: Sequence[int], sequence: Sequence[int], logits_NV: torch.Tensor
) -> tuple[int, int, float] | None:
    """Return position, expected token and distance in logits of the first token that transformers would not choose.

    Args:
        sequence: the answer behind the logits, which are valid up to the first token that differs from it.
    """
    for position, token in enumerate(tokens):
        row_V = logits_NV[position]
        expected = int(row_V.argmax())
        if token != expected:
            return position, expected, float(row_V[expected] - row_V[token])
        if token != sequence[position]:
            return None
    return None


def _prompts(checkpoint: Checkpoint, options: VerifyOptions) -> tuple[list[str], list[list[int]]]:
    """Return ids and tokens of prompts, from every embedded set in turn."""
    loaded = gather.load(["all"], max_prompts=options.prompts)
    by_set: dict[str, list[Any]] = {}
    for prompt in loaded:
        by_set.setdefault(prompt.dataset, []).append(prompt)
    turns = [group[i] for i in range(options.prompts) for group in by_set.values() if i < len(group)]
    chosen = turns[: options.prompts]
    tokens = [prompt.token_ids(checkpoint.tokenizer, checkpoint.vocab_size, _PROMPT_TOKENS) for prompt in chosen]
    return [f"{prompt.dataset}/{prompt.prompt_id}" for prompt in chosen], tokens


def _pool(checkpoint: Checkpoint, options: VerifyOptions, prompts: Sequence[Sequence[int]]) -> tuple[ServeOptions, int]:
    """Return setup and memory of the served model."""
    longest = max(map(len, prompts)) + options.tokens
    kv_tokens = max(256, 8 * longest)
    serve = ServeOptions(device=options.device, dtype=options.dtype, kv_tokens=kv_tokens, host_compute="off")
    if options.device_memory_bytes is not None:
        return serve, options.device_memory_bytes
    device = parse_device(options.device)
    free = memory_bytes()[1] if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
    budget = divide_with_slots(checkpoint, serve, max(MIN_SLOTS, checkpoint.spec.total_experts // 2))
    slot, fixed = budget.slots_bytes // budget.slots, budget.device_bytes - budget.slots_bytes
    slots = min(budget.slots, int((free * MEMORY_SHARE - fixed) // slot))
    if slots < MIN_SLOTS:
        raise CapacityError(
            f"{checkpoint.name} needs {count(fixed + MIN_SLOTS * slot, 'B')} for dense weights, KV cache and "
            f"{MIN_SLOTS} experts, but {count(free, 'B')} are free; free memory, or give --dtype bfloat16"
        )
    return serve, fixed + slots * slot


def _unfit(policy: str) -> str:
    """Return why a policy cannot be compared; empty if it can."""
    kind = policy_class(policy)
    if kind.needs_future:
        return "it needs future requests"
    return "" if kind.lossless else "it changes the routing"


def _counted(checkpoint: Checkpoint, reference: Answers, folder: Path) -> Path:
    """Return a predictor that has counted the routes of the first policy's forwards."""
    spec = checkpoint.spec
    made = build("affinity", spec)
    rows = [
        torch.stack([computed.routes[layer][0] for layer in range(spec.num_layers)], dim=1)
        for computed in reference.computed
    ]
    made.count(Tokens(experts_TPK=torch.cat(rows)))
    save(made, folder, {"trace": {"sha256": ""}, "requests": {}, "seen_prompts": []})
    return folder
