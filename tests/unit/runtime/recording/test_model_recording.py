"""Recording by context manager, and a trace as arrays: what transformers itself says of the same forwards."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import moetool
from moetool.base import assets
from moetool.base.errors import MismatchError, UsageError
from moetool.trace.reader import Trace
from tests.refusals import refused

FOLDER = assets.path("data", "reference-moe")
TEXTS = ["The quick brown fox jumps over", "2 + 2 ="]


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(FOLDER, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return model, tokenizer


def routes_of(model: Any, ids: list[int]) -> np.ndarray:
    """experts_TLK by the router logits that transformers returns, each token's sorted."""
    with torch.no_grad():
        logits = model(torch.tensor([ids]), output_router_logits=True, use_cache=False).router_logits
    top_k = model.config.num_experts_per_tok
    picked = [torch.topk(layer.reshape(len(ids), -1), top_k, dim=-1).indices.sort(dim=-1).values for layer in logits]
    return torch.stack(picked, dim=1).numpy()


def hooks_of(model: Any) -> int:
    """How many hooks there are; transformers leaves its own where it was asked for router logits."""
    return sum(
        len(vars(module)[name]) for module in model.modules() for name in ("_forward_pre_hooks", "_forward_hooks")
    )


def requests_of(trace: Trace) -> list[Any]:
    trace.verify()
    return list(trace.whole_requests(["weights"]))


def test_generate_is_recorded_as_it_ran(loaded: tuple[Any, Any], tmp_path: Path) -> None:
    model, tokenizer = loaded
    inputs = tokenizer(TEXTS, return_tensors="pt", padding=True)
    plain = model.generate(**inputs, max_new_tokens=5, min_new_tokens=5, do_sample=False)
    hooks = hooks_of(model)
    with moetool.record(model, tmp_path / "t", keep=["topk", "logits", "embeddings"], task="greetings") as running:
        made = model.generate(**inputs, max_new_tokens=5, min_new_tokens=5, do_sample=False)
    assert torch.equal(plain, made) and running.requests == 2
    assert hooks_of(model) == hooks
    trace = moetool.open_trace(str(tmp_path / "t"))
    assert trace.requests["task"].to_pylist() == ["greetings"] * 2
    for row, rows in enumerate(requests_of(trace)):
        prompt = tokenizer(TEXTS[row])["input_ids"]
        ids = [*prompt, *made[row, inputs["input_ids"].shape[1] :].tolist()][:-1]  # the last one is never forwarded
        assert rows.token_id_T.tolist() == ids and rows.position_T.tolist() == list(range(len(ids)))
        assert rows.phase_T.tolist() == [0] * len(prompt) + [1] * 4
        assert rows.iteration_T.tolist() == [0] * len(prompt) + [1, 2, 3, 4]
        found = np.sort(rows.experts_TS.reshape(len(ids), trace.spec.num_layers, -1), axis=2)
        assert (found == routes_of(model, ids)).mean() > 0.999  # a batch sums in another order
    assert len(list(trace.embeddings())) == 2 * 5
    assert trace.spec.revision == moetool.open_trace(tmp_path / "t").spec.revision != "0" * 64


def test_forwards_without_a_cache_are_prompts(loaded: tuple[Any, Any], tmp_path: Path) -> None:
    model, tokenizer = loaded
    ids = tokenizer(TEXTS[0])["input_ids"]
    with torch.no_grad(), moetool.record(model, tmp_path / "t", drop_tokens=True) as running:
        for _ in range(3):
            model(torch.tensor([ids]), use_cache=False)
        running.label("other")
        model(torch.tensor([ids[:3]]), use_cache=False)
    trace = moetool.open_trace(tmp_path / "t")
    assert trace.requests["prompt_tokens"].to_pylist() == [len(ids)] * 3 + [3]
    assert trace.requests["task"].to_pylist() == ["recorded"] * 3 + ["other"]
    experts_TLK = trace.by_layer()
    assert (np.sort(experts_TLK[: len(ids)], axis=2) == routes_of(model, ids)).all()
    assert next(iter(trace.batches())).token_id_T.max() == -1


def test_arrays_and_the_long_form_say_the_same(loaded: tuple[Any, Any], tmp_path: Path) -> None:
    model, tokenizer = loaded
    with torch.no_grad(), moetool.record(model, tmp_path / "t", keep=["topk", "logits"]):
        model(torch.tensor([tokenizer(TEXTS[0])["input_ids"]]), use_cache=False)
    trace = moetool.open_trace(tmp_path / "t")
    experts, weights, logits = (trace.by_layer(name) for name in ("experts", "weights", "logits"))
    tokens, layers, _ = experts.shape
    assert weights.shape == experts.shape and logits.shape == (tokens, layers, trace.spec.num_experts)
    table = trace.to_pandas()
    assert len(table) == experts.size and table["layer"].unique().tolist() == list(trace.spec.layer_ids_L)
    again = table.sort_values(["request", "position", "layer", "rank"])
    assert (again["expert"].to_numpy().reshape(experts.shape) == experts).all()
    assert (again["weight"].to_numpy().reshape(experts.shape) == weights).all()
    with refused(MismatchError, "per-layer", "column"):
        trace.by_layer("phase")


def test_what_cannot_be_recorded_is_refused(loaded: tuple[Any, Any], tmp_path: Path) -> None:
    model, tokenizer = loaded
    inputs = tokenizer([TEXTS[0]], return_tensors="pt")
    with refused(UsageError, "ran", "forward"), moetool.record(model, tmp_path / "t"):
        pass
    with (
        refused(UsageError, "keep", "colours"),
        moetool.record(model, tmp_path / "t", keep=["colours"]),
    ):
        pass
    hooks = hooks_of(model)
    with pytest.raises(ZeroDivisionError), moetool.record(model, tmp_path / "t"):
        model(**inputs)
        _ = 1 / 0
    assert not (tmp_path / "t").exists()
    assert hooks_of(model) == hooks
    with (
        refused(UsageError, "transformers", "model"),
        moetool.record(torch.nn.Linear(1, 1), tmp_path / "t"),
    ):
        pass
