"""Training the reference model: tokens a second of a core, by how the experts are computed.

`pytest tests/bench/test_reference_training.py -s`. Seconds are of the processor, not of the clock, so that what else
runs matters less; the ways take turns, forwards and backwards, and medians are shown.
"""

import statistics
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from moetool import prompts
from moetool.reference.model import EXPERTS, losses, open_checkpoint
from moetool.tables import print_table

ROUNDS = 4


def padded(self: Any, hidden_TD: torch.Tensor, index_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
    """Every expert on as many rows as the busiest has, in one batched product each way."""
    num_experts, (num_tokens, top_k) = len(self.gate_up_proj), index_TK.shape
    expert_N = index_TK.flatten()
    order_N = expert_N.argsort(stable=True)
    count_E = torch.bincount(expert_N, minlength=num_experts)
    rows = -(-int(count_E.max()) // 64) * 64
    place_N = torch.arange(len(expert_N)) - (count_E.cumsum(0) - count_E)[expert_N[order_N]] + rows * expert_N[order_N]
    slot_N = torch.empty_like(expert_N).index_copy_(0, order_N, place_N)
    rows_ECD = hidden_TD.new_zeros(num_experts * rows, hidden_TD.shape[1]).index_copy(
        0, place_N, hidden_TD[order_N // top_k]
    )
    gate, up = torch.bmm(rows_ECD.view(num_experts, rows, -1), self.gate_up_proj.transpose(1, 2)).chunk(2, -1)
    out_ECD = torch.bmm(self.act_fn(gate) * up, self.down_proj.transpose(1, 2))
    chosen_TKD = out_ECD.flatten(0, 1)[slot_N].view(num_tokens, top_k, -1)
    return (chosen_TKD * weights_TK[..., None]).sum(1).to(hidden_TD.dtype)


@pytest.mark.slow
def test_tokens_a_second(reference: Path, tokenizer: Any) -> None:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register("padded", padded)
    text = "\n".join(prompt.text for prompt in prompts.load(["all"]))
    ids = torch.tensor(tokenizer(text)["input_ids"])
    rows_BL = ids[: len(ids) // 257 * 257].view(-1, 257)
    rows_BL = rows_BL[torch.randperm(len(rows_BL), generator=torch.Generator().manual_seed(0))[:16]]
    model = open_checkpoint(reference)
    seconds: dict[str, list[float]] = {name: [] for name in (EXPERTS, "padded", "grouped_mm", "eager")}
    for turn in range(ROUNDS + 1):
        for name, taken in list(seconds.items())[:: 1 if turn % 2 else -1]:
            model.set_experts_implementation(name)
            began = time.process_time()
            with torch.autocast("cpu", torch.bfloat16):
                loss, _ = losses(model, rows_BL)
            loss.backward()
            model.zero_grad()
            if turn:  # the first compiles
                taken.append(time.process_time() - began)
    tokens = rows_BL[:, 1:].numel()
    rates = {name: tokens / statistics.median(taken) for name, taken in seconds.items()}
    rows = [[name, f"{rate:,.0f}", f"{rate / rates['eager']:.2f}"] for name, rate in rates.items()]
    print_table(f"forward and backward of {tokens:,} tokens", ["experts", "tokens / s of a core", "x eager"], rows)
    assert all(rate > 0 for rate in rates.values())
