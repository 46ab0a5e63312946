"""What recording costs: `pytest tests/bench/test_capture_cost.py -s`.

1. Time: the embedded model forwards the same prompts with and without recording, in turn, in one process; recording
   includes putting the trace together. Medians of the rounds' ratios, by the clock and by the processor time of all
   threads, which other processes disturb less. At most 1.05 is wanted.
2. Memory: a process of its own captures 200 and 2,000 prompts; the slope of its resident memory at the end, once the C
   library has given back what was freed.
3. Bytes a token: rows of random numbers in the model's shape, through the real writer. Random logits are the hardest
   case for the compression.
"""

import json
import statistics
import time
from pathlib import Path

import pytest

from moetool.capture import finish, forward_batches
from moetool.capture_plan import CaptureOptions, CapturePlan, plan_capture
from moetool.capture_stage import BatchWriter, open_stage
from moetool.models.loading import load_full, parse_dtype
from moetool.models.spec import locate
from moetool.prompts import Prompt, load
from moetool.tables import print_table

ROUNDS = 7
KEPT = {"topk": ("topk",), "topk,logits": ("topk", "logits"), "topk,embeddings": ("topk", "embeddings")}
LOADS = {"prefill-heavy": (400, 2), "decode-heavy": (8, 96)}
"""Words of each prompt, new tokens."""


def _prompts(count: int, words: int) -> list[Prompt]:
    text = " ".join(prompt.text for prompt in load(["encyclopedia", "narratives", "chat", "exam"])).split()
    assert len(text) > words
    made = []
    for i in range(count):
        start = i * 97 % (len(text) - words)
        made.append(Prompt(dataset="d", task="t", prompt_id=str(i), text=" ".join(text[start : start + words])))
    return made


def _off(plan: CapturePlan, loaded: object) -> None:
    forward_batches(loaded, plan, range(len(plan.batches)), None)


def _on(plan: CapturePlan, loaded: object, out: Path) -> None:
    with open_stage(out, plan, resume=False, overwrite=True, on_note=lambda note: None) as stage:
        with BatchWriter(stage) as writer:
            forward_batches(loaded, plan, range(len(plan.batches)), writer)
        finish(stage, True, 0.0)


@pytest.mark.parametrize("batch_size", [1, 8])
def test_recording_costs_little(batch_size: int, tmp_path: Path) -> None:
    loaded = load_full(locate("reference"), parse_dtype("float32"))
    rows = []
    for load_name, (words, new_tokens) in LOADS.items():
        for keep_name, keep in KEPT.items():
            options = CaptureOptions(max_new_tokens=new_tokens, batch_size=batch_size, keep=keep, threads=1)
            plan = plan_capture("reference", _prompts(8, words), options, pooled=False)
            _off(plan, loaded), _on(plan, loaded, tmp_path / "t")  # warm
            wall: list[tuple[float, float]] = []
            cpu: list[tuple[float, float]] = []
            for i in range(ROUNDS):
                took = {}
                for name in ("off", "on")[:: 1 if i % 2 else -1]:
                    began = time.perf_counter(), time.process_time()
                    _off(plan, loaded) if name == "off" else _on(plan, loaded, tmp_path / "t")
                    took[name] = time.perf_counter() - began[0], time.process_time() - began[1]
                wall.append((took["off"][0], took["on"][0]))
                cpu.append((took["off"][1], took["on"][1]))
            manifest = json.loads((tmp_path / "t" / "manifest.json").read_text())
            tokens = manifest["tokens"]
            ratios = [statistics.median(on / off for off, on in pairs) for pairs in (wall, cpu)]
            spread = statistics.quantiles([on / off for off, on in wall], n=4)
            off_us = 1e6 * statistics.median(off for off, _ in wall) / tokens
            rows.append(
                [
                    f"{load_name}, {keep_name}",
                    f"{tokens:,}",
                    f"{off_us:,.0f}",
                    f"{ratios[0]:.3f}",
                    f"{spread[0]:.3f} to {spread[2]:.3f}",
                    f"{ratios[1]:.3f}",
                ]
            )
    print_table(
        f"recording against the same generation without, batches of {batch_size}, {ROUNDS} paired rounds",
        ["prompts and columns", "tokens", "us a token without", "ratio", "quartiles", "by processor time"],
        rows,
    )
