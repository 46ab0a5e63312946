"""Activations that are not finite are blamed on the data type only where it is narrow."""

import pytest
import torch

from moetool.base.errors import MoetoolError
from moetool.training.quantize.soundness import require_finite
from tests.refusals import refused


@pytest.mark.parametrize(
    ("dtype", "advice"),
    [
        (torch.float16, "this data type is too narrow for them; try --set dtype=float32"),
        (torch.bfloat16, "the text gives activations that overflow; try other --data"),
        (torch.float32, "the text gives activations that overflow; try other --data"),
    ],
)
def test_a_data_type_is_too_narrow_only_in_float16(dtype: torch.dtype, advice: str) -> None:
    hidden = torch.zeros(1, 6, 4, dtype=dtype)
    require_finite([hidden], "before the first layer")
    hidden[0, 1, 2] = torch.inf
    with refused(MoetoolError, "1 of 6 tokens", "before the first layer", advice):
        require_finite([hidden], "before the first layer")
