"""Attention with sinks and windows over pages: the numbers of transformers' eager attention."""

from pathlib import Path

import pytest
import torch

from moetool.models.checkpoint import Checkpoint
from moetool.models.loading import load_full
from moetool.runtime.kv import paged_attention
from moetool.runtime.loop.batching import Batcher
from moetool.runtime.request import SamplingParams
from tests import families

_PROMPTS = [[(7 * i + 3 * k) % 60 + 3 for i in range(length)] for k, length in enumerate((41, 1, 30))]


@pytest.mark.parametrize("fixed_shapes", [False, True])
@pytest.mark.parametrize("mask_numbers", [2**23, 500])
def test_logits_with_sinks_are_those_of_transformers(
    fixed_shapes: bool, mask_numbers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts in chunks of 24, and their answers together."""
    monkeypatch.setattr(paged_attention, "MASK_NUMBERS", mask_numbers)
    families.save("gpt_oss", tmp_path, sliding_window=9, std=0.2)
    model = load_full(Checkpoint.open(tmp_path), torch.float32).model
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.normal_(1, 2)
    made: list[torch.Tensor] = []
    batcher = Batcher(model, max_requests=3, kv_tokens=256, max_batch_tokens=24)
    batcher.fixed_shapes = fixed_shapes
    hook = model.lm_head.register_forward_hook(lambda module, args, output: made.append(output[0].clone()))
    answers: list[list[int]] = [[] for _ in _PROMPTS]
    for number, prompt in enumerate(_PROMPTS):
        batcher.add(number, prompt, SamplingParams(max_tokens=12, ignore_eos=True))
    while not batcher.idle:
        for output in batcher.step():
            assert output.error is None and output.token is not None, output.error
            answers[output.request].append(output.token)
    scored = torch.cat(list(batcher.score(9, _PROMPTS[0])))
    hook.remove()
    batcher.close()
    ours = torch.cat(made)
    for prompt, answer in zip(_PROMPTS, answers, strict=True):
        with torch.inference_mode():
            theirs = model(torch.tensor([prompt + answer]), use_cache=False).logits[0]
        assert theirs[len(prompt) - 1 : -1].argmax(1).tolist() == answer
        for row in theirs[len(prompt) - 1 : -1]:
            assert (ours - row).abs().amax(1).min() < 1e-4
    with torch.inference_mode():
        assert torch.allclose(scored, model(torch.tensor([_PROMPTS[0]]), use_cache=False).logits[0], atol=1e-4)
