"""The arithmetic of one routed expert."""

from typing import Any

import torch
import torch.nn.functional as F


def compute_expert(module: Any, x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """One gated expert, by the module's own activation. Weights are widened to the type of `x` where they differ.

    Shapes:
        x and the result [T, D]; gate_up [2I, D]; down [D, I].
    """
    return F.linear(module._apply_gate(F.linear(x, gate_up.to(x.dtype))), down.to(x.dtype))
