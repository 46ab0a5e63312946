"""Cost of recording: `pytest tests/bench/test_capture_cost.py -s`.

1. Time: the embedded model forwards the same prompts with and without recording, in turn, in one process; recording
   includes putting the trace together. Medians of the rounds' ratios, by the clock and by the processor time of all
   threads, which other processes disturb less. At most 1.05 is wanted.
2. Memory: a process of its own captures 200 prompts, another 2,000; how much larger the second one is at its end, once
   Arrow and the C library have given back what was freed, and at its largest, which holds whole row groups only with
   the more prompts.
3. Bytes a token: made-up rows in a model's shape, through the real writers: of the stage, and of the trace. The routes
   are the largest of normal logits, independent from token to token, which is the hardest case for the compression.
"""

import contextlib
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moetool.base import durable
from moetool.base.tables import print_table
from moetool.base.types import ModelSpec, Phase
from moetool.capture.batch_writer import BatchWriter
from moetool.capture.job import CaptureOptions, CapturePlan, plan_capture, row_bytes
from moetool.capture.resume import open_stage
from moetool.capture.run import finish, forward_batches
from moetool.models.checkpoint import Checkpoint
from moetool.models.loading import load_full, parse_dtype
from moetool.prompts.gather import Prompt, load
from moetool.trace.rows import TokenBatch
from moetool.trace.schemas import embedding_schema, token_schema
from moetool.trace.writer import TraceWriter, token_columns

ROUNDS = 5
KEPT = {"topk": ("topk",), "topk,logits": ("topk", "logits"), "topk,embeddings": ("topk", "embeddings")}
LOADS = {"prefill-heavy": (24, 150, 2), "decode-heavy": (8, 8, 64)}
"""Prompts, words of each, new tokens. In a batch of one a third as many."""


def _prompts(count: int, words: int) -> list[Prompt]:
    text = " ".join(prompt.text for prompt in load(["encyclopedia", "narratives", "chat", "exam"])).split()
    assert len(text) > words
    made = []
    for i in range(count):
        start = i * 97 % (len(text) - words)
        made.append(Prompt(dataset="d", task="t", prompt_id=str(i), text=" ".join(text[start : start + words])))
    return made


def _run(plan: CapturePlan, loaded: Any, out: Path, recording: bool) -> None:
    if not recording:
        forward_batches(loaded, plan, range(len(plan.batches)), None)
        return
    with open_stage(out, plan, resume=False, overwrite=True, on_note=lambda note: None) as stage:
        with BatchWriter(stage) as writer:
            forward_batches(loaded, plan, range(len(plan.batches)), writer)
        finish(stage, True, 0.0)


@contextlib.contextmanager
def _little_garbage() -> Iterator[None]:
    """transformers collects garbage whenever a batcher is closed, which takes longer than a small capture."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize("batch_size", [1, 8])
def test_recording_costs_little(batch_size: int, tmp_path: Path) -> None:
    loaded = load_full(Checkpoint.open("reference"), parse_dtype("float32"))
    rows = []
    for load_name, (count, words, new_tokens) in LOADS.items():
        for keep_name, keep in KEPT.items():
            options = CaptureOptions(max_new_tokens=new_tokens, batch_size=batch_size, keep=keep, threads=1)
            plan = plan_capture(
                Checkpoint.open("reference"),
                _prompts(count if batch_size > 1 else count // 3, words),
                options,
                pooled=False,
            )
            pairs: list[tuple[tuple[float, ...], tuple[float, ...]]] = []
            with _little_garbage():
                for i in range(ROUNDS + 1):  # the first one warms up
                    took: dict[bool, tuple[float, ...]] = {}
                    for recording in (False, True)[:: 1 if i % 2 else -1]:
                        began = time.perf_counter(), time.process_time()
                        _run(plan, loaded, tmp_path / "t", recording)
                        ended = time.perf_counter(), time.process_time()
                        took[recording] = tuple(b - a for a, b in zip(began, ended, strict=True))
                    pairs.append((took[False], took[True]))
            tokens = json.loads((tmp_path / "t" / "manifest.json").read_text())["tokens"]
            wall, cpu = ([on[k] / off[k] for off, on in pairs[1:]] for k in (0, 1))
            spread = statistics.quantiles(wall, n=4)
            ratios = [statistics.median(wall), statistics.median(cpu)]
            off_us = 1e6 * statistics.median(off[1] for off, _ in pairs[1:]) / tokens
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
            print(*rows[-1], sep=" | ", flush=True)
    print_table(
        f"recording against the same generation without, batches of {batch_size}, {ROUNDS} paired rounds",
        ["prompts and columns", "tokens", "processor us a token without", "ratio", "quartiles", "by processor time"],
        rows,
    )


CAPTURE = """
import ctypes, json, re, sys
from pathlib import Path
import pyarrow
from moetool.capture.run import CaptureOptions, capture
from moetool.prompts.gather import Prompt

def status(name):
    return int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

def prompt(i):
    return Prompt(dataset="d", task="t", prompt_id=str(i), text=f"What is {i} plus {7 * i}, and why is it not {i * i}?")

count, out = int(sys.argv[1]), Path(sys.argv[2])
options = CaptureOptions(max_new_tokens=2, batch_size=40, threads=1)
capture("reference", map(prompt, range(40)), out.with_name("warm"), options)
made = capture("reference", map(prompt, range(count)), out, options)
pyarrow.default_memory_pool().release_unused()
ctypes.CDLL(None).malloc_trim(0)
print(json.dumps({"resident": status("VmRSS"), "largest": status("VmHWM"), "tokens": made.tokens}))
"""


def test_memory_does_not_grow_with_prompts(tmp_path: Path) -> None:
    found, counts = [], (200, 2000)
    for count in counts:
        command = [sys.executable, "-c", CAPTURE, str(count), str(tmp_path / f"t{count}" / "t")]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found.append(json.loads(done.stdout.splitlines()[-1]))
    rows = [
        [name, *(f"{made[name] / 1e6:,.1f} MB" for made in found), f"{_slope(found, counts, name):,.0f}"]
        for name in ("resident", "largest")
    ]
    print_table("memory of a capture", ["", *(f"{count:,} prompts" for count in counts), "bytes a prompt"], rows)
    assert _slope(found, counts, "resident") < 20_000


def _slope(found: list[dict[str, int]], counts: tuple[int, int], name: str) -> float:
    return (found[1][name] - found[0][name]) / (counts[1] - counts[0])


def test_bytes_a_token(tmp_path: Path) -> None:
    shapes = {"reference": "reference", "Qwen3-30B-A3B": "qwen3-30b-a3b"}
    rows = []
    for name, model in shapes.items():
        spec = Checkpoint.open(model, weights=False).spec
        for keep_name, keep in KEPT.items():
            tokens = 8192 if name == "reference" else 4096
            raw, written = _written(spec, keep, tmp_path / f"{name} {keep_name}", tokens)
            shape = f"{spec.num_layers} x {spec.num_experts}, top-{max(spec.top_k_L)}"
            rows.append([name, shape, keep_name, f"{raw:,}", f"{written:,.0f}"])
    print_table(
        "bytes a token, one token an iteration",
        ["model", "layers x experts", "columns", "staged", "in the trace"],
        rows,
        num_text=3,
    )


def _written(spec: ModelSpec, keep: tuple[str, ...], out: Path, tokens: int) -> tuple[int, float]:
    """Bytes a token as the rows come, and in the trace."""
    draw = np.random.default_rng(0)
    with durable.staged_directory(out) as folder:
        writer = TraceWriter(folder, spec, keep)
        for forward in range(0, tokens, 256):
            rows = _rows(spec, forward, 256, draw)
            writer.append(rows)
            if "embeddings" in keep:
                embedding_ND = draw.normal(size=(256, spec.hidden_size)).astype(np.float32)
                writer.add_embeddings(rows.request_T, rows.iteration_T, embedding_ND)
        writer.add_request(0, dataset="d", task="t", prompt_id="0", prompt_tokens=1, new_tokens=tokens)
        writer.finish(composition={"kind": "sequential"}, provenance={})
    size = sum(file.stat().st_size for file in out.rglob("*.parquet"))
    embedding = row_bytes(embedding_schema(spec)) if "embeddings" in keep else 0
    return row_bytes(token_schema(spec, token_columns(keep), 0)) + embedding, size / tokens


def _rows(spec: ModelSpec, start: int, count: int, draw: np.random.Generator) -> TokenBatch:
    """Decoded tokens of one request, whose experts are the largest of normal logits."""
    logits = draw.normal(size=(count, spec.num_layers, spec.num_experts)).astype(np.float32)
    top_k = max(spec.top_k_L)
    experts = np.argsort(-logits, axis=2)[:, :, :top_k]
    chosen = np.exp(np.take_along_axis(logits, experts, axis=2))
    position = np.arange(start, start + count, dtype=np.int32)
    return TokenBatch(
        request_T=np.zeros(count, np.int32),
        forward_T=position,
        phase_T=np.full(count, Phase.DECODE, np.uint8),
        iteration_T=position,
        position_T=position,
        token_id_T=draw.integers(0, 4096, count).astype(np.int32),
        experts_TS=experts.reshape(count, -1).astype(np.uint16),
        weights_TS=(chosen / chosen.sum(axis=2, keepdims=True)).reshape(count, -1).astype(np.float16),
        logits_TF=logits.reshape(count, -1).astype(np.float16),
    )
