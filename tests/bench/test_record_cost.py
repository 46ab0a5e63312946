"""Cost of `moetool.record`: `pytest tests/bench/test_record_cost.py -s`.

The embedded model generates from the same prompts with and without recording, in turn, in one process; recording
includes writing the trace. Medians of the rounds' ratios, by the clock and by the processor time of all threads, which
other processes disturb less. At most 1.05 is wanted, of blocks that run for seconds; what a block costs besides (it
identifies the checkpoint, and puts the trace together) is shown in milliseconds.
"""

import statistics
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import moetool
from moetool.base import assets
from moetool.base.tables import print_table
from moetool.prompts.gather import load

ROUNDS = 7
LOADS = {"prefill-heavy": (8, 2, 12), "decode-heavy": (4, 64, 3)}
"""Rows of the batch, new tokens, calls of generate in one block."""


@pytest.mark.slow
@pytest.mark.parametrize("kept", [("topk",), ("topk", "logits")])
def test_record_cost(tmp_path: Path, kept: tuple[str, ...]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = assets.path("data", "reference-moe")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    texts = [prompt.text for prompt in load(["encyclopedia"])]
    rows = []
    for name, (size, new, calls) in LOADS.items():
        inputs = tokenizer([text * 3 for text in texts[:size]], return_tensors="pt", padding=True)

        def run(inputs: Any = inputs, new: int = new, calls: int = calls) -> None:
            for _ in range(calls):
                model.generate(**inputs, max_new_tokens=new, min_new_tokens=new, do_sample=False)

        def timed(recording: bool, run: Any = run) -> tuple[float, float]:
            start = time.perf_counter(), time.process_time()
            if recording:
                with moetool.record(model, tmp_path / "t", keep=kept, overwrite=True):
                    run()
            else:
                run()
            return time.perf_counter() - start[0], time.process_time() - start[1]

        timed(True)
        start = time.perf_counter()
        with moetool.record(model, tmp_path / "t", keep=kept, overwrite=True), torch.no_grad():
            model(inputs["input_ids"][:1, :2])
        block_ms = (time.perf_counter() - start) * 1e3
        ratios = []
        for _ in range(ROUNDS):
            plain, recorded = timed(False), timed(True)
            ratios.append((recorded[0] / plain[0], recorded[1] / plain[1]))
        clock, processor = (statistics.median(column) for column in zip(*ratios, strict=True))
        rows.append([name, ",".join(kept), f"{clock:.3f}", f"{processor:.3f}", f"{block_ms:.0f}"])
    print_table("with over without recording", ["load", "kept", "clock", "processor", "ms a block"], rows)
