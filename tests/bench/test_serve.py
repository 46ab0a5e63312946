"""Time per token of serving by policy and pool, paired in one run, beside the bound that its bytes set.

    make bench

Prints a table: medians over rounds in which every configuration runs once, so that a slow minute of the machine hits
all of them; ratios to the same engine with every expert in memory; `bound` is the larger and the sum of that engine's
time and of the moved bytes at the read bandwidth measured in the same rounds (what prefetches may reach the one, what
does not prefetch the other).
"""

import statistics
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from moetool import prompts as prompt_sets
from moetool.capture import CaptureOptions, capture
from moetool.predictor import load_predictor
from moetool.tables import print_table
from moetool.training import train
from tests.engines import engine, generate

ROUNDS = 5
NEW_TOKENS = 24
CONFIGURATIONS = [("lru", 256), ("lru", 128), ("lru", 64), ("lru", 32), ("on_demand", 4), ("duoserve", 4)]


def _seconds(run: Any) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def _bandwidth(made: Any) -> float:
    """Bytes a second of reading experts one after the other with the store's own reads."""
    slot = made.store._slots[0]
    keys = range(0, made.spec.total_experts, 2)
    seconds = _seconds(lambda: [made.store.files.read_into(key, slot) for key in keys])
    return len(keys) * made.spec.slot_bytes / seconds


@pytest.fixture
def affinity(tmp_path: Path) -> Any:
    """DuoServe's affinity, counted on other prompts than those served: a predictor that costs next to nothing."""
    texts = [prompt for i, prompt in enumerate(prompt_sets.load(["all"], max_prompts=12)) if i % 12]
    trace = capture("reference", texts, tmp_path / "trace", CaptureOptions(batch_size=8, keep=("topk",))).out
    train("affinity", trace, tmp_path / "predictor")
    return load_predictor(tmp_path / "predictor")


def test_time_per_token(reference: Path, tokenizer: Any, full: Any, affinity: Any) -> None:
    ids = [tokenizer(prompt.text)["input_ids"] for prompt in prompt_sets.load(["all"], max_prompts=1)]
    engines = [engine(reference, tokenizer, name, slots, predictor=affinity) for name, slots in CONFIGURATIONS]
    tokens = len(ids) * NEW_TOKENS
    seconds: dict[int, list[float]] = {i: [] for i in range(len(engines))}
    moved: dict[int, list[float]] = {i: [] for i in range(len(engines))}
    plain: list[float] = []
    bandwidths: list[float] = []

    def plainly() -> None:
        for prompt in ids:
            with torch.inference_mode():
                full.model.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS)

    for _ in range(ROUNDS):
        plain.append(_seconds(plainly) / tokens)
        bandwidths.append(_bandwidth(engines[-1]))
        for i, made in enumerate(engines):
            before = made.metrics()
            spent = _seconds(lambda made=made: [generate(made, [prompt], NEW_TOKENS) for prompt in ids])
            done = made.metrics()
            new = done["tokens_generated"] - before["tokens_generated"]
            seconds[i].append(spent / new)
            moved[i].append((done["bytes_read"] - before["bytes_read"]) / new)
    for made in engines:
        made.close()

    resident = statistics.median(seconds[0])
    bandwidth = statistics.median(bandwidths)
    rows = []
    for i, (name, slots) in enumerate(CONFIGURATIONS):
        megabytes = statistics.median(moved[i]) / 1e6
        io = megabytes * 1e6 / bandwidth
        ratio = statistics.median(a / b for a, b in zip(seconds[i], seconds[0], strict=True))
        bound = f"{max(resident, io) / resident:.2f} to {(resident + io) / resident:.2f}"
        mine = 1000 * statistics.median(seconds[i])
        rows.append([f"{name} {slots}", f"{mine:.2f}", f"{ratio:.2f}", f"{megabytes:.2f}", bound])
    ratio = statistics.median(a / b for a, b in zip(plain, seconds[0], strict=True))
    rows.append(["plain generate", f"{1000 * statistics.median(plain):.2f}", f"{ratio:.2f}", "0.00", ""])
    print_table(
        f"batch 1, {len(ids)} prompts x {NEW_TOKENS} tokens, {ROUNDS} rounds, one thread, "
        f"disk {bandwidth / 1e9:.2f} GB/s, torch {torch.__version__}",
        ["policy and slots", "ms / token", "x resident", "MB / token", "bound (x resident)"],
        rows,
    )
    assert all(value > 0 for values in seconds.values() for value in values)
