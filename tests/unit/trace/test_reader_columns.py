"""Columns for people: selection scores, float32 logits, norms of expert outputs, text, labels and pairs."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import moetool
from moetool.base import assets
from moetool.base.errors import UsageError
from moetool.capture.run import CaptureOptions, RunSetup, capture
from moetool.models.checkpoint import Checkpoint
from moetool.models.experts.moe_layers import moe_layers
from moetool.prompts import gather
from moetool.report.atlas import atlas_section, draw_atlas
from moetool.report.sample import ReportOptions, read_routes
from moetool.trace.diff import diff
from moetool.trace.edit import split
from moetool.trace.merge import merge
from moetool.trace.reader import Trace
from moetool.trace.rows import EXTRA
from tests import families
from tests.refusals import refused

FOLDER = assets.path("data", "reference-moe")
IDS = [[5, 9, 300, 41, 7, 12, 88, 3]]
ROWS = [
    {"prompt": "2 + 2 =", "label": "sum", "pair": "a"},
    {"prompt": "3 + 3 =", "label": "sum", "pair": "b"},
    {"prompt": "The king said", "label": "story", "pair": "c"},
]


@pytest.fixture(scope="module")
def recorded(full: Any, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Trace:
    out = tmp_path_factory.mktemp("extra") / "t"
    with moetool.record(full.model, out, keep=["logits", *EXTRA], tokenizer=tokenizer), torch.no_grad():
        full.model(torch.tensor(IDS))
    return Trace(out)


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """Of a file with labels and pairs, from a pool of experts."""
    folder = tmp_path_factory.mktemp("labels")
    (folder / "p.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    prompts = gather.load([str(folder / "p.jsonl")])
    options = CaptureOptions(max_new_tokens=4, keep=("topk", *EXTRA), dtype="float32", batch_size=1)
    return Trace(capture("reference", prompts, folder / "t", options).out)


def direct_norms(model: Any) -> np.ndarray:
    """norms_TLK by the expert weights themselves: down(silu(gate x) * up x)."""
    made: list[torch.Tensor] = []

    def before(module: Any, args: tuple[torch.Tensor, ...]) -> None:
        hidden_TD, index_TK = args[:2]
        norms = torch.zeros(index_TK.shape)
        for t, row in enumerate(index_TK.tolist()):
            for k, expert in enumerate(row):
                gate, up = (module.gate_up_proj[expert] @ hidden_TD[t]).chunk(2)
                norms[t, k] = (module.down_proj[expert] @ (torch.nn.functional.silu(gate) * up)).norm()
        made.append(norms)

    handles = [layer.experts.register_forward_pre_hook(before) for layer in moe_layers(model)]
    with torch.no_grad():
        model(torch.tensor(IDS))
    for handle in handles:
        handle.remove()
    return torch.stack(made, dim=1).numpy()


def test_norms_and_saliency_are_those_of_a_direct_computation(full: Any, recorded: Trace) -> None:
    direct = direct_norms(full.model)
    norms = recorded.by_layer("norms").astype(np.float32)
    np.testing.assert_allclose(norms, direct, rtol=1e-3)
    weights, experts = recorded.by_layer("weights").astype(np.float32), recorded.by_layer("experts")
    atlas = draw_atlas(recorded, read_routes(recorded, ReportOptions()))
    for entry in atlas.entries:
        layer = recorded.spec.layer_ids_L.index(entry.layer)
        mine = experts[:, layer] == entry.expert
        assert (entry.saliency is None) == (not mine.any())
        if entry.saliency is not None:
            assert entry.saliency == pytest.approx((weights * direct)[:, layer][mine].mean(), rel=2e-3)
    section = atlas_section(atlas)
    assert section.tables[-1].title == "Least salient experts" and len(section.tables[-1].rows) == 24


def test_norms_from_a_pool_are_those_of_experts_in_memory(captured: Trace, tmp_path: Path) -> None:
    from functools import partial

    from moetool.runtime.assembly import open_pooled

    prompts = gather.load([str(captured.path.parent / "p.jsonl")])
    options = CaptureOptions(max_new_tokens=4, keep=("topk", "norms"))
    setup = RunSetup(open_model=partial(open_pooled, device_memory_bytes=12_000_000))
    pooled = Trace(capture("reference", prompts, tmp_path / "t", options, setup).out)
    assert (pooled.by_layer() == captured.by_layer()).all()
    ours, theirs = (trace.by_layer("norms").astype(np.float32) for trace in (pooled, captured))
    np.testing.assert_allclose(ours, theirs, rtol=2e-3)


def test_float32_logits_and_scores(full: Any, recorded: Trace) -> None:
    wide, narrow = recorded.by_layer("logits32"), recorded.by_layer("logits")
    assert wide.dtype == np.float32 and (wide.astype(np.float16) == narrow).all()
    scores = torch.from_numpy(wide).softmax(dim=-1).numpy()
    np.testing.assert_allclose(recorded.by_layer("scores").astype(np.float32), scores, atol=1e-3)


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "minimax_m2", "ernie4_5_moe"])
def test_scores_rank_as_routers_with_a_correction_bias_do(family: str, tmp_path: Path) -> None:
    families.save(family, tmp_path / "m", n_group=1)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32).eval()
    for name, value in (*model.named_buffers(), *model.named_parameters()):
        if name.endswith("correction_bias"):
            torch.nn.init.normal_(value.data, std=0.5, generator=torch.Generator().manual_seed(1))
    with moetool.record(model, tmp_path / "t", keep=["logits", "scores"]), torch.no_grad():
        model(torch.randint(3, 60, (2, 20), generator=torch.Generator().manual_seed(0)))
    trace = Trace(tmp_path / "t")
    scores, experts = trace.by_layer("scores"), trace.by_layer()
    by_logits = np.sort(np.argsort(-trace.by_layer("logits"), axis=2)[:, :, : experts.shape[2]], axis=2)
    chosen = np.sort(experts, axis=2)
    ranked = np.sort(np.argsort(-scores, axis=2)[:, :, : experts.shape[2]], axis=2)
    assert (ranked == chosen).mean() > 0.99 > (by_logits == chosen).mean()  # near ties meet in float16


def test_text_labels_and_pairs_go_through_capture_and_edits(captured: Trace, tokenizer: Any, tmp_path: Path) -> None:
    captured.verify()
    ids = np.concatenate([rows.token_id_T for rows in captured.batches()])
    assert captured.vocabulary == {token: tokenizer.decode([token]) for token in np.unique(ids).tolist()}
    assert captured.requests["label"].to_pylist() == ["sum", "sum", "story"]
    parts = split(captured, tmp_path / "parts", by="label")
    assert set(parts) == {"sum", "story"} and parts["sum"].requests["pair"].to_pylist() == ["a", "b"]
    whole, _ = merge([parts["sum"], parts["story"]], tmp_path / "whole")
    assert whole.vocabulary == captured.vocabulary and whole.columns == captured.columns
    table = whole.to_pandas()
    assert (table["text"] == table["token_id"].map(captured.vocabulary)).all()
    assert diff(captured, whole).flip_rate == 0
    routes = read_routes(captured, ReportOptions(by="label"))
    assert routes.tasks == ("story", "sum")
    shown = {repr(text)[1:-1] for text in captured.vocabulary.values()}
    found = {lift.name for entry in draw_atlas(captured, routes).entries for lift in entry.tokens}
    assert found and found <= shown


def test_what_cannot_be_kept_is_refused(full: Any, captured: Trace, recorded: Trace, tmp_path: Path) -> None:
    with refused(UsageError, "tokenizer", "record"), moetool.record(full.model, "t", keep=["text"]):
        pass
    with refused(UsageError, "request", "label"):
        split(recorded, tmp_path / "t", by="label")
    assert Checkpoint.open(FOLDER).spec == captured.spec
