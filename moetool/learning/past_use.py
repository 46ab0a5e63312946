"""Features of each expert's past use, and samples of them that wait for their targets.

Shapes:
    A  experts of the model, L * E, by key     F  features     R  rates of decay
"""

import numpy as np

from moetool.types import ModelSpec

DECAYS = (0.5, 0.75, 0.9, 0.97, 0.99)
HABIT = 2
"""Which of the decays `habit` looks at."""
FEATURES = len(DECAYS) + 2
MAX_AGE = 200
DISCOUNT = 0.85
HORIZON = 24
"""An expert that is not needed for so many forwards counts as never needed again."""
FLOOR = 0.003
"""Added to use before its logarithm is taken."""


class Past:
    """Decayed use and age of each expert up to the current layer.

    Attributes:
        features_FA: f, float32.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self._stride = spec.num_experts
        num = spec.num_layers * spec.num_experts
        self._decay_R1 = np.array(DECAYS, np.float32)[:, None]
        self.use_RA = np.zeros((len(DECAYS), num), np.float32)
        self.age_A = np.full(num, 50, np.float32)
        self.features_FA = np.zeros((FEATURES, num), np.float32)
        self._describe(0, num)

    @property
    def habit_A(self) -> np.ndarray:
        """Root of the use that `habit` reads."""
        root: np.ndarray = np.sqrt(self.use_RA[HABIT])
        return root

    def begin_forward(self) -> None:
        self.features_FA[-1] = 1

    def pass_layers(self, first: int, end: int, used: list[int]) -> None:
        """The forward has passed the layers from `first` to before `end`; `used` are the keys that it needed there."""
        start, stop = first * self._stride, end * self._stride
        self.use_RA[:, start:stop] *= self._decay_R1
        self.use_RA[:, used] += 1 - self._decay_R1
        age_A = self.age_A[start:stop]
        np.minimum(age_A + 1, MAX_AGE, out=age_A)
        self.age_A[used] = 0
        self._describe(start, stop)
        self.features_FA[-1, start:stop] = 0

    def restore(self, use_RA: np.ndarray, age_A: np.ndarray) -> None:
        self.use_RA[:], self.age_A[:] = use_RA, age_A
        self._describe(0, len(age_A))

    def _describe(self, start: int, stop: int) -> None:
        self.features_FA[:-2, start:stop] = np.log(self.use_RA[:, start:stop] + FLOOR)
        self.features_FA[-2, start:stop] = np.log1p(self.age_A[start:stop])


class Sample:
    """One look at the experts, and what became of them.

    Attributes:
        layer: the last layer whose router had chosen.
        now, before: keys of the path of that request's token so far, and of the token before (None: there was none).
        features_FA: f, float16.
        target_A: discount ** (forwards that passed the expert by before its next use), 0 beyond the horizon; float16.
    """

    __slots__ = ("before", "features_FA", "layer", "now", "target_A")

    def __init__(self, layer: int, now: list[int], before: np.ndarray | None, features_FA: np.ndarray) -> None:
        self.layer, self.now, self.before = layer, now, before
        self.features_FA = features_FA.astype(np.float16)
        self.target_A = np.zeros(0, np.float16)

    def settle(self, paths: list[np.ndarray], spec: ModelSpec) -> None:
        """The future is known: `paths` are the request's own, of the sample's forward and the `HORIZON` after it."""
        target_A = np.zeros(self.features_FA.shape[1], np.float16)
        for passed in range(len(paths) - 1, 0, -1):
            target_A[paths[passed]] = DISCOUNT ** (passed - 1)
        later = slice((self.layer + 1) * spec.num_experts, None)  # these have their first chance in this forward
        target_A[later] *= np.float16(DISCOUNT)
        first = paths[0][paths[0] >= later.start]
        target_A[first] = 1
        self.target_A = target_A
