"""Cascade: stacked one-layer transformers that predict a prompt's experts by blocks of layers, before it runs.

Source: DIRECTOR § V-A, the cascade predictor {M_1, ..., M_n}: "M_1 consumes token embeddings and predicts the expert
routing R_1; each subsequent M_i augments these embeddings with the predicted routing R_{i-1} from M_{i-1} to predict
routing R_i for its designated block of subsequent layers". Its Table II has two stages. Readings and deviations, in
addition to those of `predictors/single_transformer.py`:

- R_{i-1} is the previous stage's probability of each expert in each layer of its block, not a top-k choice. It keeps
  that stage's confidence, and the loss of a later stage reaches earlier ones. All stages are trained together, on
  predictions and never on true choices.
- R_{i-1} is added to the embeddings through a linear map; the paper does not describe the augmentation.
- By default the blocks are as equal as possible, earlier ones larger.
"""

from dataclasses import dataclass

from moetool.base.config import Span, require_within
from moetool.base.errors import UsageError
from moetool.base.types import ModelSpec
from moetool.training.prompt_routing import PromptOptions, PromptPredictor


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(PromptOptions):
    """Options of the cascade.

    Attributes:
        stages: number of stacked transformers.
        boundaries: first layers of the second and later stages, ascending (default: equal blocks).
    """

    stages: int = 2
    boundaries: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        PromptOptions.__post_init__(self)
        require_within(self, "cascade: ", stages=Span(1))
        if self.boundaries and len(self.boundaries) != self.stages - 1:
            raise UsageError(
                f"cascade: {len(self.boundaries)} boundaries for {self.stages} stages, expected {self.stages - 1}; "
                f"give both, as in --set stages=3 --set boundaries=[4,8]"
            )


class Predictor(PromptPredictor):
    """One stage per block of layers.

    Raises:
        UsageError: there are more stages than layers, or the boundaries do not ascend within the layers.
    """

    def __init__(self, spec: ModelSpec, options: Options) -> None:
        super().__init__(spec, options, _boundaries(spec.num_layers, options))


def _boundaries(num_layers: int, options: Options) -> tuple[int, ...]:
    """Return the first layers of the second and later stages."""
    if options.stages > num_layers:
        raise UsageError(f"cascade: stages is {options.stages}, expected at most the {num_layers} MoE layers")
    size, more = divmod(num_layers, options.stages)
    equal = tuple(i * size + min(i, more) for i in range(1, options.stages))
    boundaries = options.boundaries or equal
    if list(boundaries) != sorted({b for b in boundaries if 0 < b < num_layers}):
        raise UsageError(
            f"cascade: boundaries are {list(boundaries)}, expected them to ascend between 1 and {num_layers - 1}"
        )
    return boundaries
