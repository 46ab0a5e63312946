"""Token ids and routed experts of answers, for reinforcement learning.

As in vLLM, each choice gets `routed_experts`: base64 of a `.npy` file [tokens - 1, layers, top-k]. As in SGLang, the
response gets `sglext.routed_experts` of the first choice: base64 of raw int32 of the same shape. Rows begin
with the prompt's first token; the last token of an answer is never forwarded. Layers without experts are zeros.
"""

import base64
import io
from typing import Any

import numpy as np

from moetool.serving.generation import Exchange
from moetool.serving.request_schema import GenerationRequest


def extend(answer: dict[str, Any], exchange: Exchange, body: GenerationRequest) -> dict[str, Any]:
    """Add the requested token ids and experts to an answer; return the answer."""
    for entry, job, choice in zip(answer["choices"], exchange.jobs, exchange.choices, strict=True):
        if body.return_token_ids:
            entry |= {"token_ids": choice.tokens, "prompt_token_ids": job.prompt}
        if body.return_routed_experts:
            experts_THK = np.concatenate(choice.experts) if choice.experts else None
            entry["routed_experts"] = None if experts_THK is None else _npy(experts_THK)
            if experts_THK is not None and entry is answer["choices"][0]:
                answer["sglext"] = {"routed_experts": base64.b64encode(experts_THK.astype("<i4").tobytes()).decode()}
    return answer


def _npy(experts_THK: np.ndarray) -> str:
    stream = io.BytesIO()
    np.save(stream, experts_THK, allow_pickle=False)
    return base64.b64encode(stream.getvalue()).decode()
