"""Form of a layer's experts: weights, computation, and its family's calling convention.

Most families use transformers' experts interface, whose flags on the module describe the form. The others are
recognized by class name.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NamedTuple

import torch

from moetool.kernels.cpu import many_rows, matmul
from moetool.kernels.cpu.gates import gate_of
from moetool.kernels.cpu.matmul import RowsOf
from moetool.kernels.cpu.scaled_weight import ScaledWeight, StackedWeight
from moetool.models.experts.stored_expert import Weight
from moetool.models.transformers_internals import expert_gate

_WHOLE_VECTORS = 128
"""Multiple of a row's length (gate and up) whose halves are whole vectors on any CPU, unrolled twice."""
_ONE_THREAD = 32_768
"""Most elements that torch computes on one thread."""


class Call(Enum):
    """Calling convention of a family's experts module."""

    INTERFACE = auto()  # through transformers' experts interface
    EXPERTS = auto()  # module(hidden, index, weights), outside the interface
    SCALED = auto()  # module(one copy of the hidden states per expert, scaled by its weight): llama4
    BLOCK = auto()  # module(hidden), router included: jetmoe


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One tensor of an expert, as a slot holds it.

    Attributes:
        parameters: parameter names, below the experts' module, whose shares are concatenated in it.
        share: shape of one expert's share of each of them.
    """

    parameters: tuple[str, ...]
    share: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return (len(self.parameters) * self.share[0], *self.share[1:])


class Share(NamedTuple):
    """Computation of one expert: its weights, input rows and output rows."""

    weights: tuple[Weight, ...]
    sources: Sequence[int]
    targets: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertForm:
    """The experts of one layer: parts in the order up, bias of up, down, bias of down.

    Attributes:
        num_experts: experts with weights.
        num_identity: further experts that return their input, with the highest ids.
        parts: tensors of a slot; without biases only up and down.
        up_transposed, down_transposed: whether the matrix is stored [in, out] instead of [out, in].
        gate: maps the first product to the second one's input.
        finish: applied to the expert's output before its weight, or None.
        call: calling convention of the module.
    """

    num_experts: int
    num_identity: int = 0
    parts: tuple[Part, ...]
    up_transposed: bool = False
    down_transposed: bool = False
    gate: Callable[[torch.Tensor], torch.Tensor]
    finish: Callable[[torch.Tensor], torch.Tensor] | None = None
    call: Call = Call.INTERFACE

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of all offloaded parameters, below the experts' module."""
        return tuple(name for part in self.parts for name in part.parameters)

    @property
    def has_bias(self) -> bool:
        """Whether both products have a bias."""
        return len(self.parts) == 4

    @property
    def input_size(self) -> int:
        """Numbers in a row of an expert's input, in some families other than the model's hidden states."""
        return self.parts[0].shape[0 if self.up_transposed else 1]

    @property
    def num_elements(self) -> int:
        return sum(torch.Size(part.shape).numel() for part in self.parts)

    def compute(self, x: torch.Tensor, weights: tuple[Weight, ...]) -> torch.Tensor:
        """Return the unweighted output of one expert.

        Args:
            x: hidden states [T, D] of its tokens.
            weights: one tensor per part; unpacked, and widened to the type of `x` if needed.
        """
        return self.compute_each([x], [weights])[0]

    def compute_each(self, xs: Sequence[torch.Tensor], weights: Sequence[tuple[Weight, ...]]) -> list[torch.Tensor]:
        """Return the outputs of several experts, each bit-identical whatever others are computed with it.

        One gate call serves all only if that is safe. A CPU computes most of a tensor by vectors. The remainder, at
        the end or at a thread's border, is computed by single numbers, which may round differently. So rows must be
        whole vectors, and one thread must compute all.
        """
        second = len(self.parts) // 2
        firsts = self._linear(xs, weights, 0, self.up_transposed)
        width = firsts[0].shape[-1]
        counts = [x.shape[0] for x in xs]
        if width % _WHOLE_VECTORS == 0 and width * sum(counts) <= _ONE_THREAD:
            hidden = self.gate(torch.cat(firsts)).split_with_sizes(counts)
        else:
            hidden = tuple(self.gate(first) for first in firsts)
        outputs = self._linear(hidden, weights, second, self.down_transposed)
        return outputs if self.finish is None else [self.finish(output) for output in outputs]

    def max_rows(self, weights: tuple[Weight, ...], dtype: torch.dtype) -> int:
        """Most rows, of this type, that share the calls of `compute_rows`; 0 if it does not support this layout."""
        width = self.parts[0].shape[0 if not self.up_transposed else 1]
        if self.has_bias or self.finish is not None or width % _WHOLE_VECTORS:
            return 0
        return min(
            matmul.max_rows(out_in(weight, transposed), dtype, self.num_experts)
            for weight, transposed in zip(weights, (self.up_transposed, self.down_transposed), strict=True)
        )

    def compute_rows(self, x_TD: torch.Tensor, shares: Sequence[Share], num_rows: int) -> torch.Tensor:
        """Return the outputs [num_rows, D] of several experts: two calls for all of at most `max_rows` rows.

        Each row is bit-identical to `compute_each`'s. The targets of all shares cover all rows; those of a share of
        more than `max_rows` rows are a range.
        """
        firsts = self._scattered(x_TD, shares, 0, num_rows)
        parts = [self.gate(part) for part in firsts.split(max(1, _ONE_THREAD // firsts.shape[1]))]
        hidden = parts[0] if len(parts) == 1 else torch.cat(parts)
        return self._scattered(hidden, [share._replace(sources=share.targets) for share in shares], 1, num_rows)

    def _scattered(self, x_TI: torch.Tensor, shares: Sequence[Share], part: int, num_rows: int) -> torch.Tensor:
        """Multiply rows by each share's `part`, [num_rows, O]."""
        transposed = self.down_transposed if part else self.up_transposed
        most = matmul.max_rows(out_in(shares[0].weights[part], transposed), x_TI.dtype, self.num_experts)
        many = [share for share in shares if len(share.targets) > most]
        few = shares if not many else [share for share in shares if len(share.targets) <= most]
        jobs = [RowsOf(out_in(weights[part], transposed), *rows) for weights, *rows in few]  # type: ignore[arg-type]
        if not many:
            return matmul.scattered_products(x_TI, jobs, num_rows)
        width = self.parts[part].shape[1 if transposed else 0]
        output = matmul.scattered_products(x_TI, jobs, num_rows) if jobs else x_TI.new_empty(num_rows, width)
        if all(isinstance(share.sources, range) for share in many):
            inputs: Sequence[torch.Tensor] = [x_TI[share.sources[0] : share.sources[-1] + 1] for share in many]
        else:
            sources = torch.tensor([row for share in many for row in share.sources])
            inputs = x_TI[sources].split_with_sizes([len(share.sources) for share in many])
        for share, rows in zip(many, inputs, strict=True):
            output[share.targets[0] : share.targets[-1] + 1] = _product(rows, share.weights[part], transposed)
        return output

    def _linear(
        self, xs: Sequence[torch.Tensor], weights: Sequence[tuple[Weight, ...]], part: int, transposed: bool
    ) -> list[torch.Tensor]:
        """Multiply each expert's rows by its `part`, and add its bias if it has one."""
        outputs: list[torch.Tensor | None] = [None] * len(xs)
        matrices = [out_in(each[part], transposed) for each in weights]
        few = [n for n, x in enumerate(xs) if matmul.multiplies(x, matrices[n], self.num_experts)]
        if few:
            made = matmul.products([xs[n] for n in few], [matrices[n] for n in few])  # type: ignore[misc]
            for n, output in zip(few, made, strict=True):
                outputs[n] = output
        products = []
        for x, each, made_already in zip(xs, weights, outputs, strict=True):
            product = _product(x, each[part], transposed) if made_already is None else made_already
            products.append(product + each[part + 1].to(x.dtype) if self.has_bias else product)
        return products


def holds_experts(module: Any) -> bool:
    """Whether a module holds a layer's routed experts in a form that `form_of` supports."""
    return hasattr(module, "_is_expert_parallel") or type(module).__name__ in _OWN


def form_of(module: Any) -> ExpertForm:
    own = _OWN.get(type(module).__name__)
    return own(module) if own is not None else _interface(module)


def _interface(module: Any) -> ExpertForm:
    up = "gate_up_proj" if module.has_gate else "up_proj"
    names = (up, f"{up}_bias", "down_proj", "down_proj_bias") if module.has_bias else (up, "down_proj")
    return ExpertForm(
        num_experts=int(module.num_experts),
        parts=_stacked(module, *names),
        up_transposed=module.is_transposed,
        down_transposed=module.is_transposed,
        gate=gate_of(*expert_gate(module)) if module.has_gate else module.act_fn,
        finish=module.post_expert_norm if module.has_post_expert_norm else None,
    )


def _dbrx(module: Any) -> ExpertForm:
    rows = int(module.ffn_hidden_size)  # the experts' matrices are concatenated in flat ones
    share = (rows, int(module.hidden_size))
    return ExpertForm(
        num_experts=int(module.num_experts),
        parts=(Part(parameters=("mlp.w1", "mlp.v1"), share=share), Part(parameters=("mlp.w2",), share=share)),
        down_transposed=True,
        gate=_gated(lambda gate: module.mlp.activation_fn(gate.contiguous())),  # w1 and v1 are two products there
        call=Call.EXPERTS,
    )


def _jetmoe(module: Any) -> ExpertForm:
    return ExpertForm(
        num_experts=int(module.input_linear.num_experts),
        parts=_stacked(module, "input_linear.weight", "output_linear.weight"),
        gate=_gated(module.activation),
        call=Call.BLOCK,
    )


def _llama4(module: Any) -> ExpertForm:
    return ExpertForm(
        num_experts=int(module.num_experts),
        parts=_stacked(module, "gate_up_proj", "down_proj"),
        up_transposed=True,
        down_transposed=True,
        gate=_gated(module.act_fn),
        call=Call.SCALED,
    )


def _longcat_flash(module: Any) -> ExpertForm:
    return ExpertForm(
        num_experts=int(module.num_routed_experts),
        num_identity=int(module.zero_expert_num),
        parts=_stacked(module, "gate_up_proj", "down_proj"),
        gate=_gated(module.act_fn),
        call=Call.EXPERTS,
    )


def _step3p7(module: Any) -> ExpertForm:
    def gate(gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return module.act_fn(gate).clamp(max=module.limit) * up.clamp(-module.limit, module.limit)

    return ExpertForm(
        num_experts=int(module.num_experts),
        parts=_stacked(module, "gate_up_proj", "down_proj"),
        gate=gate,
        call=Call.EXPERTS,
    )


_OWN: dict[str, Callable[[Any], ExpertForm]] = {
    "DbrxExperts": _dbrx,
    "JetMoeMoE": _jetmoe,
    "Llama4TextExperts": _llama4,
    "LongcatFlashExperts": _longcat_flash,
    "Step3p7Experts": _step3p7,
}


def _stacked(module: Any, *names: str) -> tuple[Part, ...]:
    """Parts from parameters [E, ...]."""
    return tuple(Part(parameters=(n,), share=tuple(module.get_parameter(n).shape[1:])) for n in names)


def _gated(activation: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    def gate(gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return activation(gate) * up

    return gate


def out_in(weight: Weight, transposed: bool) -> Weight | None:
    """A matrix [out, in], or the transposed view of [in, out]; None if it is neither."""
    if isinstance(weight, ScaledWeight | StackedWeight) and weight.transposed != transposed:
        return None
    return weight.T if transposed and isinstance(weight, torch.Tensor) else weight


def _product(x: torch.Tensor, weight: Weight, transposed: bool) -> torch.Tensor:
    if isinstance(weight, ScaledWeight | StackedWeight):
        if weight.transposed == transposed:
            return weight.times(x)
    elif not isinstance(weight, torch.Tensor) and not transposed:
        return weight.times(x)
    dense = weight.to(x.dtype)
    return x @ dense if transposed else many_rows.linear(x, dense)
