"""Decode steps whose sequences attend in one call, by tensors of fixed shapes, as on a GPU: against one call each."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines import engine, generate

PROMPTS = ["Question: What is 12 + 7? Answer:", "The king said", "12 * 3 =", "word " * 130]


@pytest.mark.parametrize("policy", ["lru", "foresight"])
def test_sequences_attend_together_as_they_do_alone(policy: str, reference: Path, tokenizer: Any) -> None:
    ids = [tokenizer(text)["input_ids"] for text in PROMPTS]
    ids[3] = ids[3][:250]  # crosses the least room while it decodes
    found = []
    for fixed_shapes in (False, True):
        made = engine(reference, tokenizer, policy, 64)
        made.batcher.fixed_shapes = fixed_shapes
        found.append(generate(made, ids, 12))
        made.close()
    (tokens, logits), (fixed_tokens, fixed_logits) = found
    assert fixed_tokens == tokens
    for mine, other in zip(fixed_logits, logits, strict=True):
        torch.testing.assert_close(mine, other, atol=2e-4, rtol=1e-4)
