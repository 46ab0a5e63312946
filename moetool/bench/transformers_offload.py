"""Baseline: transformers with weights offloaded to disk."""

import logging
from pathlib import Path
from typing import Any

import torch

from moetool.errors import first_line
from moetool.models.spec import moe_layers


def open_offloaded(path: Path, dtype: torch.dtype, memory_bytes: int, scratch: str) -> tuple[Any, list[Any]] | str:
    """Load a model with transformers' offloading: `device_map="auto"` with this memory, the rest on disk.

    Args:
        path: folder of the checkpoint.
        memory_bytes: limit of the weights in memory.
        scratch: folder for the offloaded weights.

    Returns:
        The model and its MoE layers, or transformers' error in one line.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    logging.getLogger("accelerate").setLevel(logging.ERROR)  # hides the warning about offloaded weights
    try:
        model = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=dtype,
            trust_remote_code=False,
            device_map="auto",
            max_memory={"cpu": memory_bytes},
            offload_folder=scratch,
        ).eval()
        return model, list(moe_layers(model))
    except Exception as error:  # any error is the result
        return refusal(error)


def refusal(error: Exception) -> str:
    """Return an error of transformers in one line."""
    return f"refused, {type(error).__name__}: {first_line(error)}"
