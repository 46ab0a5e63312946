"""Products with experts as they are stored beside those with experts unpacked to bfloat16: microseconds and GB/s.

OMP_NUM_THREADS=2 pytest tests/bench/test_scaled_weights.py -m slow -s

With one thread by its processor time, which other processes hardly change; with more by the clock.
"""

import statistics
import time
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from moetool.kernels.cpu.huge_pages import ask_for_huge_pages
from moetool.kernels.cpu.kinds import FP8, GGML_KINDS, INT8, MXFP4, NVFP4, RowKind
from moetool.kernels.cpu.matmul import multiplies, products
from moetool.kernels.cpu.scaled_weight import ScaledWeight

gguf = pytest.importorskip("gguf")
from tests.gguf_models import random_blocks  # noqa: E402  # needs the package

NUM_EXPERTS, OUTPUTS, INPUTS = 96, 1536, 2048  # gate and up of Qwen3-30B-A3B: 600 MB in bfloat16, more than most caches
TOP_K, ROUNDS = 8, 24


def _pool(row_bytes: int) -> torch.Tensor:
    pool = torch.empty(NUM_EXPERTS, OUTPUTS, row_bytes, dtype=torch.uint8)
    ask_for_huge_pages(pool)
    return pool.random_(0, 127)


def _scaled(kind: RowKind) -> list[ScaledWeight]:
    group = 32 if kind is MXFP4 else 128
    pool = _pool(kind.row_bytes(INPUTS))
    if kind.ggml is not None:
        blocks = random_blocks((OUTPUTS, INPUTS), gguf.GGMLQuantizationType(kind.ggml))
        pool.copy_(torch.from_numpy(blocks))  # caches hold parts of codebooks by use
        return [ScaledWeight(kind, v, torch.empty(0), INPUTS, kind.numbers, 1, False) for v in pool]
    if kind is NVFP4:
        rows_EOS = torch.full((NUM_EXPERTS, OUTPUTS, 4 + INPUTS // 16), 0x38, dtype=torch.uint8)
        rows_EOS.view(torch.float32)[..., 0] = kind.factor
        padded = torch.nn.functional.pad(rows_EOS.flatten(1), (0, 8))
        return [ScaledWeight(kind, v, s, INPUTS, 16, 1, False) for v, s in zip(pool, padded, strict=True)]
    if kind is MXFP4:
        scales = torch.full((NUM_EXPERTS, OUTPUTS * INPUTS // group + 4), 120, dtype=torch.uint8)
    else:
        scales = torch.full((NUM_EXPERTS, OUTPUTS // group, INPUTS // group), 2.0**-10)
    rows = 1 if kind is MXFP4 else group
    return [ScaledWeight(kind, v, s, INPUTS, group, rows, False) for v, s in zip(pool, scales, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
def test_forms_of_a_slot(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    clock = time.thread_time if threads == 1 else time.perf_counter
    kinds = (FP8, INT8, MXFP4, NVFP4, *GGML_KINDS)
    forms = {kind.name: _scaled(kind) for kind in kinds}
    dense = _pool(2 * INPUTS).view(torch.bfloat16).fill_(0.02)
    words = dense.view(torch.int64)
    seconds: dict[tuple[str, int], list[float]] = {}

    def timed(name: str, rows: int, run: Callable[[], object]) -> None:
        began = clock()
        run()
        seconds.setdefault((name, rows), []).append(clock() - began)

    def run(weights: list[ScaledWeight] | torch.Tensor, x: torch.Tensor, experts: list[int]) -> None:
        chosen = [weights[e] for e in experts]
        if multiplies(x, chosen[0]):
            products([x] * len(chosen), chosen)
            return
        for weight in chosen:
            weight.times(x) if isinstance(weight, ScaledWeight) else F.linear(x, weight)

    all_rows = (1, 2, 4, 8, 16, 64, 128)
    try:
        for n in range(ROUNDS):
            experts = [(n * TOP_K + i) % NUM_EXPERTS for i in range(TOP_K)]
            timed("read", 0, lambda experts=experts: [words[e].sum() for e in experts])  # type: ignore[misc]
            for rows in all_rows if n % 4 == 0 else all_rows[:4]:
                x = torch.randn(rows, INPUTS).bfloat16()
                for name, weights in {"bfloat16": dense, **forms}.items():
                    timed(name, rows, lambda w=weights, x=x, e=experts: run(w, x, e))  # type: ignore[misc]
    finally:
        torch.set_num_threads(before)
    medians = {key: statistics.median(values) / TOP_K for key, values in seconds.items()}
    size = {
        "bfloat16": 2.0,
        **{kind.name: kind.block_bytes / kind.numbers for kind in kinds},
        "mxfp4": 17 / 32,
        "nvfp4": 9 / 16,
    }
    read = 2 * OUTPUTS * INPUTS / medians["read", 0] / 1e9
    print(f"\n{threads} threads, microseconds a weight (GB/s of stored bytes), median; a sum reads {read:.1f} GB/s")
    print("rows  " + "".join(f"{name:>18}" for name in size))
    for rows in all_rows:
        made = [
            (medians[name, rows], OUTPUTS * INPUTS * each / medians[name, rows] / 1e9) for name, each in size.items()
        ]
        print(f"{rows:4d}  " + "".join(f"{each * 1e6:10.0f} ({rate:5.1f})" for each, rate in made))
