"""Search of scales that minimize rounding errors where activations are large, on calibration tokens.

Source: AWQ (Lin et al., 2024) § 3.2, Eqs. 4 and 5, and the clipping of outliers in its published code. The columns of a
weight are multiplied by s = mean|x|^alpha before rounding, and its inputs are divided by s. A grid over [0, 1] gives
alpha, by the smallest error of the block's output. Deviations:

- The routed experts of a layer read one hidden state, so they and the shared expert have one scale; each expert's down
  projection has its own. Routers read that hidden state too: see `moetool.training.quantize.folding`.
- Query heads that share a value head share a scale, from their mean; AWQ leaves such heads out.
- Ranges are clipped by the error of the weights, weighted by the mean square of their inputs, not by output errors.
- An expert with few calibration tokens keeps its columns unscaled, and its ranges use the tokens that it has.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.func import functional_call

from moetool.models.experts.moe_layers import MoeLayer
from moetool.models.weights.packed import Rounded, Scheme, nearest_values, ranges, round_weight
from moetool.training.quantize.folding import ScaleFold

_CHUNK = 2**17  # numbers rounded together, so that temporaries stay in the CPU cache
_PRIOR_TOKENS = 32  # average tokens at the start of an expert's statistics
_SHRINKS = tuple(1 - 0.04 * i for i in range(9))


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """Options of the search.

    Attributes:
        grid: number of exponents to try in addition to 0; 0 rounds to nearest.
        clip: whether to clip ranges where it lowers the error.
        min_tokens: number of calibration tokens below which an expert's down projection gets no scale.
        max_tokens: number of first calibration tokens for errors; means use all tokens.
    """

    grid: int = 20
    clip: bool = True
    min_tokens: int = 32
    max_tokens: int = 4096


@dataclass(slots=True)
class Inputs:
    """Inputs of the modules of one layer on the calibration tokens.

    Attributes:
        calls: arguments of each inspected module, one call per block.
        mean: mean |x| of the inputs of a module, [I]; of the experts' down projections [E, I].
        square: mean x² of the inputs of a module, [I], or of the experts' two products [E, I], by `up` and `down`.
        middle: input of each expert's down projection: [T', I], for the first tokens.
    """

    calls: dict[str, list[tuple[tuple[Any, ...], dict[str, Any]]]] = field(default_factory=dict)
    mean: dict[str, torch.Tensor] = field(default_factory=dict)
    square: dict[str, torch.Tensor] = field(default_factory=dict)
    tokens_E: torch.Tensor | None = None
    middle: dict[int, torch.Tensor] = field(default_factory=dict)


class _Mean:
    """Running means of |x| and x²."""

    def __init__(self) -> None:
        self.count = 0
        self.sums: torch.Tensor | None = None

    def add(self, x: torch.Tensor) -> None:
        x = x.reshape(-1, x.shape[-1]).float()
        sums = torch.stack([x.abs().sum(0), x.square().sum(0)])
        self.sums = sums if self.sums is None else self.sums + sums
        self.count += len(x)


@torch.no_grad()
def watch_inputs(
    layer: Any, moe: MoeLayer | None, folds: Iterable[ScaleFold], run: Callable[[], None], options: SearchOptions
) -> Inputs:
    """Run a layer over the calibration blocks and record its modules' inputs.

    Args:
        run: calls the layer once per block.
    """
    found = Inputs()
    modules = dict(layer.named_modules())
    means: dict[str, _Mean] = {}
    seen: dict[str, int] = {}
    handles = []

    def watch(path: str) -> None:
        def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = args[0] if args else kwargs["hidden_states"]
            means.setdefault(path, _Mean()).add(x)
            tokens = x.shape[:-1].numel()
            if seen.get(path, 0) < options.max_tokens:
                found.calls.setdefault(path, []).append((args, kwargs))
            seen[path] = seen.get(path, 0) + tokens

        handles.append(modules[path].register_forward_pre_hook(before, with_kwargs=True))

    for path in dict.fromkeys(fold.inspect for fold in folds if fold.inspect != "experts"):
        watch(path)
    if moe is not None:
        experts = _Experts(moe, found, options)
        handles.append(moe.experts.register_forward_pre_hook(experts.before))
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    for path, mean in means.items():
        assert mean.sums is not None
        found.mean[path], found.square[path] = mean.sums / mean.count
    if moe is not None:
        experts.finish()
    return found


class _Experts:
    """Records the inputs of each routed expert and of its down projection."""

    def __init__(self, moe: MoeLayer, found: Inputs, options: SearchOptions) -> None:
        self._moe = moe
        self._found = found
        self._options = options
        self._up = [_Mean() for _ in range(moe.form.num_experts)]
        self._down = [_Mean() for _ in range(moe.form.num_experts)]

    def before(self, module: Any, args: tuple[torch.Tensor, ...]) -> None:
        hidden_TD, index_TK = args[0].reshape(-1, args[0].shape[-1]), args[1]
        gate_up_EOD = module.gate_up_proj
        for expert in index_TK.unique().tolist():
            if expert >= len(self._up):
                continue
            x = hidden_TD[(index_TK == expert).any(dim=-1)]
            middle = self._moe.form.gate(torch.nn.functional.linear(x, gate_up_EOD[expert]))
            self._up[expert].add(x)
            self._down[expert].add(middle)
            kept = self._found.middle.get(expert)
            if kept is None or len(kept) < self._options.max_tokens:
                self._found.middle[expert] = middle if kept is None else torch.cat([kept, middle])

    def finish(self) -> None:
        """Store the means; those of an expert start from `_PRIOR_TOKENS` tokens of the average expert."""
        self._found.tokens_E = torch.tensor([mean.count for mean in self._up])
        for name, means in (("up", self._up), ("down", self._down)):
            width = next(len(mean.sums[1]) for mean in means if mean.sums is not None)
            sums_EI = torch.stack([torch.zeros(width) if mean.sums is None else mean.sums[1] for mean in means])
            count_E1 = torch.tensor([[float(mean.count)] for mean in means])
            prior_I = sums_EI.sum(0) / count_E1.sum()
            if name == "down":  # channels of different experts are unrelated
                prior_I = prior_I.mean().expand_as(prior_I)
            self._found.square[name] = (sums_EI + _PRIOR_TOKENS * prior_I) / (count_E1 + _PRIOR_TOKENS)
        down = [mean.sums for mean in self._down]
        width = next(len(sums[0]) for sums in down if sums is not None)
        self._found.mean["down"] = torch.stack(
            [torch.ones(width) if s is None else s[0] / m.count for s, m in zip(down, self._down, strict=True)]
        )


def scale_of(mean_C: torch.Tensor, alpha: float) -> torch.Tensor:
    """Return the scale [..., C] for channels' mean |x|; its largest and smallest values are inverses."""
    scale_C = mean_C.clamp(min=1e-4) ** alpha
    highest, lowest = scale_C.amax(-1, keepdim=True), scale_C.amin(-1, keepdim=True)
    return scale_C / (highest * lowest).sqrt()


@torch.no_grad()
def search(
    layer: Any,
    fold: ScaleFold,
    inputs: Inputs,
    schemes: Mapping[str, Scheme],
    scale_dtype: torch.dtype,
    options: SearchOptions,
) -> tuple[torch.Tensor, list[float]]:
    """Find the scale of a fold with the smallest error.

    Args:
        schemes: scheme of each rounded weight, by its name within the layer.

    Returns:
        The scale [C] and [alpha]; for `experts`, scales [E, C] and E alphas. Ties go to the smallest alpha.
    """
    parameters = dict(layer.named_parameters())
    alphas = [i / options.grid for i in range(1, options.grid)] + [1.0] * (options.grid > 0)
    if fold.inspect == "experts":
        return _search_experts(
            parameters[fold.readers[0]], inputs, schemes[fold.readers[0]], scale_dtype, alphas, options
        )
    module = layer.get_submodule(fold.inspect)
    mean_C = fold.gather(inputs.mean[fold.inspect])
    calls = inputs.calls[fold.inspect]
    prefix = f"{fold.inspect}."
    outputs = [_output(module(*args, **kwargs)) for args, kwargs in calls] if alphas else []

    def error(alpha: float) -> float:
        scale_I = fold.spread(scale_of(mean_C, alpha))
        rounded = {}
        for name in fold.readers:
            weight = parameters[name]
            rounded[name.removeprefix(prefix)] = _nearest(weight, scale_I, schemes[name], scale_dtype)
        total = 0.0
        for (args, kwargs), output in zip(calls, outputs, strict=True):
            found = _output(functional_call(module, rounded, args, kwargs))
            total += (found - output).float().square().sum().item()
        return total

    best = 0.0
    if alphas:
        errors = {alpha: error(alpha) for alpha in (0.0, *alphas)}
        best = min(errors, key=errors.__getitem__)
    return (scale_of(mean_C, best) if best else torch.ones_like(mean_C)), [best]


def _nearest(weight: torch.Tensor, scale_I: torch.Tensor, scheme: Scheme, scale_dtype: torch.dtype) -> torch.Tensor:
    """Return a weight [..., O, I] after scaling, rounding and unscaling, in chunks of rows."""
    near = torch.empty_like(weight)
    group = (-1, scheme.group)
    for into, own in zip(_rows(near), _rows(weight), strict=True):
        grouped = (own * scale_I).float().unflatten(-1, group)
        within = ranges(grouped, scheme)
        into.copy_(_dense(*nearest_values(grouped, within, scheme, scale_dtype)).flatten(-2).div_(scale_I))
    return near


def _rows(weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Yield the rows [..., I] of a weight in chunks."""
    return weight.flatten(0, -2).split(max(1, _CHUNK // weight.shape[-1]))


def _dense(values: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None) -> torch.Tensor:
    """Dequantize values, rounded to the scale's data type. Effects: overwrites them."""
    if zero is not None:
        values -= zero[..., None]
    values *= scale.float()[..., None]
    return values if scale.dtype == torch.float32 else values.to(scale.dtype).float()


def _search_experts(
    down_EDI: torch.Tensor,
    inputs: Inputs,
    scheme: Scheme,
    scale_dtype: torch.dtype,
    alphas: list[float],
    options: SearchOptions,
) -> tuple[torch.Tensor, list[float]]:
    """Search each routed expert's down projection separately."""
    assert inputs.tokens_E is not None
    mean_EI = inputs.mean["down"]
    scale_EI = torch.ones_like(mean_EI)
    chosen = [0.0] * len(down_EDI)
    for expert, weight_DI in enumerate(down_EDI):
        if inputs.tokens_E[expert] < options.min_tokens or not alphas:
            continue
        x = inputs.middle[expert].float()
        weight_DI = weight_DI.float()
        least = float("inf")
        for alpha in (0.0, *alphas):
            scale_I = scale_of(mean_EI[expert], alpha) if alpha else torch.ones_like(mean_EI[expert])
            off_DI = _nearest(weight_DI, scale_I, scheme, scale_dtype).sub_(weight_DI)
            error = (x @ off_DI.T).square().sum().item()
            if error < least:
                least, chosen[expert], scale_EI[expert] = error, alpha, scale_I
    return scale_EI, chosen


@torch.no_grad()
def round_clipped(
    weight: torch.Tensor, scheme: Scheme, scale_dtype: torch.dtype, square_I: torch.Tensor | None
) -> Rounded:
    """Round a weight [O, I]; clip its groups' ranges where this lowers the error.

    Args:
        square_I: mean square of each input; None rounds to nearest.
    """
    made = [_round_rows(rows, scheme, scale_dtype, square_I) for rows in _rows(weight)]
    zeros = [rows.zero for rows in made if rows.zero is not None]
    return Rounded(
        torch.cat([rows.values for rows in made]),
        torch.cat([rows.scale for rows in made]),
        torch.cat(zeros) if zeros else None,
    )


def _round_rows(
    weight: torch.Tensor, scheme: Scheme, scale_dtype: torch.dtype, square_I: torch.Tensor | None
) -> Rounded:
    if square_I is None:
        return round_weight(weight, scheme, scale_dtype)
    groups = (-1, scheme.group)
    weight = weight.float()
    group, square = weight.unflatten(-1, groups), square_I.unflatten(-1, groups)
    within = ranges(group, scheme)
    best: torch.Tensor | None = None
    least: torch.Tensor | None = None
    for factor in _SHRINKS:
        near = _dense(*nearest_values(group, within, scheme, scale_dtype, factor))
        error = near.sub_(group).square_().mul_(square).sum(-1)
        if best is None or least is None:
            best, least = torch.full_like(error, factor), error
        else:
            best = torch.where(error < least, factor, best)
            least = torch.minimum(error, least)
    return round_weight(weight, scheme, scale_dtype, best)


def _output(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output
