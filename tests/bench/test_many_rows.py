"""Products of many bfloat16 rows: this package beside torch, on one thread; prints microseconds."""

import statistics
import time

import pytest
import torch

from moetool.kernels.cpu import many_rows


@pytest.mark.parametrize("num_rows", [3, 8, 16, 64, 256])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 2048), (256, 256), (1536, 2048)])
def test_beside_torch(outputs: int, inputs: int, num_rows: int) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        weights = [torch.randn(outputs, inputs).bfloat16() for _ in range(8)]
        x = torch.randn(num_rows, inputs).bfloat16()
        taken: dict[str, list[float]] = {"torch": [], "moetool": []}
        for _ in range(5):
            for name, linear in (("torch", torch.nn.functional.linear), ("moetool", many_rows.linear)):
                began = time.perf_counter()
                for weight in weights:
                    linear(x, weight)
                taken[name].append(1e6 * (time.perf_counter() - began) / len(weights))
    finally:
        torch.set_num_threads(threads)
    medians = {name: statistics.median(each) for name, each in taken.items()}
    print(f"\n{num_rows} rows by {outputs} x {inputs}: {medians}, ratio {medians['moetool'] / medians['torch']:.2f}")
