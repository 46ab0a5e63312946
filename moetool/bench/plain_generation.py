"""Plain transformers in a separate process: `python -m moetool.bench.plain_generation MODEL JSON` prints seconds."""

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any


def main(model: str, settings: dict[str, Any]) -> list[list[float]]:
    """Time the forward of each prompt and the decoding of its answer.

    Args:
        settings: `threads`, `dtype`, `new_tokens` and `prompts`, lists of token ids; `offload_bytes`, if given, is the
            most memory for weights: transformers offloads the rest to disk, by the package accelerate.

    Effects: writes offloaded weights into a temporary folder.
    """
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(settings["threads"])
    limit = settings.get("offload_bytes")
    with tempfile.TemporaryDirectory(prefix="moetool-bench-") as folder:
        how = {"device_map": "auto", "max_memory": {"cpu": limit}, "offload_folder": folder} if limit else {}
        plain = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, settings["dtype"]), **how).eval()
        timed = [time_tokens(plain, prompt, settings["new_tokens"]) for prompt in settings["prompts"]]
    return [[prefill, sum(tokens)] for prefill, tokens in timed]


def time_tokens(model: Any, prompt: Sequence[int], new_tokens: int) -> tuple[float, list[float]]:
    """Time the prompt's forward and each decoded token, greedily, with transformers' model and cache."""
    import torch

    def measured(tokens: Any, **arguments: Any) -> tuple[Any, float]:
        began = time.perf_counter()
        made = model(tokens, use_cache=True, logits_to_keep=1, **arguments)
        token = made.logits[:, -1:].argmax(-1)
        token.tolist()  # waits for the device
        return (token, made.past_key_values), time.perf_counter() - began

    device = "cpu" if model.device.type == "meta" else model.device  # all on disk
    with torch.inference_mode():
        (token, cache), prefill_s = measured(torch.tensor([list(prompt)], device=device))
        seconds = []
        for _ in range(new_tokens):
            (token, cache), token_s = measured(token, past_key_values=cache)
            seconds.append(token_s)
    return prefill_s, seconds


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], json.loads(sys.argv[2]))))
