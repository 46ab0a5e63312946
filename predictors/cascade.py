"""Stacked one-layer transformers that name the experts of a prompt block by block of layers, before it runs.

Source: DIRECTOR § V-A, the cascade predictor {M_1, ..., M_n}: "M_1 consumes token embeddings and predicts the expert
routing R_1; each subsequent M_i augments these embeddings with the predicted routing R_{i-1} from M_{i-1} to predict
routing R_i for its designated block of subsequent layers". Two stages are the ones of its Table II. Readings and
deviations, besides those of `predictors/single_transformer.py`:

- R_{i-1} is given as the probability of each expert in each layer of the block before, by the stage before it, not as
  a top-k choice: it says how sure that stage is, and the loss of a later stage reaches the earlier ones. All stages are
  trained together, on what they predict and never on what was chosen.
- R_{i-1} is added to the embeddings through a linear map; how they are augmented is not described.
- The blocks are as equal as they can be unless they are given, the earlier ones the larger.
"""

from dataclasses import dataclass

from moetool.config import Span, require_within
from moetool.errors import UsageError
from moetool.learning.prompt_routing import PromptOptions, PromptPredictor
from moetool.types import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(PromptOptions):
    """Options of the cascade.

    Attributes:
        stages: how many transformers are stacked.
        boundaries: the first layers of the second and later stages, ascending; equal blocks where it is empty.
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
    """A stage for each block of layers.

    Raises:
        UsageError: there are more stages than layers, or the boundaries do not ascend within the layers.
    """

    def __init__(self, spec: ModelSpec, options: Options) -> None:
        super().__init__(spec, options, _boundaries(spec.num_layers, options))


def _boundaries(num_layers: int, options: Options) -> tuple[int, ...]:
    """The first layers of the second and later stages."""
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
