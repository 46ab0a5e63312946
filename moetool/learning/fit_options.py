"""Options of gradient descent, of the requests held out meanwhile, and of networks over a path."""

from dataclasses import dataclass

from moetool.errors import UsageError

HELD_OUT = 0.15
"""Share of the requests that goes to validation, and again to test, unless another is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PathOptions:
    """Options of a network over a token's path.

    Attributes:
        hidden: width of the hidden layer.
        dropout: share of the hidden layer that is dropped in training.
        forget: share of the path's experts that are dropped in training.
    """

    hidden: int = 512
    dropout: float = 0.2
    forget: float = 0.2

    def __post_init__(self) -> None:
        name = type(self).__module__.rpartition(".")[2]
        if self.hidden < 1:
            raise UsageError(f"{name}: hidden is {self.hidden}, expected 1 or more")
        if not (0 <= self.dropout < 1 and 0 <= self.forget < 1):
            raise UsageError(f"{name}: dropout is {self.dropout} and forget {self.forget}, expected 0 to below 1")


@dataclass(frozen=True, kw_only=True)
class FitOptions:
    """How a predictor is fitted.

    Attributes:
        max_epochs: an epoch visits every training token once; a predictor that learns one layer a token gets it at one
            drawn at random, so that its cost does not grow with the number of layers; a model of many layers wants
            more epochs.
        max_tokens: fit on at most so many training tokens, drawn at random; all of them are counted.
        patience: epochs without a better validation loss before stopping. The best weights are kept.
        held_out: share of the requests, or of the tokens of one or two, for validation, and again for test.
    """

    max_epochs: int = 20
    max_tokens: int | None = None
    batch_size: int = 256
    learning_rate: float = 3e-3
    patience: int = 4
    held_out: float = HELD_OUT

    def __post_init__(self) -> None:
        for name, least in (("max_epochs", 1), ("batch_size", 2), ("patience", 1), ("max_tokens", 2)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise UsageError(f"{name} is {value}, expected at least {least}")
        if not self.learning_rate > 0:
            raise UsageError(f"learning_rate is {self.learning_rate}, expected more than 0")
        if not 0 < self.held_out < 0.5:
            raise UsageError(f"held_out is {self.held_out}, expected more than 0 and less than 0.5")
