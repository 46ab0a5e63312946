"""Products of few rows: the compiled kernel beside torch's and oneDNN's prepacked product, without and with huge pages.

pytest tests/bench/test_row_products.py -m slow -s
"""

import statistics
import time
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from moetool.kernels.cpu.huge_pages import ask_for_huge_pages
from moetool.kernels.cpu.kinds import GGML_KINDS
from moetool.kernels.cpu.matmul import products
from moetool.kernels.cpu.scaled_weight import ScaledWeight

NUM_EXPERTS, OUTPUTS, INPUTS = 96, 1536, 2048  # gate and up of Qwen3-30B-A3B: 600 MB, more than any cache
TOP_K, ROUNDS = 8, 30


def _median_s(run: Callable[[list[int]], object]) -> float:
    seconds = []
    for n in range(ROUNDS):
        experts = [(n * TOP_K + i) % NUM_EXPERTS for i in range(TOP_K)]
        began = time.perf_counter()
        run(experts)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


@pytest.mark.slow
@pytest.mark.parametrize("huge", [False, True])
def test_bandwidth_of_few_rows(huge: bool) -> None:
    torch.manual_seed(0)
    pool = torch.randn(NUM_EXPERTS, OUTPUTS, INPUTS).mul_(0.02).bfloat16()
    if huge and not ask_for_huge_pages(pool, collapse=True):
        pytest.skip("the system gives no huge pages")
    weights = list(pool)
    num_bytes = TOP_K * OUTPUTS * INPUTS * 2
    print(f"\n{torch.get_num_threads()} threads, huge pages {huge}, GB/s of weights, median of {ROUNDS}")
    print("rows  kernel  torch  oneDNN prepacked")
    packed = [torch.ops.mkldnn._reorder_linear_weight(weight, 1) for weight in weights]
    for num_rows in (1, 2, 3, 4, 8):
        x = torch.randn(num_rows, INPUTS).bfloat16()

        def kernel(experts: list[int], x: torch.Tensor = x) -> object:
            return products([x] * len(experts), [weights[e] for e in experts])

        def plain(experts: list[int], x: torch.Tensor = x) -> object:
            return [F.linear(x, weights[e]) for e in experts]

        def prepacked(experts: list[int], x: torch.Tensor = x) -> object:
            return [torch.ops.mkldnn._linear_pointwise(x, packed[e], None, "none", [], "") for e in experts]

        rates = [num_bytes / _median_s(run) / 1e9 for run in (kernel, plain, prepacked)]
        print(f"{num_rows:4d}  {rates[0]:6.1f} {rates[1]:6.1f}  {rates[2]:16.1f}")
        for made, expected in zip(kernel([0, 1]), plain([0, 1]), strict=False):  # type: ignore[call-overload]
            assert torch.allclose(made.float(), expected.float(), rtol=2**-6, atol=2e-2)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["bfloat16", "q4_k"])
def test_two_threads_beside_one(form: str) -> None:
    """One row by the weights of Qwen3-30B-A3B, beside a sum of as many bytes as its output head in bfloat16."""
    kind = next(kind for kind in GGML_KINDS if kind.name == "q4_k")

    def weights(count: int, outputs: int, inputs: int) -> list[torch.Tensor | ScaledWeight]:
        row_bytes = 2 * inputs if form == "bfloat16" else kind.row_bytes(inputs)
        pool = torch.empty(count, outputs, row_bytes, dtype=torch.uint8)
        ask_for_huge_pages(pool)
        pool.fill_(1)
        if form == "bfloat16":
            return list(pool.view(torch.bfloat16))
        return [ScaledWeight(kind, each, torch.empty(0), inputs, kind.numbers, 1, False) for each in pool]

    words = torch.ones(2**26, dtype=torch.int64)
    ways: dict[str, Callable[[int], object]] = {"sum": lambda number: words.sum()}
    for name, total, count, outputs, inputs in (
        ("gate and up of 8 experts", 96, 8, 1536, 2048),
        ("down of 8 experts", 96, 8, 2048, 768),
        ("queries", 24, 1, 4096, 2048),
        ("attention output", 24, 1, 2048, 4096),
        ("output head", 1, 1, 151936, 2048),
    ):
        pool, x = weights(total, outputs, inputs), torch.randn(1, inputs).bfloat16()

        def multiply(
            number: int, pool: list[torch.Tensor | ScaledWeight] = pool, x: torch.Tensor = x, count: int = count
        ) -> object:
            first = number * count % len(pool)
            return products([x] * count, pool[first : first + count])

        ways[name] = multiply
    before, seconds = torch.get_num_threads(), {}
    try:
        for name, way in ways.items():
            for number in range(ROUNDS):
                for threads in (1, 2):
                    torch.set_num_threads(threads)
                    began = time.perf_counter()
                    way(2 * number + threads)
                    seconds.setdefault((name, threads), []).append(time.perf_counter() - began)
    finally:
        torch.set_num_threads(before)
    print(f"\n{form}, microseconds on one thread and on two, median of {ROUNDS}, and their ratio")
    for name in ways:
        one, two = (statistics.median(seconds[name, threads][3:]) for threads in (1, 2))
        print(f"{name:26s} {1e6 * one:8.0f} {1e6 * two:8.0f} {one / two:5.2f}")
