"""What a predictor of coming experts is.

Counting, searching and learned predictors share this class. A predictor file in predictors/ defines a frozen
dataclass `Options` and a subclass `Predictor` of `moetool.predictor.Predictor`.
"""

from abc import abstractmethod
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from moetool.types import GateEvent, ModelSpec


class Predictor(nn.Module):
    """Scores the experts of a coming layer from what is known of the current forward.

    State that belongs to one forward is set by `observe`; nothing else changes between calls, so a prediction
    never sees a later token or layer.

    Class attributes:
        needs: trace columns that training and predicting take.
        learned: whether it has parameters that gradient descent fits; counting predictors only use `count`.
        lookahead: how many layers ahead of the last observed one it can score.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"experts"})
    learned: ClassVar[bool] = False
    lookahead: ClassVar[int] = 1

    def __init__(self, spec: ModelSpec, options: Any) -> None:
        super().__init__()
        self.spec = spec
        self.options = options
        self._path: list[np.ndarray] = []

    @abstractmethod
    def count(self, experts_NLK: np.ndarray) -> None:
        """Gather the statistics of the training tokens, before any gradient step.

        Args:
            experts_NLK: the experts of N training tokens in every MoE layer, int64.
        """

    @abstractmethod
    def layer_scores(self, experts_TPK: Tensor, layer: int) -> Tensor:
        """Score the experts of MoE layer `layer`.

        Args:
            experts_TPK: the experts that each token used in the MoE layers 0..P-1, int64, with P <= layer.
            layer: 1..L-1 with layer - P < lookahead.

        Returns:
            float32 [T, E]; higher is likelier; comparable within a row.
        """

    def loss(self, experts_NLK: Tensor, layer: int) -> Tensor:
        """Mean training loss of predicting `layer` from the layers before it; learned predictors only."""
        raise TypeError(f"{type(self).__module__} has nothing that is fitted by gradient descent")

    def observe(self, event: GateEvent) -> None:
        """Take in the event of the next layer of the current forward; layer 0 begins a new forward."""
        if event.layer == 0:
            self._path.clear()
        self._path.append(np.asarray(event.experts_TK, dtype=np.int64))

    @torch.inference_mode()
    def scores(self, layer: int) -> np.ndarray:
        """Score MoE layer `layer` for every token of the forward that was observed.

        Returns:
            float32 [T, E].
        """
        path = torch.from_numpy(np.stack(self._path, axis=1))
        return self.layer_scores(path, layer).numpy()
