"""From the embedded model and prompts to a trace, and what is left when that is broken off."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moetool import prompts as prompt_sets
from moetool.capture import Captured, CaptureOptions
from moetool.capture import capture as capture_with_options
from moetool.errors import CapacityError, MoetoolError, UsageError
from moetool.prompts import Prompt
from moetool.trace import Trace
from tests.faults import every_fault


def capture(model: str, texts: list[Prompt], out: Path, *, overwrite: bool = False, **options: Any) -> Captured:
    if "keep" in options:
        options["keep"] = tuple(options["keep"])
    return capture_with_options(model, texts, out, CaptureOptions(**options), overwrite=overwrite)


def _prompts(count: int, text: str | None = None) -> list[Prompt]:
    if text is None:
        return list(prompt_sets.load(["all"], max_prompts=count))[:count]
    return [Prompt(dataset="d", task="t", prompt_id=str(i), text=text, answer=None) for i in range(count)]


def _rows(trace: Trace, **columns: Any) -> Any:
    from moetool.trace import TokenBatch

    return TokenBatch.concatenate(list(trace.batches(**columns)))


def test_a_trace_has_the_prefill_and_decode_of_every_prompt(tmp_path: Path, full: Any, tokenizer: Any) -> None:
    texts = _prompts(5)
    made = capture(
        "reference", texts, tmp_path / "t", max_new_tokens=6, batch_size=2, keep=["logits", "embeddings", "hidden"]
    )
    trace = Trace(tmp_path / "t")
    trace.verify()
    assert (made.requests, trace.num_tokens) == (5, made.tokens)
    assert made.tokens == made.prompt_tokens + made.new_tokens - 5
    rows = _rows(trace, columns=["weights", "logits", "hidden"])
    embeddings = {(request, iteration): e for request, iteration, e in trace.embeddings()}
    for request, prompt in enumerate(texts):
        mine = rows.select(rows.request_T == request)
        ids = tokenizer(prompt.text)["input_ids"]
        with torch.inference_mode():
            answer = full.model.generate(torch.tensor([ids]), max_new_tokens=6, do_sample=False)[0].tolist()
            plain = full.model(torch.tensor([answer[:-1]]), output_router_logits=True)
        assert mine.token_id_T.tolist() == answer[:-1]
        assert mine.position_T.tolist() == list(range(len(answer) - 1))
        assert mine.iteration_T.tolist() == [0] * len(ids) + list(range(1, len(answer) - len(ids)))
        for layer, logits_TE in enumerate(plain.router_logits):
            found = torch.from_numpy(mine.logits_TF[:, 32 * layer : 32 * (layer + 1)]).float()
            assert torch.allclose(found, logits_TE, atol=5e-3, rtol=1e-3)
        table = full.model.get_input_embeddings().weight
        mean = table[torch.tensor(ids)].mean(0).detach().numpy()
        assert np.allclose(embeddings[request, 0], mean, atol=1e-3)
        assert np.allclose(embeddings[request, 1], table[answer[len(ids)]].detach().numpy(), atol=1e-3)


def test_the_same_capture_gives_the_same_rows(tmp_path: Path) -> None:
    for name in ("a", "b"):
        capture("reference", _prompts(4), tmp_path / name, max_new_tokens=4, batch_size=2)
    files = [json.loads((tmp_path / name / "manifest.json").read_text())["files"] for name in ("a", "b")]
    assert files[0] == files[1]


def test_batches_of_any_size_give_the_same_experts(tmp_path: Path) -> None:
    one, four = (
        _rows(Trace(capture("reference", _prompts(6), tmp_path / str(size), max_new_tokens=4, batch_size=size).out))
        for size in (1, 4)
    )
    order = [np.lexsort((rows.position_T, rows.request_T)) for rows in (one, four)]
    assert (one.experts_TS[order[0]] == four.experts_TS[order[1]]).mean() > 0.999


def test_prompts_that_do_not_fit_are_left_out_and_counted(tmp_path: Path) -> None:
    made = capture("reference", [*_prompts(2), *_prompts(1, "word " * 2000)], tmp_path / "t", max_new_tokens=2)
    assert (made.requests, made.skipped) == (2, 1)
    with pytest.raises(CapacityError, match="none of 1 prompts fits"):
        capture("reference", _prompts(1, "word " * 2000), tmp_path / "u", max_new_tokens=2)
    assert not (tmp_path / "u").exists()


def test_what_is_there_is_not_replaced_unasked(tmp_path: Path) -> None:
    capture("reference", _prompts(1), tmp_path / "t", max_new_tokens=2)
    before = Trace(tmp_path / "t").sha256
    with pytest.raises(UsageError, match="exists already"):
        capture("reference", _prompts(2), tmp_path / "t", max_new_tokens=2)
    assert Trace(tmp_path / "t").sha256 == before
    capture("reference", _prompts(2), tmp_path / "t", max_new_tokens=2, overwrite=True)
    assert len(Trace(tmp_path / "t").requests) == 2


def test_a_fault_at_any_write_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "t"

    def check() -> None:
        if out.exists():  # only the sync after the rename can fail with the trace in place, and then it is whole
            Trace(out).verify()
            (tmp_path / "done").mkdir(exist_ok=True)
            out.rename(tmp_path / "done" / str(time.monotonic_ns()))

    count = every_fault(lambda: capture("reference", _prompts(1), out, max_new_tokens=2), check, monkeypatch)
    assert count >= 8
    assert Trace(out).num_tokens > 0


def test_a_fault_while_overwriting_leaves_the_old_trace_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "t"
    capture("reference", _prompts(1), out, max_new_tokens=2)

    def run() -> None:
        capture("reference", _prompts(2), out, max_new_tokens=2, overwrite=True)

    every_fault(run, lambda: Trace(out).verify(), monkeypatch)
    assert len(Trace(out).requests) == 2


@pytest.mark.slow
@pytest.mark.parametrize("delay_s", [0.5, 1.5, 3.0])
def test_a_real_kill_leaves_nothing_that_is_accepted(delay_s: float, tmp_path: Path) -> None:
    out = tmp_path / "t"
    command = [sys.executable, "-m", "moetool.cli", "capture", "reference", "--data", "all", "--out", str(out)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ})
    partial = tmp_path / "t.partial"
    while not (partial / "tokens").exists():  # past the imports
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        time.sleep(0.01)
    time.sleep(delay_s)
    process.send_signal(signal.SIGKILL)
    process.wait()
    with pytest.raises(MoetoolError):
        Trace(out)
    with pytest.raises(MoetoolError):
        Trace(partial)
    capture("reference", _prompts(1), out, max_new_tokens=2)
    assert not partial.exists()
    Trace(out).verify()
