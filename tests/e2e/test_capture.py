"""From the embedded model and prompts to a trace."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moetool.base.errors import CapacityError, UsageError
from moetool.capture.run import Captured, CaptureOptions, RunSetup
from moetool.capture.run import capture as capture_with_options
from moetool.prompts import gather as prompt_sets
from moetool.prompts.gather import Prompt
from moetool.trace.reader import Trace


def capture(model: str, texts: list[Prompt], out: Path, *, overwrite: bool = False, **options: Any) -> Captured:
    if "keep" in options:
        options["keep"] = tuple(options["keep"])
    return capture_with_options(model, texts, out, CaptureOptions(**options), RunSetup(overwrite=overwrite))


def _prompts(count: int, text: str | None = None) -> list[Prompt]:
    if text is None:
        return list(prompt_sets.load(["all"], max_prompts=count))[:count]
    return [Prompt(dataset="d", task="t", prompt_id=str(i), text=text, answer=None) for i in range(count)]


def _rows(trace: Trace, **columns: Any) -> Any:
    from moetool.trace.rows import TokenBatch

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
    assert (made.requests, made.skipped, made.too_long, made.empty) == (2, 1, 1, 0)
    provenance = Trace(tmp_path / "t").manifest["provenance"]
    assert (provenance["skipped"], provenance["too_long"], provenance["empty"]) == (1, 1, 0)
    with pytest.raises(CapacityError, match=r"no prompt fits \(1 in all\)"):
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
