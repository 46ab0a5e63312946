"""SGLang's routed experts as returned with each request: base64 of raw int32, with rows for every layer of the model.

From a server with `--enable-return-routed-experts`, asked with `return_routed_experts: true`. The native `/generate`
has them at `meta_info.routed_experts`, the OpenAI routes at `sglext.routed_experts` of the response. The shape, which
the response lacks, is (tokens - 1 - start, num_hidden_layers, top_k), so the model must be given. Expert ids are
logical; layers without experts hold zeros.

With several choices SGLang returns the routes of the first without its length. The rows then count from the prompt's
first token (`routed_experts_start_len: 0`).
"""

import base64
from pathlib import Path
from typing import Any

import numpy as np

from moetool.base.errors import MismatchError
from moetool.trace.foreign import responses
from moetool.trace.foreign.file_sample import FileSample, read_objects
from moetool.trace.foreign.model_facts import ModelFacts
from moetool.trace.foreign.responses import Answer, RecordedAnswer, field, reused_tokens
from moetool.trace.foreign.routes import Routes
from moetool.trace.reader import Trace


def recognize(sample: FileSample) -> str | None:
    """Recognize a response with `routed_experts` in `meta_info` or `sglext`."""
    for name in ("meta_info", "sglext"):
        holder = sample.first_object.get(name)
        if isinstance(holder, dict) and "routed_experts" in holder:
            return f"a response with {name}.routed_experts"
    return None


def read_routes(path: Path, facts: ModelFacts) -> Routes:
    """Read and check the responses of a file.

    Raises:
        MismatchError: one is damaged or has no routed experts, or the model is another one.
        UsageError: layers, top-k, the number of experts or their bytes are not given.
    """
    answers = [_read(where, i, response, facts) for i, (where, response) in enumerate(read_objects(path))]
    return responses.routes(path, answers)


def _read(where: str, i: int, response: dict[str, Any], facts: ModelFacts) -> RecordedAnswer:
    meta = field(where, response, "meta_info", dict)
    usage = meta if meta is not None else field(where, response, "usage", dict)
    holder = meta if meta is not None else field(where, response, "sglext", dict)
    choices = field(where, response, "choices", list) or []
    value = holder.get("routed_experts") if holder is not None else None
    if value is None:
        raise MismatchError(
            f"{where} has no routed_experts in meta_info or sglext; start SGLang with --enable-return-routed-experts "
            f"and ask with return_routed_experts: true"
        )
    return responses.sequence(
        where,
        str((meta if meta is not None else response).get("id") or i),
        responses.experts(where, value, facts),
        facts,
        Answer(
            prompt_tokens=field(where, usage, "prompt_tokens", int),
            new_tokens=field(where, usage, "completion_tokens", int) if len(choices) < 2 else None,
            reused_tokens=reused_tokens(where, usage),
        ),
    )


def write_routes(trace: Trace, out: Path, num_hidden_layers: int | None = None) -> list[str]:
    """Write a trace as the responses of `/generate`, one per line; return notes on what they lack.

    Raises:
        MismatchError: the layers differ in shape.
        UsageError: `num_hidden_layers` is too small.
    """
    return responses.write_responses(trace, out, "sglang_routed_experts", num_hidden_layers, _response)


def _response(name: str, experts_THK: np.ndarray, prompt: int, new: int) -> dict[str, Any]:
    text = base64.b64encode(experts_THK.astype("<i4").tobytes()).decode()
    return {"meta_info": {"id": name, "prompt_tokens": prompt, "completion_tokens": new, "routed_experts": text}}
