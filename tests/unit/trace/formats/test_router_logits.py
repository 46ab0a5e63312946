"""Router logits as transformers returns them, as arrays of logits, probabilities and sparse weights."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import OlmoeConfig, OlmoeForCausalLM

from moetool.base.errors import MoetoolError, UsageError
from moetool.trace.foreign.importing import import_trace
from moetool.trace.reader import Trace
from tests.refusals import refused

RNG = np.random.default_rng(5)
LOGITS = RNG.normal(size=(6, 3, 8)).astype(np.float32)  # [T, L, E]


def top(values: np.ndarray, top_k: int) -> np.ndarray:
    return torch.topk(torch.from_numpy(values), top_k).indices.numpy()


def test_logits_of_transformers(tmp_path: Path) -> None:
    """A tuple of [B * T, E], one of each layer, saved as it is returned."""
    torch.manual_seed(0)
    config = OlmoeConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=8,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_experts=8,
        num_experts_per_tok=2,
        output_router_logits=True,
    )
    ids = torch.arange(5, 17)[None]
    with torch.no_grad():
        found = OlmoeForCausalLM(config)(ids).router_logits
    torch.save({"router_logits": found, "input_ids": ids}, tmp_path / "f.pt")
    made = import_trace([tmp_path / "f.pt"], None, tmp_path / "t", settings={"top_k": 2})
    assert made.format == "router_logits"
    trace = Trace(tmp_path / "t")
    (rows,) = trace.whole_requests(["logits"])
    assert rows.token_id_T.tolist() == ids[0].tolist() and rows.logits_TF is not None
    for layer, values in enumerate(found):
        expected = values.softmax(-1).topk(2).indices.sort().values
        assert (np.sort(rows.experts_TS[:, 2 * layer : 2 * layer + 2], axis=1) == expected.numpy()).all()
        near = rows.logits_TF[:, 8 * layer : 8 * layer + 8]
        assert np.allclose(near, values.numpy(), atol=2e-3)


@pytest.mark.parametrize("kind", ["logits", "probabilities", "sparse", "bfloat16"])
def test_the_kind_of_the_values_is_found(tmp_path: Path, kind: str) -> None:
    values = LOGITS
    if kind == "bfloat16":
        values = torch.from_numpy(LOGITS).bfloat16().float().numpy()
    probabilities = np.exp(values) / np.exp(values).sum(axis=2, keepdims=True)
    expected = top(values, 2)
    sparse = np.zeros_like(probabilities)
    np.put_along_axis(sparse, expected, np.take_along_axis(probabilities, expected, 2), 2)
    saved: dict[str, Any] = {
        "logits": torch.from_numpy(values),
        "probabilities": torch.from_numpy(probabilities),
        "sparse": torch.from_numpy(sparse),
        "bfloat16": torch.from_numpy(LOGITS).bfloat16(),
    }
    torch.save({"router_logits": saved[kind], **({} if kind == "sparse" else {"topk": 2})}, tmp_path / "f.pt")
    import_trace([tmp_path / "f.pt"], None, tmp_path / "t")
    trace = Trace(tmp_path / "t")
    (rows,) = trace.whole_requests(trace.columns & {"weights", "logits"})
    assert (rows.experts_TS.reshape(6, 3, 2) == expected).all()
    assert ("logits" in trace.columns) == (kind != "sparse") and trace.spec.num_experts == 8
    assert ("weights" in trace.columns) == (kind in ("probabilities", "sparse"))
    if rows.weights_TS is not None:
        assert np.allclose(rows.weights_TS.reshape(6, 3, 2), np.take_along_axis(probabilities, expected, 2), atol=1e-3)


def test_top_k_must_be_known(tmp_path: Path) -> None:
    np.save(tmp_path / "f.npy", LOGITS)
    with refused(UsageError, "top_k"):
        import_trace([tmp_path / "f.npy"], None, tmp_path / "t")


@pytest.mark.parametrize(("at", "wrong"), [(2, np.nan), (2, np.inf), (2, 1e6), (slice(None), -np.inf)])
def test_values_that_no_trace_can_hold_are_refused(tmp_path: Path, at: Any, wrong: float) -> None:
    values = LOGITS.copy()
    values[3, 1, at] = wrong
    np.save(tmp_path / "f.npy", values)
    with refused(MoetoolError, "f.npy") as refusal:
        import_trace([tmp_path / "f.npy"], None, tmp_path / "t", settings={"top_k": 2})
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("kind", ["logits", "probabilities"])
def test_rows_of_zeros_are_padding(tmp_path: Path, kind: str) -> None:
    values = LOGITS
    if kind == "probabilities":
        values = np.exp(LOGITS) / np.exp(LOGITS).sum(axis=2, keepdims=True)
    padded = np.zeros((2, 8, 4, 8), np.float32)  # layer 0 without experts
    padded[0, 2:, 1:], padded[1, :4, 1:] = values, values[:4]
    np.savez(tmp_path / "f.npz", router_logits=padded, topk=2)
    made = import_trace([tmp_path / "f.npz"], None, tmp_path / "t")
    assert any(note.startswith("6 tokens") for note in made.notes)
    trace = Trace(tmp_path / "t")
    assert trace.spec.layer_ids_L == (1, 2, 3)
    assert ("weights" in trace.columns) == (kind == "probabilities")
    for length, rows in zip((6, 4), trace.whole_requests(["logits"]), strict=True):
        assert (rows.experts_TS.reshape(length, 3, 2) == top(LOGITS, 2)[:length]).all()
        expected = LOGITS[:length] if kind == "logits" else np.log(values[:length])
        assert rows.logits_TF is not None
        assert np.allclose(rows.logits_TF.reshape(length, 3, 8), expected, atol=5e-3)
