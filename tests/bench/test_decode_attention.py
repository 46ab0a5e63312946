"""Attention of one query: the compiled kernel beside torch's over gathered keys, and the bound of memory bandwidth.

pytest tests/bench/test_decode_attention.py -m slow -s
"""

import statistics
import time
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from moetool.kernels.cpu.attention import OneQuery, attend_one_query

HEADS, KV_HEADS, WIDTH, LAYERS, ROUNDS = 32, 4, 128, 48, 5  # of Qwen3-30B-A3B


@pytest.mark.slow
@pytest.mark.parametrize("num_keys", [128, 1024, 4096])
def test_time_of_one_query(num_keys: int) -> None:
    torch.manual_seed(0)
    caches = [torch.randn(2, num_keys + 16, KV_HEADS, WIDTH).bfloat16() for _ in range(LAYERS)]
    positions, query = torch.arange(num_keys), torch.randn(HEADS, 1, WIDTH).bfloat16()
    output = torch.empty(1, HEADS, WIDTH, dtype=torch.bfloat16)

    def kernel(cache: torch.Tensor) -> torch.Tensor:
        attend_one_query(query, tuple(cache), positions, [OneQuery(0, 0, num_keys)], None, output)
        return output

    def plain(cache: torch.Tensor) -> torch.Tensor:
        key, value = (each.index_select(0, positions).transpose(0, 1)[None] for each in cache)
        return F.scaled_dot_product_attention(query[None], key, value, enable_gqa=True)[0].transpose(0, 1)

    def median_us(attend: Callable[[torch.Tensor], torch.Tensor]) -> float:
        seconds = []
        for cache in caches * ROUNDS:
            began = time.perf_counter()
            attend(cache)
            seconds.append(time.perf_counter() - began)
        return 1e6 * statistics.median(seconds)

    assert torch.allclose(kernel(caches[0]).float(), plain(caches[0]).float(), rtol=2**-6, atol=1e-2)
    source, target = torch.ones(2**28, dtype=torch.uint8), torch.ones(2**28, dtype=torch.uint8)
    began = time.perf_counter()
    target.copy_(source)
    rate = 2 * 2**28 / (time.perf_counter() - began)
    bound = 1e6 * 4 * num_keys * KV_HEADS * WIDTH / rate
    print(
        f"\n{num_keys} keys: kernel {median_us(kernel):.0f} us, torch {median_us(plain):.0f} us, bound {bound:.0f} us"
    )
