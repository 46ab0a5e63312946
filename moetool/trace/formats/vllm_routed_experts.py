"""vLLM's routed experts as returned with each choice: base64 of a `.npy` file, with rows for every layer of the model.

From a server with `--enable-return-routed-experts` (vLLM 0.21 or newer): `choices[].routed_experts`, of the shape
(tokens - 1 - prompt_start, num_hidden_layers, top_k), uint8 for at most 256 experts per layer, else uint16. If the
response has `prompt_routed_experts` too, the rows of its choices follow those. Expert ids are logical. Layers without
experts hold zeros, which look like expert 0. The model's layers must therefore be given, and a layer with experts that
is all zero is refused (vLLM issue 54730).

With several choices the usage lacks the length of each. Without `token_ids` the rows then count from the prompt's first
token.
"""

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np

from moetool.base.errors import MismatchError
from moetool.trace.foreign import responses
from moetool.trace.foreign.file_sample import FileSample, read_objects
from moetool.trace.foreign.model_facts import ModelFacts
from moetool.trace.foreign.responses import Answer, field, reused_tokens
from moetool.trace.foreign.routes import Routes
from moetool.trace.reader import Trace


def recognize(sample: FileSample) -> str | None:
    """Recognize a response whose choices have `routed_experts`."""
    choices = sample.first_object.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    return "a response with choices[].routed_experts" if isinstance(first, dict) and "routed_experts" in first else None


def read_routes(path: Path, facts: ModelFacts) -> Routes:
    """Read and check the responses of a file; each choice is a sequence.

    Raises:
        MismatchError: one is damaged or has no routed experts, or the model is another one.
        UsageError: the number of experts or their bytes are not given.
    """
    found = []
    for i, (where, response) in enumerate(read_objects(path)):
        usage = field(where, response, "usage", dict)
        prompt_tokens = field(where, usage, "prompt_tokens", int)
        choices = field(where, response, "choices", list)
        if not choices:
            raise MismatchError(f"{where} has no choices, expected a response of vLLM")
        before = response.get("prompt_routed_experts")
        for c, choice in enumerate(choices):
            at = f"{where}, choice {c}"
            value = choice.get("routed_experts") if isinstance(choice, dict) else None
            if value is None:
                raise MismatchError(f"{at} has no routed_experts; start vLLM with --enable-return-routed-experts")
            experts_THK = _experts(at, value)
            if before is not None:
                experts_THK = _joined(at, _experts(where, before), experts_THK)
            prompt_ids = _ids(at, response, "prompt_token_ids") or _ids(at, choice, "prompt_token_ids")
            new_ids = _ids(at, choice, "token_ids")
            told = field(where, usage, "completion_tokens", int) if len(choices) == 1 else None
            name = str(response.get("id") or i)
            found.append(
                responses.sequence(
                    at,
                    name if len(choices) == 1 else f"{name}/{c}",
                    experts_THK,
                    facts,
                    Answer(
                        prompt_tokens=prompt_tokens if prompt_ids is None else len(prompt_ids),
                        new_tokens=told if new_ids is None else len(new_ids),
                        token_ids=None if prompt_ids is None or new_ids is None else prompt_ids + new_ids,
                        reused_tokens=reused_tokens(where, usage),
                    ),
                )
            )
    return responses.routes(path, found)


def _ids(where: str, holder: Any, name: str) -> list[int] | None:
    ids = field(where, holder, name, list)
    if ids is not None and not all(type(i) is int and 0 <= i < 2**31 for i in ids):
        raise MismatchError(f"{where} has {name} that are not token ids, expected numbers from 0")
    return ids


def _experts(where: str, value: Any) -> np.ndarray:
    if isinstance(value, list):
        return responses.nested(where, value)
    if not isinstance(value, str):
        raise MismatchError(f"{where} has routed_experts {str(value)[:40]!r}, expected base64 or a list")
    return responses.npy(where, responses.decoded(where, value))


def _joined(where: str, before_THK: np.ndarray, after_THK: np.ndarray) -> np.ndarray:
    if before_THK.shape[1:] != after_THK.shape[1:]:
        raise MismatchError(f"{where} has routes of {after_THK.shape[1:]}, its prompt of {before_THK.shape[1:]}")
    return np.concatenate([before_THK, after_THK])


def write_routes(trace: Trace, out: Path, num_hidden_layers: int | None = None) -> list[str]:
    """Write a trace as the responses of completions, one per line; return notes on what they lack.

    Raises:
        MismatchError: the layers differ in shape.
        UsageError: `num_hidden_layers` is too small.
    """
    dtype = np.uint8 if trace.spec.num_experts <= 256 else np.uint16

    def response(name: str, experts_THK: np.ndarray, prompt: int, new: int) -> dict[str, Any]:
        stream = io.BytesIO()
        np.save(stream, experts_THK.astype(dtype), allow_pickle=False)
        return {
            "id": name,
            "choices": [{"index": 0, "routed_experts": base64.b64encode(stream.getvalue()).decode()}],
            "usage": {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new},
        }

    return responses.write_responses(trace, out, "vllm_routed_experts", num_hidden_layers, response)
