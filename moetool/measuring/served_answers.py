"""Answers and intermediate results of the served model: tokens, logits, hidden states, chosen experts."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from moetool.base import families
from moetool.base.errors import MoetoolError
from moetool.measuring.plain_model import decoder_layers
from moetool.models.checkpoint import Checkpoint
from moetool.models.experts.moe_layers import MoeLayer, moe_layers
from moetool.models.router_hooks import read_logits, watch
from moetool.runtime.assembly import build_engine
from moetool.runtime.loop.engine import Engine
from moetool.runtime.request import Output, SamplingParams
from moetool.runtime.serve_options import ServeOptions


class LayerRoutes(NamedTuple):
    """A layer's routing: experts and weights [T, K], and its router's logits [T, E], if any."""

    experts_TK: torch.Tensor
    weights_TK: torch.Tensor
    logits_TE: torch.Tensor | None


@dataclass(slots=True)
class Computed:
    """Results of one forward of a sequence, on the CPU.

    Attributes:
        logits: [N, V] float32, of the generated tokens.
        inputs, outputs: hidden states before and after each decoder layer.
    """

    logits: torch.Tensor
    inputs: list[torch.Tensor] = field(default_factory=list)
    outputs: list[torch.Tensor] = field(default_factory=list)
    routes: dict[int, LayerRoutes] = field(default_factory=dict)


@dataclass(slots=True)
class Answers:
    """A policy's answers to all prompts.

    Attributes:
        slots: number of slots in the pool.
        dense: digests of the weights outside the routed experts, as of `dense_digests`.
        tokens: generated tokens, by prompt.
        computed: results by prompt, for the requested sequences.
    """

    slots: int
    dense: dict[str, str]
    tokens: list[list[int]]
    computed: list[Computed]


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A model that answers prompts by the server's own engine.

    Attributes:
        num_tokens: number of tokens to generate for each.
        device_memory_bytes: memory for weights, KV cache and expert pool.
    """

    checkpoint: Checkpoint
    options: ServeOptions
    prompts: Sequence[Sequence[int]]
    num_tokens: int
    device_memory_bytes: int

    def answer(
        self,
        policy: str,
        *,
        predictor: Path | None = None,
        sequences: Sequence[Sequence[int]] | None = None,
        on_progress: Callable[[int], None],
    ) -> Answers:
        """Answer the prompts, then forward each prompt with its answer once more alone.

        Args:
            sequences: answers to forward with the prompts (default: the policy's own).
            on_progress: called with the number of completed prompts, twice for each.

        Raises: as `moetool.runtime.assembly.build_engine`, and MoetoolError where a forward fails.
        """
        engine = build_engine(
            self.checkpoint,
            options=self.options,
            policy=policy,
            predictor=predictor,
            device_memory_bytes=self.device_memory_bytes,
        )
        try:
            tokens = _generate(engine, self.prompts, self.num_tokens, on_progress)
            computed, done = [], len(self.prompts)
            for prompt, made in zip(self.prompts, tokens if sequences is None else sequences, strict=True):
                computed.append(_forward(engine, done, [*prompt, *made[:-1]], len(prompt) - 1))
                done += 1
                on_progress(done)
            model = engine.batcher.model
            return Answers(engine.store.num_slots, dense_digests(model, moe_layers(model)), tokens, computed)
        finally:
            engine.close()


def _generate(
    engine: Engine, prompts: Sequence[Sequence[int]], num_tokens: int, on_progress: Callable[[int], None]
) -> list[list[int]]:
    """Return greedy tokens of all prompts, batched as in the server, on this thread."""
    engine.state = "ready"
    tokens: dict[int, list[int]] = {}
    failed: list[str] = []

    def sink(output: Output) -> None:
        if output.error is not None:
            failed.append(output.error)
        if output.token is not None:
            tokens.setdefault(output.request, []).append(output.token)

    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    requests = [engine.submit(list(prompt), params, sink) for prompt in prompts]
    while not engine.idle:
        engine.step()
        if failed:
            raise MoetoolError(f"a forward failed: {failed[0]}")
        on_progress(sum(len(made) == num_tokens for made in tokens.values()))
    return [tokens[request] for request in requests]


def _forward(engine: Engine, request: int, tokens: list[int], first: int) -> Computed:
    model = engine.batcher.model
    layers = moe_layers(model)
    made = Computed(torch.empty(0))
    try:
        with routes_of(model, layers, made.routes), _hidden_states(model, layers, made):
            made.logits = torch.cat(list(engine.batcher.score(request, tokens)))[first:].clone()
    finally:
        engine.runtime.end_forward()
        engine.residency.end_request(request)
    return made


def dense_digests(model: Any, layers: Sequence[MoeLayer]) -> dict[str, str]:
    """Return digests of all tensors in memory: in decoder layers by `NUMBER.name in the layer`, else by `.name`."""
    found: dict[str, str] = {}
    inside: set[int] = set()
    for number, layer in enumerate(decoder_layers(model, layers)):
        inside.update(map(id, layer.modules()))
        found.update(digests(layer, f"{number}."))
    for name, module in model.named_modules():
        if id(module) not in inside:
            found.update(digests(module, f".{name}.", recurse=False))
    return found


def digests(module: Any, prefix: str, recurse: bool = True) -> dict[str, str]:
    """Return digests of a module's parameters and buffers in memory."""
    tensors = [*module.named_parameters(recurse=recurse), *module.named_buffers(recurse=recurse)]
    found = {}
    for name, tensor in tensors:
        if not tensor.is_meta:
            content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            found[f"{prefix}{name}"] = hashlib.blake2b(content.data, digest_size=16).hexdigest()
    return found


@contextmanager
def routes_of(model: Any, layers: Sequence[MoeLayer], found: dict[int, LayerRoutes]) -> Iterator[None]:
    """Collect the layers' routes, by MoE layer."""
    family = families.known(model.config.get_text_config().model_type)
    logits: dict[int, torch.Tensor] = {}

    def on_routes(layer: MoeLayer, index_TK: torch.Tensor, weights_TK: torch.Tensor) -> None:
        chosen = (index_TK.detach().cpu().clone(), weights_TK.detach().float().cpu().clone())
        found[layer.index] = LayerRoutes(*chosen, logits.pop(layer.index, None))

    def on_router(layer: MoeLayer, module: Any, args: Any, output: Any) -> None:
        made = output[layer.logits_index] if isinstance(output, tuple) else output
        if isinstance(made, torch.Tensor) and made.dim() == 2 and made.shape[1] >= layer.num_experts:
            logits[layer.index] = read_logits(layer, output, family).detach().float().cpu().clone()

    hooks = [layer.router.register_forward_hook(partial(on_router, layer)) for layer in layers]
    hooks += [watch(layer, partial(on_routes, layer)) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _hidden_states(model: Any, layers: Sequence[MoeLayer], made: Computed) -> Iterator[None]:
    def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        made.inputs.append((args[0] if args else kwargs["hidden_states"]).detach().cpu().clone())

    def after(module: Any, args: Any, output: Any) -> None:
        made.outputs.append((output[0] if isinstance(output, tuple) else output).detach().cpu().clone())

    hooks = []
    for layer in decoder_layers(model, layers):
        hooks += [layer.register_forward_pre_hook(before, with_kwargs=True), layer.register_forward_hook(after)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
