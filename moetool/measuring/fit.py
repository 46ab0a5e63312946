"""Whether a model runs on a machine, how fast, and with which settings, before any weight is downloaded.

Sizes come from the config or from a GGUF header, the division of memory from `moetool.runtime.budget`, misses from the
model's last server or from published routes, rates from this machine or from vendors' figures.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from moetool.base import families
from moetool.base.config import parse
from moetool.base.errors import CapacityError, MoetoolError
from moetool.costing.estimates import STEP_SHARE, ModelTraffic, TokenEstimate, prompt_seconds, token_estimate
from moetool.measuring.fit_machine import SYSTEM_BYTES, FitMachine, FitOptions, fit_machine, size
from moetool.measuring.machine_rates import Fact
from moetool.models.checkpoint import Checkpoint
from moetool.models.files.location import shape_names
from moetool.models.loading import parse_dtype
from moetool.runtime.automatic import on_this_machine
from moetool.runtime.budget import (
    Budget,
    Machine,
    Wishes,
    divide_memory,
    every_slot_bytes,
    footprint,
    gpu_with,
    this_machine,
)
from moetool.runtime.expected_reads import PUBLISHED, MissCurve, best_split, nearest_curve, published_curves
from moetool.runtime.serve_options import ServeOptions

PROMPT_TOKENS = 1000
ANSWER_TOKENS = 267
"""Tokens of an answer of 200 words: four for three words."""
SERVER_BYTES = 555_000_000
"""Resident memory of `moetool serve` before it loads a model (549 to 564 MB with torch 2.13). This process's own
depends on what it has measured."""
_HOST_SHARE = 0.8  # of the host memory that experts take beside a GPU, as in `moetool.runtime.automatic`
_CPU_GB = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
_GPU_GB = (8, 12, 16, 24, 32, 48, 80, 96, 141, 192, 288, 384, 640, 1128, 1536)
_WORTH = 1.2  # least gain of a step of memory that is worth buying
_VERDICTS = (
    (20.0, "fast enough for any chat"),
    (7.0, "faster than most people read"),
    (3.0, "about as fast as reading: fine for a conversation"),
    (1.0, "fine for a considered answer, slow for a conversation"),
    (0.2, "too slow for a conversation, fine for work that can wait"),
    (0.0, "too slow to wait for"),
)
"""By tokens of an answer per second, the wait for its first one included."""


@dataclass(frozen=True, slots=True)
class WeightForm:
    """Mean bits of weights in a common stored form, scales included.

    Attributes:
        expert_bits, dense_bits: of experts, and of linear layers outside them.
    """

    name: str
    expert_bits: float
    dense_bits: float


FORMS = (
    WeightForm("bfloat16", 16, 16),
    WeightForm("FP8 in blocks", 8, 8),
    WeightForm("GGUF Q8_0", 8.5, 8.5),
    WeightForm("GGUF Q4_K_M", 4.85, 5.2),
    WeightForm("MXFP4 experts", 4.25, 16),
    WeightForm("GGUF Q2_K", 3.0, 3.5),
)
"""GGUF: mixes of llama.cpp's `llama-quantize`. MXFP4: experts alone, as in gpt-oss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySpeed:
    """Speed with one size of memory, or in one stored form.

    Attributes:
        name: the size, or the form.
        memory_bytes: memory of the machine or of the GPU.
        model_bytes: all weights in memory.
        tokens_s: new tokens per second; 0: it does not fit.
        share: share of the experts with slots.
    """

    name: str
    memory_bytes: int
    model_bytes: int
    tokens_s: float
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """How a model runs on a machine.

    Attributes:
        model, machine: in words.
        has_gpu: whether a GPU computes it.
        parameters, active_parameters: of the model, and those that a token multiplies.
        model_bytes: all weights in memory.
        budget: the division of memory; None if the model does not fit.
        problem: why it does not fit.
        token: estimate of a new token after a prompt of `PROMPT_TOKENS`.
        tokens_s_range: new tokens per second with the misses of all published routes, least and most.
        prompt_s: seconds to the first token of such a prompt.
        sizes: speed by memory size, and `worth`, the larger one that is worth buying.
        forms: speed in other stored forms with the same memory.
        command: the command that serves it so.
        facts: origin of every number.
    """

    model: str
    machine: str
    has_gpu: bool
    parameters: int
    active_parameters: int
    model_bytes: int
    budget: Budget | None
    problem: str
    token: TokenEstimate | None
    tokens_s_range: tuple[float, float]
    prompt_s: float
    sizes: tuple[MemorySpeed, ...]
    worth: MemorySpeed | None
    forms: tuple[MemorySpeed, ...]
    command: str
    facts: tuple[Fact, ...]

    @property
    def tokens_s(self) -> float:
        """New tokens per second; 0 if it does not fit."""
        return 0.0 if self.token is None else 1 / self.token.seconds

    @property
    def answer_s(self) -> float:
        """Seconds of an answer of 200 words, its prompt included."""
        return 0.0 if self.token is None else self.prompt_s + (ANSWER_TOKENS - 1) * self.token.seconds

    @property
    def verdict(self) -> str:
        """The answer in one sentence."""
        if self.token is None:
            return f"does not fit: {self.problem}"
        words = next(text for least, text in _VERDICTS if ANSWER_TOKENS / self.answer_s >= least)
        first = f"{spoken(self.prompt_s)} to its first word after a prompt of {PROMPT_TOKENS:,} tokens"
        return f"{spoken(self.answer_s)} for a 200-word answer, {first}: {words}"

    def to_json(self) -> dict[str, Any]:
        token = None
        if self.token is not None:
            token = {name: getattr(self.token, name) for name in TokenEstimate.__slots__} | {"limit": self.token.limit}
        return {
            "model": self.model,
            "machine": self.machine,
            "verdict": self.verdict,
            "fits": self.token is not None,
            "parameters": self.parameters,
            "active_parameters": self.active_parameters,
            "model_bytes": self.model_bytes,
            "memory_bytes": {name: num_bytes for name, num_bytes, _ in memory_parts(self.budget)},
            "expert_slots": None if self.budget is None else self.budget.slots,
            "tokens_per_s": self.tokens_s,
            "tokens_per_s_range": list(self.tokens_s_range),
            "first_token_s": self.prompt_s,
            "answer_s": self.answer_s,
            "token": token,
            "sizes": [_row(row) for row in self.sizes],
            "worth_buying": None if self.worth is None else self.worth.name,
            "formats": [_row(row) for row in self.forms],
            "command": self.command,
            "facts": [dict(zip(("what", "value", "origin"), fact, strict=True)) for fact in self.facts],
        }


def spoken(seconds: float) -> str:
    """Seconds in words: `0.4 s`, `45 s`, `2.3 minutes`, `1.5 hours`."""
    if seconds < 100:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"
    return f"{seconds / 60:.1f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"


def memory_parts(budget: Budget | None) -> list[tuple[str, int, str]]:
    """Parts of memory with their bytes and a word on each; none without a budget."""
    if budget is None:
        return []
    parts = [
        ("dense weights", budget.dense_bytes, "outside the routed experts"),
        ("expert slots", budget.slots_bytes, f"{budget.slots:,} experts; {budget.why['slots']}"),
        ("KV cache", budget.kv_bytes, f"{budget.first_kv_tokens or budget.kv_tokens:,} tokens at first"),
        ("activations", budget.activation_bytes, f"prompts in chunks of up to {budget.chunk_tokens:,} tokens"),
        ("libraries", budget.library_bytes and budget.library_bytes + SERVER_BYTES, "beside the weights"),
        ("host memory", budget.host_bytes, "experts between disk and GPU"),
    ]
    return [part for part in parts if part[1]]


def _row(row: MemorySpeed) -> dict[str, Any]:
    return {name: getattr(row, name) for name in MemorySpeed.__slots__}


def fit(model: str | Checkpoint, options: FitOptions | FitMachine | None = None) -> Fit:
    """Estimate how a model runs on a machine.

    Args:
        model: as for `Checkpoint.open` without weights, or an open checkpoint; opened with its weights if they are
            here, since sizes of quantized experts and the last server's misses are theirs.
        options: describe the machine (default: this one), or the machine.

    Effects: as for `fit_machine`.

    Raises:
        UsageError: there is no such model or machine.
        MismatchError: the model's config is damaged.
    """
    checkpoint = with_weights(Checkpoint.open(model, weights=False) if isinstance(model, str) else model)
    published = nearest_curve(checkpoint.spec)  # refuses a dense model before the machine is measured
    machine = options if isinstance(options, FitMachine) else fit_machine(options or FitOptions(), checkpoint)
    estimator = _Estimator(checkpoint, machine, published)
    budget, problem = estimator.divide(machine.device_bytes)
    serve = f"moetool serve {'MODEL' if checkpoint.name in shape_names() else checkpoint.name}"
    token, prompt_s, known = None, 0.0, (0.0, 0.0)
    if budget is None and machine.has_gpu:
        cores = replace(machine, gpu_bytes=0, rates=replace(machine.rates, device="cpu"))
        if _Estimator(checkpoint, cores, published).divide(cores.device_bytes)[0] is not None:
            problem = f"{problem.removesuffix('.')}. Or leave the GPU out: {serve} --device cpu"
    if budget is not None:
        token = estimator.token(budget.slots)
        prompt_s = estimator.prompt_s(budget.kept_slots, budget.chunk_tokens)
        speeds = [1 / estimator.token(budget.slots, curve).seconds for curve in (estimator.curve, *published_curves())]
        known = min(speeds), max(speeds)
    sizes = tuple(estimator.sizes())
    return Fit(
        model=checkpoint.name,
        machine=machine.name,
        has_gpu=machine.has_gpu,
        parameters=checkpoint.num_parameters,
        active_parameters=checkpoint.num_active_parameters,
        model_bytes=estimator.model_bytes,
        budget=budget,
        problem=problem,
        token=token,
        tokens_s_range=known,
        prompt_s=prompt_s,
        sizes=sizes,
        worth=_worth(sizes, estimator.memory_bytes(budget), 0.0 if token is None else 1 / token.seconds),
        forms=tuple(estimator.forms()),
        command=f"{serve}{machine.flags}",
        facts=(*machine.facts, *estimator.facts()),
    )


def with_weights(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with its weight files, if all are here and undamaged."""
    if checkpoint.weights:
        return checkpoint
    try:
        whole = Checkpoint(checkpoint.path, name=checkpoint.name)
        _ = whole.index  # without weights it raises before a second model is built for the spec
        return whole if whole.spec.num_experts_L == checkpoint.spec.num_experts_L else checkpoint
    except MoetoolError:
        return checkpoint


def options_on(checkpoint: Checkpoint, machine: FitMachine) -> ServeOptions:
    """Return a server's options on a machine."""
    values: dict[str, Any] = {"device": machine.rates.device, "warm_start": True}
    if machine.has_gpu:
        values["host_memory_bytes"] = 0
    options: ServeOptions = parse(ServeOptions, on_this_machine(checkpoint, values)[0], "--set")
    if machine.has_gpu:
        host = min(every_slot_bytes(checkpoint, options), int((machine.host_bytes or 0) * _HOST_SHARE))
        options = replace(options, host_memory_bytes=host)
    return options


def memory_of(checkpoint: Checkpoint, options: ServeOptions, has_gpu: bool, num_bytes: int | None) -> Machine:
    """Return a machine with this much memory. Raises: CapacityError: libraries alone need more."""
    if has_gpu:
        return gpu_with(num_bytes or 0, checkpoint, options)
    return this_machine(checkpoint, options, process_memory_bytes=num_bytes, taken_bytes=SERVER_BYTES)


class _Estimator:
    """Speeds of a model on a machine, by memory size and stored form.

    Args:
        published: the miss curve to use where no server of the model kept tokens.
    """

    def __init__(self, checkpoint: Checkpoint, machine: FitMachine, published: MissCurve) -> None:
        self._checkpoint = checkpoint
        self._machine = machine
        self._options = options = options_on(checkpoint, machine)
        self._footprint = footprint(checkpoint, options)
        served = gpu_with(0, checkpoint, options).curve
        self.curve = published if served is PUBLISHED else served
        self._traffic = self._own_traffic()
        self._rates = machine.rates  # of decode steps
        if self._runs_programs:
            self._rates = replace(machine.rates, layer_s=STEP_SHARE * machine.rates.layer_s)

    @property
    def _runs_programs(self) -> bool:
        """Whether decode steps run as recorded programs."""
        family = families.known(str(self._checkpoint.config.model_type))
        recorded = family is not None and family.decoded == "program" and self._options.dtype == "bfloat16"
        return recorded and not self._machine.has_gpu

    @property
    def model_bytes(self) -> int:
        """All weights in memory."""
        return self._footprint.dense_bytes + self._footprint.num_experts * self._footprint.slot_bytes

    def memory_bytes(self, budget: Budget | None) -> int:
        """Memory of the machine, or of the GPU, to compare with the sizes that are sold."""
        if self._machine.device_bytes is not None:
            return self._machine.device_bytes + (0 if self._machine.has_gpu else SYSTEM_BYTES)
        if budget is None:
            return 0
        return (budget.limit_bytes or 0) + budget.library_bytes + SERVER_BYTES + SYSTEM_BYTES

    def divide(self, num_bytes: int | None) -> tuple[Budget | None, str]:
        """The division of this much memory, or why the model does not fit."""
        wishes = Wishes(options=self._options, share_slots=not self._machine.has_gpu)
        try:
            return divide_memory(self._checkpoint, wishes, self._memory(num_bytes)), ""
        except CapacityError as error:
            return None, str(error)

    def token(self, slots: int, curve: MissCurve | None = None) -> TokenEstimate:
        """Estimate of a new token with this number of slots."""
        return self._token_of(self._traffic, slots, self._options.host_memory_bytes, curve or self.curve)

    def prompt_s(self, slots: int, chunk: int) -> float:
        """Seconds to the first token of a prompt."""
        held = int(self._options.host_memory_bytes // self._traffic.slot_bytes)
        return prompt_seconds(
            self._traffic,
            self._machine.rates,
            tokens=PROMPT_TOKENS,
            chunk=chunk,
            slots=slots,
            host_experts=min(held, self._traffic.num_experts),
        )

    def sizes(self) -> Iterator[MemorySpeed]:
        """Speeds by common sizes of memory, from the least that works to the first that holds everything."""
        for gigabytes in _GPU_GB if self._machine.has_gpu else _CPU_GB:
            sold = gigabytes * 10**9
            budget, _ = self.divide(sold if self._machine.has_gpu else sold - SYSTEM_BYTES)
            if budget is None:
                continue
            yield MemorySpeed(
                name=size(sold),
                memory_bytes=sold,
                model_bytes=self.model_bytes,
                tokens_s=1 / self.token(budget.slots).seconds,
                share=budget.slots / self._footprint.num_experts,
            )
            if budget.slots == self._footprint.num_experts:
                return

    def forms(self) -> Iterator[MemorySpeed]:
        """Speeds in other stored forms, with the same memory."""
        checkpoint, own, machine = self._checkpoint, self._traffic, self._machine
        elements = checkpoint.layers[0].form.num_elements
        dense = checkpoint.num_parameters - own.num_experts * elements
        dense -= checkpoint.stored_elements(torch.bfloat16, "cuda" if machine.has_gpu else "cpu")
        try:
            memory = self._memory(machine.device_bytes)
        except CapacityError:
            return
        for form in FORMS:
            if abs(form.expert_bits - own.expert_bits) < 0.6:
                continue
            dense_bits = own.dense_bits if machine.has_gpu else form.dense_bits  # a GPU unpacks all but experts
            slot, dense_bytes = form.expert_bits * elements / 8, dense_bits * dense / 8
            bits: dict[str, Any] = {"expert_bits": form.expert_bits, "dense_bits": dense_bits}
            traffic = replace(own, dense_bytes=dense_bytes, slot_bytes=slot, stored_bytes=slot, **bits)
            model = replace(self._footprint, slot_bytes=int(slot), dense_bytes=int(dense_bytes))
            limits: dict[str, Any] = {
                "kv_tokens": None,
                "chunk_tokens": None,
                "longest": self._options.expected_context,
            }
            try:
                slots = best_split(model, memory.limit_bytes, curve=memory.curve, **limits).split.slots
            except CapacityError:
                slots = 0
            host = int((machine.host_bytes or 0) * _HOST_SHARE) if machine.has_gpu else 0
            seconds = self._token_of(traffic, slots, host, self.curve).seconds
            yield MemorySpeed(
                name=form.name,
                memory_bytes=memory.limit_bytes,
                model_bytes=int(dense_bytes + own.num_experts * slot),
                tokens_s=1 / seconds if slots else 0.0,
                share=slots / own.num_experts,
            )

    def facts(self) -> Iterator[Fact]:
        """Origins of misses and sizes."""
        yield "misses", f"{self.curve.at(0.5):.2f} of the needed experts with half of them in slots", self.curve.source
        checkpoint = self._checkpoint
        origin = "file headers" if checkpoint.sizes_by_headers and checkpoint.quantization else "the config"
        estimated = checkpoint.quantization is not None and not checkpoint.sizes_by_headers
        if self._runs_programs:
            yield ("decode steps", f"{STEP_SHARE:.2g} x the fixed time per layer", "run as recorded programs")
        yield "sizes", "estimated, without scales" if estimated else "exact", origin
        yield "other formats", "mean bits", "assumed, of llama.cpp's mixes and of FP8 and MXFP4 checkpoints"

    def _memory(self, num_bytes: int | None) -> Machine:
        return memory_of(self._checkpoint, self._options, self._machine.has_gpu, num_bytes)

    def _token_of(self, traffic: ModelTraffic, slots: int, host_bytes: int, curve: MissCurve) -> TokenEstimate:
        held = min(traffic.num_experts, int(host_bytes // traffic.slot_bytes))
        return token_estimate(
            traffic,
            self._rates,
            context=PROMPT_TOKENS,
            device_misses=curve.at(slots / traffic.num_experts),
            disk_misses=curve.at(max(slots, held) / traffic.num_experts),
        )

    def _own_traffic(self) -> ModelTraffic:
        """Bytes of tokens in the checkpoint's own form."""
        checkpoint, model = self._checkpoint, self._footprint
        dtype, elements = parse_dtype(self._options.dtype), checkpoint.layers[0].form.num_elements
        dense = checkpoint.num_active_parameters - model.token_experts * elements
        packed = not self._machine.has_gpu  # a GPU unpacks all but experts
        dense_bytes = checkpoint.dense_token_bytes(dtype) if packed else dense * dtype.itemsize
        return ModelTraffic(
            num_layers=int(checkpoint.config.num_hidden_layers),
            num_moe_layers=checkpoint.spec.num_layers,
            num_experts=model.num_experts,
            token_experts=model.token_experts,
            dense_bytes=dense_bytes,
            slot_bytes=model.slot_bytes,
            stored_bytes=checkpoint.spec.slot_bytes,
            kv_token_bytes=model.kv_token_bytes,
            active_parameters=checkpoint.num_active_parameters,
            expert_bits=8 * model.slot_bytes / elements,
            dense_bits=8 * dense_bytes / max(1, dense),
        )


def _worth(sizes: tuple[MemorySpeed, ...], have: int, now: float) -> MemorySpeed | None:
    """The larger size that adds most speed per byte, if it adds enough."""
    larger = [row for row in sizes if row.memory_bytes > have and row.tokens_s >= _WORTH * now]
    return max(larger, key=lambda row: (row.tokens_s - now) / (row.memory_bytes - have), default=None)
