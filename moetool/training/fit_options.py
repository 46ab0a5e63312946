"""Options of gradient descent, held-out shares, and networks over a path."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from moetool.base.config import DROPPED, Span, require_within

HELD_OUT = 0.15
"""Default share of the requests for validation, and again for test."""


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
        require_within(self, f"{name}: ", hidden=Span(1), dropout=DROPPED, forget=DROPPED)


@dataclass(frozen=True, kw_only=True)
class FitOptions:
    """Options of fitting a predictor.

    Attributes:
        max_epochs: maximum number of epochs. An epoch is a pass over all pairs of a training token and a layer.
            Predictors that learn one layer per token see each token once per layer; others see all layers at once.
        max_tokens: maximum number of training tokens for the fit, drawn at random; counts use all tokens.
        patience: epochs without a better validation loss before stopping. The best weights are kept.
        held_out: share of the requests for validation, which decides when to stop, and again for test, which training
            never sees: 0.15 trains on 70 %. A trace of one or two requests holds out the same shares of each request's
            last tokens.
        checkpoint: directory of Lightning's checkpoint, written after each epoch, from which a fit resumes; its logs
            go there too (default: no checkpoint, and logs beside the predictor).
        logger: `csv` (metrics.csv), `tensorboard` or `none`.
        trainer: other arguments of Lightning's Trainer, by name: devices, num_nodes, precision, callbacks, ...
    """

    max_epochs: int = 20
    max_tokens: int | None = None
    batch_size: int = 256
    learning_rate: float = 3e-3
    patience: int = 4
    held_out: float = HELD_OUT
    checkpoint: Path | None = None
    logger: Literal["csv", "tensorboard", "none"] = "csv"
    trainer: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_within(self, "fit.", max_epochs=Span(1), batch_size=Span(2), patience=Span(1), max_tokens=Span(2))
        require_within(self, "fit.", learning_rate=Span(0, above=True), held_out=Span(0, 0.5, above=True, below=True))
