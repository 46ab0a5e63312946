"""From the embedded model and prompts to a trace."""

import json
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moetool.base.errors import CapacityError, UsageError
from moetool.base.types import Phase
from moetool.capture.automatic import CaptureMemory
from moetool.capture.job import Item, ReadPrompts, plan_capture
from moetool.capture.resume import open_stage
from moetool.capture.run import Captured, CaptureOptions, RunSetup, finish, open_plan, run_batches
from moetool.capture.run import capture as capture_with_options
from moetool.models.checkpoint import Checkpoint
from moetool.models.loading import load_full
from moetool.prompts import gather as prompt_sets
from moetool.prompts.gather import Prompt
from moetool.runtime.budget import footprint
from moetool.runtime.loop.batching import Batcher
from moetool.runtime.serve_options import ServeOptions
from moetool.runtime.steps.recorded_steps import RecordedSteps
from moetool.trace.reader import Trace
from tests import families
from tests.refusals import refused


def capture(model: str, texts: list[Prompt], out: Path, *, overwrite: bool = False, **options: Any) -> Captured:
    if "keep" in options:
        options["keep"] = tuple(options["keep"])
    return capture_with_options(
        model, texts, out, CaptureOptions(dtype="float32", **options), RunSetup(overwrite=overwrite)
    )


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


def test_the_first_forward_is_reported_by_layer(tmp_path: Path) -> None:
    """It may read every expert, and prompts are long: its end is no time for the first sign of a rate."""
    done: list[tuple[int, int, str]] = []
    options = CaptureOptions(dtype="float32", max_new_tokens=3)
    setup = RunSetup(on_progress=lambda *now: done.append(now))
    made = capture_with_options("reference", _prompts(1), tmp_path / "t", options, setup)
    layers = Trace(tmp_path / "t").spec.num_layers
    shares = [made.prompt_tokens * layer // layers for layer in range(1, layers + 1)]
    assert [now for now, _, _ in done] == [*shares, made.tokens - 1, made.tokens]
    assert all("tokens/s" in note for _, _, note in done)


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
    with refused(CapacityError, "no prompt", "1"):
        capture("reference", _prompts(1, "word " * 2000), tmp_path / "u", max_new_tokens=2)
    assert not (tmp_path / "u").exists()


def test_what_is_there_is_not_replaced_unasked(tmp_path: Path) -> None:
    capture("reference", _prompts(1), tmp_path / "t", max_new_tokens=2)
    before = Trace(tmp_path / "t").sha256
    with refused(UsageError, "exists"):
        capture("reference", _prompts(2), tmp_path / "t", max_new_tokens=2)
    assert Trace(tmp_path / "t").sha256 == before
    capture("reference", _prompts(2), tmp_path / "t", max_new_tokens=2, overwrite=True)
    assert len(Trace(tmp_path / "t").requests) == 2
    replaced = (tmp_path / "t" / "manifest.json").stat().st_ino
    capture(
        "reference", _prompts(2), tmp_path / "t", max_new_tokens=2, overwrite=True
    )  # as asked, although it is equal
    assert (tmp_path / "t" / "manifest.json").stat().st_ino != replaced


def test_prompts_alone_are_forwarded_without_answers(tmp_path: Path) -> None:
    made = capture("reference", _prompts(3), tmp_path / "t", max_new_tokens=0)
    rows = _rows(Trace(tmp_path / "t"))
    assert (made.new_tokens, made.tokens) == (0, made.prompt_tokens) == (0, len(rows))
    assert set(rows.phase_T.tolist()) == {0} == set(rows.iteration_T.tolist())


def test_given_answers_are_recorded_as_if_decoded(tmp_path: Path, full: Any, tokenizer: Any) -> None:
    texts = [Prompt(dataset="d", task="t", prompt_id=str(i), text="12 + 7 =", answer=a) for i, a in enumerate(_ANSWERS)]
    made = capture("reference", texts, tmp_path / "t", answers=True, keep=["logits", "embeddings"])
    trace = Trace(tmp_path / "t")
    rows = _rows(trace, columns=["logits"])
    prompt = tokenizer("12 + 7 =")["input_ids"]
    assert made.prompt_tokens == len(texts) * len(prompt)
    for request, answer in enumerate(_ANSWERS):
        ids = tokenizer(answer or "", add_special_tokens=False)["input_ids"]
        assert trace.requests["new_tokens"].to_pylist()[request] == len(ids)
        mine = rows.select(rows.request_T == request)
        decoded = max(0, len(ids) - 1)
        assert mine.token_id_T.tolist() == [*prompt, *ids[:-1]]
        assert mine.iteration_T.tolist() == [0] * len(prompt) + list(range(1, decoded + 1))
        assert mine.phase_T.tolist() == [0] * len(prompt) + [1] * decoded
        with torch.inference_mode():
            plain = full.model(torch.tensor([mine.token_id_T.tolist()]), output_router_logits=True)
        expected = torch.cat(list(plain.router_logits), dim=1)
        assert torch.allclose(torch.from_numpy(mine.logits_TF).float(), expected, atol=5e-3, rtol=1e-3)
    iterations = {(request, iteration) for request, iteration, _ in trace.embeddings()}
    assert (0, 1) in iterations and max(i for r, i in iterations if r == 2) == 0


_ANSWERS = (" 19 apples", " nineteen and more words", None)


@pytest.mark.parametrize("family", ["mimo_v2_flash", "qwen3_next"])
def test_families_with_their_own_caches_run_in_batches(family: str, tmp_path: Path, reference: Path) -> None:
    families.save(family, tmp_path / "m")
    for file in reference.glob("token*"):
        (tmp_path / "m" / file.name).write_bytes(file.read_bytes())
    vocabulary = json.loads((tmp_path / "m" / "config.json").read_text())["vocab_size"]
    checkpoint = Checkpoint.open(tmp_path / "m")
    items = [
        Item(i, Prompt(dataset="d", task="t", prompt_id=str(i), text=""), array("i", [3 + i] * (2 + i)), 4)
        for i in range(5)
    ]
    assert vocabulary > 8
    found = []
    for size in (1, 5):
        options = CaptureOptions(dtype="float32", batch_size=size, threads=1, max_new_tokens=4)
        plan = plan_capture(checkpoint, ReadPrompts(items, 0, 0, ()), options, pooled=False)
        assert [len(batch) for batch in plan.batches] == ([1] * 5 if size == 1 else [5])
        with open_stage(tmp_path / str(size), plan, resume=False, overwrite=False, on_note=lambda note: None) as stage:
            run_batches(stage, stage.missing(), load_full)
            finish(stage, False, 0.0)
        rows = _rows(Trace(tmp_path / str(size)), columns=["logits"])
        found.append(rows.select(np.lexsort((rows.position_T, rows.request_T))))
    one, together = found
    assert (one.token_id_T == together.token_id_T).all()
    assert (one.experts_TS == together.experts_TS).mean() > 0.99
    assert np.abs(one.logits_TF.astype(np.float32) - together.logits_TF.astype(np.float32)).max() < 5e-3


def test_a_bad_prompt_is_left_out_and_the_others_are_captured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: Any
) -> None:
    """The model embeds one token less than the prompts have."""
    texts = _prompts(3)
    last_L = [max(tokenizer(prompt.text)["input_ids"]) for prompt in texts]
    bad = int(np.argmax(last_L))
    assert last_L.count(last_L[bad]) == 1
    monkeypatch.setattr(Checkpoint, "vocab_size", last_L[bad])
    made = capture("reference", texts, tmp_path / "t", max_new_tokens=2)
    assert (made.requests, made.skipped, len(made.refused)) == (2, 1, 1)
    assert texts[bad].prompt_id in made.refused[0] and str(last_L[bad]) in made.refused[0]
    assert Trace(tmp_path / "t").manifest["provenance"]["refused"] == 1


def test_decoded_rows_of_a_program_are_those_of_the_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep, programs, run, rows = ("topk", "logits", "hidden"), list[int](), RecordedSteps.run, list[Any]()
    options = CaptureOptions(dtype="bfloat16", device="cpu", max_new_tokens=4, threads=1, keep=keep)

    def counted(recorded: RecordedSteps, ids: torch.Tensor, *given: Any) -> torch.Tensor:
        programs.append(ids.shape[1])
        return run(recorded, ids, *given)

    monkeypatch.setattr(RecordedSteps, "run", counted)
    for name in ("program", "modules"):
        made = capture_with_options("reference", _prompts(2), tmp_path / name, options)
        rows.append(_rows(Trace(made.out), columns=("weights", "logits", "hidden")))
        monkeypatch.setattr(Batcher, "record_steps", lambda *given: None)
    decoded = rows[0].phase_T == Phase.DECODE
    assert sum(programs) == decoded.sum() and (rows[0].token_id_T == rows[1].token_id_T).all()
    for column in ("weights_TS", "logits_TF", "hidden_TH"):
        first, second = (getattr(each, column)[decoded].astype(np.float32) for each in rows)
        assert np.abs(first - second).mean() < 0.02 * np.abs(second).mean()


def test_memory_and_composition_are_chosen_and_reused(tmp_path: Path) -> None:
    """With slots for a part of the experts, in batches; a run that is resumed with other memory does as before."""
    texts = _prompts(12)
    checkpoint = Checkpoint.open("reference")
    model = footprint(checkpoint, ServeOptions(dtype="float32"))
    memory = model.dense_bytes + model.kv_token_bytes * 300 + 80 * model.slot_bytes
    options = CaptureOptions(dtype="float32", max_new_tokens=12, threads=1)
    setup = RunSetup(memory=CaptureMemory(device_memory_bytes=memory))
    made = capture_with_options("reference", texts, tmp_path / "a", options, setup)
    composition = Trace(tmp_path / "a").manifest["provenance"]["composition"]
    assert len(composition["sizes"]) > 1 and 2 <= composition["slots"] < checkpoint.spec.total_experts
    assert made.reads is not None and made.reads.experts > composition["slots"]
    assert made.reads.tokens == made.tokens

    plan, chosen = open_plan("reference", texts, tmp_path / "b", options, setup)
    with (
        pytest.raises(KeyboardInterrupt),
        open_stage(tmp_path / "b", plan, resume=False, overwrite=False, on_note=lambda note: None) as stage,
    ):
        run_batches(stage, [1], chosen.open_model)
        raise KeyboardInterrupt
    more = RunSetup(memory=CaptureMemory(device_memory_bytes=2 * memory), resume=True)
    capture_with_options("reference", texts, tmp_path / "b", options, more)
    files = [Trace(tmp_path / name).manifest["files"] for name in ("a", "b")]
    assert files[0] == files[1]
