"""Layer-by-layer comparison: plain transformers on the hidden states of the served model.

Each layer is compared while plain transformers has it in memory: the weights of every expert in a slot, all other
tensors, the chosen experts, and the layer's output. Differences are thus named by layer and expert.
"""

import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from torch import nn

from moetool.base.machine import memory_bytes
from moetool.measuring.library_weights import open_library
from moetool.measuring.plain_model import Forward, PlainModel, open_plain, plain_bytes
from moetool.measuring.served_answers import Answers, Computed, LayerRoutes, dense_digests, digests, routes_of
from moetool.models.checkpoint import Checkpoint
from moetool.models.experts.expert_files import ExpertFiles
from moetool.models.experts.moe_layers import MoeLayer

MEMORY_SHARE = 0.85
"""Share of the free memory that the whole plain model may take."""
OUTSIDE = -1
"""Layer number of tensors outside decoder layers: embeddings, the last norm, the head."""

Progress = Callable[[str, int, int], None]
"""Called with the activity, the amount done and the total."""


@dataclass(slots=True, kw_only=True)
class LayerResult:
    """One decoder layer on the same hidden states.

    Attributes:
        layer: number among all decoder layers.
        difference: largest difference of the output; `scale` is the output's largest number.
        routes, route_ties, route_errors: tokens of a MoE layer: compared; with other experts in a tie; with other
            experts.
        experts_compared: experts whose weights in a slot were compared.
        experts_differing: experts whose weights differ.
        experts_at: experts of the token at which the output differs most.
        experts_changed: experts that only one of the two chose, without a tie.
        tensors: compared weights and buffers other than experts; `OUTSIDE` has those of no layer.
        tensors_differing: those that differ.
    """

    layer: int
    difference: float = 0.0
    scale: float = 0.0
    routes: int = 0
    route_ties: int = 0
    route_errors: int = 0
    experts_compared: int = 0
    experts_differing: list[int] = field(default_factory=list)
    experts_at: list[int] = field(default_factory=list)
    experts_changed: list[int] = field(default_factory=list)
    tensors: int = 0
    tensors_differing: list[str] = field(default_factory=list)

    def problems(self, tolerance: float) -> Iterator[str]:
        """Yield its errors, one line each, causes first."""
        name = "outside the layers" if self.layer == OUTSIDE else f"layer {self.layer}"
        if self.experts_differing:
            yield f"{name}: the slots of {_experts(self.experts_differing)} hold other weights"
        if self.tensors_differing:
            more = f" and {len(self.tensors_differing) - 1} more" if len(self.tensors_differing) > 1 else ""
            yield f"{name}: {self.tensors_differing[0]}{more} differs from plain transformers"
        if self.route_errors:
            yield (
                f"layer {self.layer}: {self.route_errors:,} of {self.routes:,} tokens chose other experts, such as "
                f"{_experts(self.experts_changed)}"
            )
        if not self.difference <= tolerance * self.scale:
            of = f", most at a token of {_experts(self.experts_at)}" if self.experts_at else ""
            yield f"{name}: its output differs by {self.difference:.3g} of {self.scale:.3g}{of}"


def _experts(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    more = f" and {len(numbers) - 8} more" if len(numbers) > 8 else ""
    return f"expert {shown}" if len(numbers) == 1 else f"experts {shown}{more}"


class LayerComparison:
    """Comparison of a served model with plain transformers, layer by layer.

    Attributes:
        tolerance: share of a layer's largest output that its difference may be.
        decoded: logits of transformers' own greedy decoding, for prompts whose forward chose another token.
        oracle: origin of plain transformers' weights.
        whole: whether plain transformers was wholly in memory.
        read_by: the reader of each part of plain transformers, see `PlainModel`.
        contradictions: where the served model contradicts its files, as the library of their format reads them.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        served: Sequence[Computed],
        dtype: torch.dtype,
        device: torch.device,
        fastest: torch.dtype | None,
    ) -> None:
        self._checkpoint = checkpoint
        self._served = served
        self._dtype = dtype
        self._device = device
        self._fastest = fastest
        self.tolerance = math.sqrt(torch.finfo(dtype).eps)
        self.results: dict[int, LayerResult] = {}
        self.decoded: dict[int, torch.Tensor] = {}
        self.oracle, self.whole = "", True
        self.read_by: dict[str, str] = {}
        self.contradictions: list[str] = []

    def compare(
        self, prompts: Sequence[Sequence[int]], reference: Answers, layer_by_layer: bool, on_progress: Progress
    ) -> tuple[list[torch.Tensor], tuple[float, float] | None]:
        """Compare all layers.

        Args:
            reference: answers of the first policy.
            layer_by_layer: hold one layer of plain transformers in memory at a time, even if all fits.

        Returns:
            Logits of plain transformers by prompt; largest and mean difference between its experts implementations
            (None with one).
        """
        gc.collect()  # garbage in cycles would take memory here
        free = memory_bytes()[1] if self._device.type == "cpu" else torch.cuda.mem_get_info(self._device)[0]
        fits = plain_bytes(self._checkpoint, self._dtype) < free * MEMORY_SHARE
        on_progress("loading plain transformers", 0, 1)
        library = open_library(self._checkpoint)
        self.contradictions = library.problems(self._checkpoint, len(self._served[0].inputs))
        plain = open_plain(self._checkpoint, library, self._dtype, self._device, whole=fits and not layer_by_layer)
        self.oracle, self.whole, self.read_by = plain.origin, plain.whole, plain.read_by
        implementations: list[str | None] = [*plain.implementations()] or [None]
        forwards = [
            Forward([*prompt, *made[:-1]], len(prompt) - 1, implementation)
            for implementation in implementations
            for prompt, made in zip(prompts, reference.tokens, strict=True)
        ]
        routes: dict[int, LayerRoutes] = {}
        total = len(plain.decoder_layers)
        with ExitStack() as stack:
            files = stack.enter_context(self._checkpoint).expert_files(fastest=self._fastest)

            def on_layer(number: int, module: nn.Module) -> None:
                on_progress("plain transformers, layers", number, total)
                self.results[number] = LayerResult(layer=number)
                self._compare_tensors(number, reference.dense, digests(module, f"{number}."))
                for layer in plain.layers:
                    if layer.layer_id == number:
                        self._compare_weights(files, layer)

            def visit(forward: int, number: int, call: Callable[[torch.Tensor], torch.Tensor]) -> None:
                if forward >= len(prompts):
                    return
                served = self._served[forward]
                routes.clear()
                output = call(served.inputs[number].to(self._device)).detach().cpu()
                self._compare_output(number, served, output, routes, plain)

            stack.enter_context(routes_of(plain.model, plain.layers, routes))
            logits = plain.run(forwards, visit=visit, on_layer=on_layer)
        self.results[OUTSIDE] = LayerResult(layer=OUTSIDE)
        outside = {name: value for name, value in dense_digests(plain.model, plain.layers).items() if name[0] == "."}
        self._compare_tensors(OUTSIDE, reference.dense, outside)
        # In some families cached decoding differs from a forward of the whole sequence.
        others = [n for n, made in enumerate(reference.tokens) if logits[n].argmax(dim=-1).tolist() != made]
        if others:
            on_progress("plain transformers, decoding", 0, 1)
            decoded = plain.generate([prompts[n] for n in others], [len(reference.tokens[n]) for n in others])
            self.decoded = dict(zip(others, decoded, strict=True))
        pairs = list(zip(logits[: len(prompts)], logits[len(prompts) :], strict=False))
        yardstick = differences(pairs) if pairs else None
        return logits[: len(prompts)], yardstick

    def _compare_tensors(self, number: int, ours: Mapping[str, str], theirs: Mapping[str, str]) -> None:
        """Compare other weights, unless quantized: those may be rounded differently, so the output decides."""
        common = sorted(theirs.keys() & ours.keys())
        self.results[number].tensors = len(common)
        if self._checkpoint.quantization is None:
            wrong = [name.partition(".")[2] for name in common if theirs[name] != ours[name]]
            self.results[number].tensors_differing = wrong

    def _compare_weights(self, files: ExpertFiles, layer: MoeLayer) -> None:
        """Compare the weights of every expert of a layer in a slot and in transformers' module."""
        result = self.results[layer.layer_id]
        if any(len(part.parameters) > 1 for part in layer.form.parts):
            return  # flat matrices of all experts in another order
        result.experts_compared = layer.form.num_experts
        differing: set[int] = set()
        for name, ours in files.stacked(layer, self._dtype).items():
            theirs = layer.experts.get_parameter(name).detach().cpu().to(self._dtype)
            # Some families have extra rows for experts without weights.
            flat, others = ours.flatten(1).float(), theirs[: len(ours)].reshape(ours.shape).flatten(1).float()
            allowed = 0.0 if self._checkpoint.quantization is None else 2.0**-8 * others.abs().amax(1)
            wrong = ~((flat - others).abs().amax(1) <= allowed)
            differing.update(wrong.nonzero().flatten().tolist())
        result.experts_differing = sorted(differing)

    def _compare_output(
        self, number: int, served: Computed, output: torch.Tensor, routes: dict[int, LayerRoutes], plain: PlainModel
    ) -> None:
        result = self.results[number]
        here = [layer for layer in plain.layers if layer.layer_id == number and layer.index in routes]
        for layer in here:
            _compare_routes(result, served.routes[layer.index], routes[layer.index], self.tolerance)
        found = served.outputs[number].float()
        difference = (found - output.float()).abs().nan_to_num(nan=math.inf)
        result.scale = max(result.scale, float(output.abs().max()))
        if (largest := float(difference.max())) > result.difference:
            result.difference = largest
            token = int(difference.reshape(-1, difference.shape[-1]).amax(1).argmax())
            result.experts_at = [
                int(expert)
                for layer in here
                if token < len(served.routes[layer.index][0])
                for expert in sorted(served.routes[layer.index][0][token].tolist())
            ]


def _compare_routes(result: LayerResult, ours: LayerRoutes, theirs: LayerRoutes, tolerance: float) -> None:
    """Count equal routes, ties and errors. Different experts are a tie if the routers' logits agree."""
    result.routes += len(ours.experts_TK)
    mine, other = ours.experts_TK.sort(dim=1).values, theirs.experts_TK.sort(dim=1).values
    for token in (mine != other).any(dim=1).nonzero().flatten().tolist():
        if ours.logits_TE is not None and theirs.logits_TE is not None:
            a, b = ours.logits_TE[token], theirs.logits_TE[token]
        else:
            a, b = ours.weights_TK[token].sort().values, theirs.weights_TK[token].sort().values
        if float((a - b).abs().max()) <= tolerance * float(b.abs().max()):
            result.route_ties += 1
        else:
            result.route_errors += 1
            changed = set(mine[token].tolist()) ^ set(other[token].tolist())
            result.experts_changed = sorted({*result.experts_changed, *changed})


def differences(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[float, float]:
    """Return the largest and the mean difference."""
    apart = [(a - b).abs().nan_to_num(nan=math.inf) for a, b in pairs]
    return max(float(a.max()) for a in apart), sum(float(a.mean()) for a in apart) / len(apart)
