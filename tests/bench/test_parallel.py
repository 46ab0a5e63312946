"""Expert parallelism on ranks of this machine: tokens are asserted, seconds are printed.

python -m pytest tests/bench/test_parallel.py -m '' -s
"""

import statistics
import time
from pathlib import Path
from typing import Any

import pytest

from moetool.cluster.launch import ClusterAddress
from moetool.cluster.parallel.rank_launch import RankProcesses
from tests.ranks import Answers, open_head


@pytest.mark.slow
@pytest.mark.parametrize("emulated", [{"link_bytes_s": 20e6}, {}], ids=["links", "cores"])
def test_micro_batches(emulated: dict[str, float], reference: Path, tokenizer: Any) -> None:
    """Nine prompts of 200 tokens on three ranks, in whole and in halves by turns."""
    text = tokenizer("the king of the old house said that seven great rivers return to the sea " * 20)["input_ids"]
    prompts = [[(token + 7 * n) % 4000 for token in text[:200]] for n in range(9)]
    options = {"seats": 3, "kv_tokens": 4096, "timeout_s": 60.0, "max_prompt_wait_s": 0.0, **emulated}
    heads = []
    try:
        for parts in (1, 2):
            launcher = RankProcesses(ClusterAddress(count=3), [f"rank {n}" for n in range(3)], threads=1)
            heads.append(open_head(reference, tokenizer, launcher=launcher, micro_batches=parts, **options))
        taken: list[list[float]] = []
        found: list[list[list[int]]] = []
        for _ in range(8):
            taken.append([])
            for head in heads:
                answers, began = Answers(head), time.perf_counter()
                found.append(answers.wait([answers.ask(prompt, 1) for prompt in prompts], 300))
                taken[-1].append(time.perf_counter() - began)
        assert all(tokens == found[0] for tokens in found)
    finally:
        for head in heads:
            head.close()
    whole, halves = (statistics.median(each) for each in zip(*taken[1:], strict=True))
    ratio = statistics.median(two / one for one, two in taken[1:])
    print(f"whole {whole:.3f} s, in halves {halves:.3f} s, ratio in rounds {ratio:.2f}")
