"""The bytes of a request's own cache are those that transformers' cache holds after a real forward."""

from pathlib import Path
from typing import Any

import pytest
import torch

from moetool.base.errors import MismatchError
from moetool.base.families import FAMILIES
from moetool.models.cache_size import CacheSize, tensors_of
from moetool.models.checkpoint import Checkpoint
from moetool.models.loading import load_full
from moetool.runtime.decoding import cache_bytes
from tests import families
from tests.refusals import refused

EXACT = {name: {} for name in ("bailing_hybrid", "flint", "granitemoehybrid", "kimi_linear", "lfm2_moe", "minimax")} | {
    name: {} for name in ("jamba", "nemotron_h", "qwen3_next", "zaya")
}
WINDOWED = {
    "gemma4_text": {"sliding_window": 16},
    "mimo_v2_flash": {"sliding_window": 17},
}


def _held(path: Path, length: int) -> int:
    """Bytes of the cache after a prompt."""
    model = load_full(Checkpoint.open(path), torch.float32).model
    with torch.inference_mode():
        cache = model(torch.arange(length)[None] % 60 + 3, use_cache=True).past_key_values
    return sum(tensor.nbytes for tensor in tensors_of(cache) if tensor.dim())


@pytest.mark.parametrize("name", [*EXACT, *WINDOWED])
def test_a_cache_takes_the_bytes_of_its_size(name: str, tmp_path: Path) -> None:
    assert FAMILIES[name].own_cache
    families.save(name, tmp_path, **(EXACT | WINDOWED)[name])
    size = Checkpoint.open(tmp_path).cache_size(torch.float32)
    assert size is not None
    for length in (40, 97):
        held, counted = _held(tmp_path, length), size.of(length, 1)
        missing = size.request_bytes // 16 if name in WINDOWED else 0  # the newest token is not kept
        assert counted - missing <= held <= counted


def test_compressed_and_chunked_caches_are_bounded(tmp_path: Path) -> None:
    for name in ("deepseek_v4", "llama4_text"):
        families.save(name, tmp_path / name)
        size = Checkpoint.open(tmp_path / name).cache_size(torch.float32)
        assert size is not None
        held = _held(tmp_path / name, 100)
        assert held <= size.of(100, 1) <= 2 * held


def test_a_window_over_the_answer_alone_keeps_the_prompt(tmp_path: Path) -> None:
    families.save_multimodal("unlimited_ocr", tmp_path)
    size = Checkpoint.open(tmp_path).cache_size(torch.float32)
    assert size == CacheSize(token_bytes=3 * 2 * 2 * 8 * 4)  # layers, keys and values, heads, width, bytes
    assert _held(tmp_path, 40) == size.of(40, 1)


def test_paged_families_are_counted_in_pages(tmp_path: Path) -> None:
    families.save("mixtral", tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.cache_size(torch.float32) is None
    few, many = (cache_bytes(checkpoint, torch.float32, tokens, 4) for tokens in (64, 128))
    assert many - few == 64 * 3 * 2 * 2 * 8 * 4  # layers, keys and values, heads, width, bytes


def test_a_forward_that_needs_numbers_is_not_measured(tmp_path: Path) -> None:
    families.save("jetmoe", tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    assert FAMILIES["jetmoe"].own_cache and checkpoint.cache_size(torch.float32) is None
    held = _held(tmp_path, 64)
    assert held <= cache_bytes(checkpoint, torch.float32, 64, 1) <= held + 8 * held // 64


def test_fixed_parts_are_reserved_for_eight_requests() -> None:
    size = CacheSize(token_bytes=3, request_bytes=100)
    assert [size.of(10, requests) for requests in (1, 8, 64)] == [130, 830, 830]


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("qwen3_next", {"layer_types": ["linear_attention"] * 2}),
        ("granitemoehybrid", {"layer_types": ["mamba"] * 2}),
        ("lfm2_moe", {"layer_types": ["conv"] * 3}),
        ("nemotron_h", {"layers_block_type": ["mamba", "moe"] * 2}),
        ("jamba", {"attn_layer_period": 8, "attn_layer_offset": 7}),
    ],
)
def test_a_model_without_keys_is_refused_before_its_weights_are_read(
    name: str, changed: dict[str, Any], tmp_path: Path
) -> None:
    families.config(name, **changed).save_pretrained(tmp_path)
    with refused(MismatchError, name, "attention with keys"):
        Checkpoint.open(tmp_path, weights=False).cache_size(torch.float32)


def test_a_cache_that_counts_its_tokens_otherwise_needs_no_keys(tmp_path: Path) -> None:
    families.save("minimax", tmp_path, layer_types=["linear_attention"] * 2)
    size = Checkpoint.open(tmp_path).cache_size(torch.float32)
    assert size is not None and size.token_bytes == 0
    assert _held(tmp_path, 40) == size.of(40, 1)
