"""transformers' own ways of running a model, to compare with."""

from pathlib import Path
from typing import Any

import torch

from moetool.errors import first_line
from moetool.models.spec import moe_layers


def open_offloaded(path: Path, dtype: torch.dtype, memory_bytes: int, scratch: str) -> tuple[Any, list[Any]] | str:
    """The model as transformers offloads it: `device_map="auto"` with so much memory, the rest on disk.

    Args:
        scratch: a folder for what it writes.

    Returns:
        The model and its MoE layers, or why there is none, in one line and transformers' own words.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
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
    except Exception as error:  # whatever it is, it is the answer
        return refusal(error)


def refusal(error: Exception) -> str:
    """An error of transformers in one line."""
    return f"refused, {type(error).__name__}: {first_line(error)}"
