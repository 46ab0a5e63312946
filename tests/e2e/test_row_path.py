"""Decoding with experts that are large enough for the compiled products: one call for all that are here."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from moetool.base.types import ForwardInfo, Phase
from moetool.caching.policy import build_policy
from moetool.caching.residency import Residency
from moetool.models.checkpoint import Checkpoint
from moetool.models.loading import load_lazy
from moetool.runtime.experts.forward import ExpertRuntime
from moetool.runtime.experts.store import open_store
from tests.engines import RandomPolicy

EXPERTS, TOP_K, LAYERS = 8, 3, 2


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3_moe", vocab_size=64, hidden_size=512, intermediate_size=64, moe_intermediate_size=512,
        num_hidden_layers=LAYERS, num_experts=EXPERTS, num_experts_per_tok=TOP_K, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, decoder_sparse_step=1, norm_topk_prob=True,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("wide")
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(path)
    return path


def _logits(
    path: Path,
    slots: int,
    batches: list[list[int]],
    *,
    in_one_call: bool,
    seed: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Any:
    """The logits of some forwards, each of one token a request."""
    loaded = load_lazy(Checkpoint.open(path), dtype)
    policy = build_policy("lru", loaded.spec, {}, slots) if seed is None else RandomPolicy(loaded.spec, slots, seed)
    residency = Residency(policy)
    runtime = ExpertRuntime(loaded, residency, open_store(loaded, residency))
    if not in_one_call:
        runtime.max_rows_L = [0] * LAYERS
    found = []
    with torch.inference_mode():
        for number, ids in enumerate(batches):
            runtime.begin_forward(
                ForwardInfo(
                    forward_id=number,
                    request_T=tuple(range(len(ids))),
                    phase_T=(Phase.DECODE,) * len(ids),
                    position_T=(0,) * len(ids),
                )
            )
            found.append(loaded.model(torch.tensor(ids)[:, None]).logits)
            runtime.end_forward()
    counts = (runtime.counts.needed, runtime.counts.hits, runtime.counts.loaded)
    runtime.close()
    return found, counts


BATCHES = [[3], [7], [3, 9], [1, 2], [5], [1, 2, 3, 4, 5, 6], [7], [8, 8], [4] * 9 + [5, 6]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("slots", "seed"), [(16, None), (4, None), (2, None), (5, 1), (9, 2)])
def test_all_at_once_gives_the_bits_of_one_by_one(
    checkpoint: Path, slots: int, seed: int | None, dtype: torch.dtype
) -> None:
    """In float32, torch computes the experts with more rows than `MAX_SCALED_ROWS`."""
    expected, _ = _logits(checkpoint, 16, BATCHES, in_one_call=False, dtype=dtype)
    one_by_one, counts = _logits(checkpoint, slots, BATCHES, in_one_call=False, seed=seed, dtype=dtype)
    at_once, same_counts = _logits(checkpoint, slots, BATCHES, in_one_call=True, seed=seed, dtype=dtype)
    assert counts == same_counts
    assert all(map(torch.equal, one_by_one, expected))
    assert all(map(torch.equal, at_once, expected))


def test_and_nearly_those_of_transformers(checkpoint: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    found, _ = _logits(checkpoint, 16, BATCHES, in_one_call=True)
    with torch.inference_mode():
        for ids, logits in zip(BATCHES, found, strict=True):
            plain = model(torch.tensor(ids)[:, None]).logits
            assert torch.allclose(logits.float(), plain.float(), rtol=0.02, atol=0.02)


def test_the_path_is_taken(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    form = type(load_lazy(Checkpoint.open(checkpoint), torch.bfloat16).layers[0].form)
    compute_rows = form.compute_rows

    def counted(self: Any, x_TD: torch.Tensor, shares: Any, num_rows: int) -> torch.Tensor:
        calls.append(len(shares))
        return compute_rows(self, x_TD, shares, num_rows)

    monkeypatch.setattr(form, "compute_rows", counted)
    _logits(checkpoint, 16, [[3], [3]], in_one_call=True)
    assert sum(calls) == 2 * LAYERS * TOP_K
    assert calls[-LAYERS:] == [TOP_K] * LAYERS  # all resident by then
