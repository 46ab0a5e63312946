"""Plain transformers in a process of its own: `python -m moetool.bench.plain_generation MODEL JSON` prints seconds."""

import json
import sys
import time
from typing import Any


def main(model: str, settings: dict[str, Any]) -> list[list[float]]:
    """Seconds of the forward of each prompt and of the decoding of its answer.

    Args:
        settings: `threads`, `dtype`, `new_tokens` and `prompts`, lists of token ids.
    """
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(settings["threads"])
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, settings["dtype"])).eval()
    seconds = []
    with torch.inference_mode():
        for prompt in settings["prompts"]:
            began = time.perf_counter()
            made = plain(torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
            prefilled = time.perf_counter()
            for _ in range(settings["new_tokens"]):
                token = made.logits[:, -1:].argmax(-1)
                made = plain(token, past_key_values=made.past_key_values, use_cache=True)
            seconds.append([prefilled - began, time.perf_counter() - prefilled])
    return seconds


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], json.loads(sys.argv[2]))))
