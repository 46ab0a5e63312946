"""Costs of link and host: measured on a stand-in with a slow link, kept, and measured again where a file is wrong."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moetool.caching.policy import build_policy
from moetool.caching.residency import Residency
from moetool.models.checkpoint import Checkpoint
from moetool.models.loading import load_lazy
from moetool.runtime import split_costs as module
from moetool.runtime.experts.copies import CpuCopies
from moetool.runtime.experts.store import open_store
from moetool.runtime.split_costs import measure, split_costs
from moetool.runtime.warm_start import kept_models
from tests import families
from tests.streams import SlowLink

LOAD_S = 1e-3


class _Link(SlowLink):
    bytes_s = 73_728 / LOAD_S


@pytest.fixture
def parts(reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Model, residency and store beside a stand-in of a device."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("moetool.runtime.experts.copies.CpuCopies", _Link)
    loaded = load_lazy(Checkpoint.open(reference), torch.float32)
    residency = Residency(build_policy("lru", loaded.spec, {}, 6))
    store = open_store(loaded, residency, hosts=True)
    assert not isinstance(store.copies, CpuCopies)
    yield loaded, residency, store
    store.close()
    loaded.close()


def test_experts_with_another_input_than_the_hidden_states_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    families.require_known("nemotron_h")
    families.save("nemotron_h", tmp_path / "latent", moe_latent_size=16)
    monkeypatch.setattr("moetool.runtime.experts.copies.CpuCopies", _Link)
    loaded = load_lazy(Checkpoint.open(tmp_path / "latent"), torch.float32)
    residency = Residency(build_policy("lru", loaded.spec, {}, 6))
    store = open_store(loaded, residency, hosts=True)
    assert loaded.layers[0].form.input_size == 16 != loaded.spec.hidden_size
    assert measure(loaded, residency, store).host_s > 0
    store.close()
    loaded.close()


def test_costs_are_measured_once_and_again_where_the_file_is_wrong(
    parts: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = split_costs(*parts)
    assert made.load_s > 0.95 * LOAD_S and made.host_s > 0 and made.device_s > 0
    assert [rows for rows, _ in made.host_knots] == [rows for rows, _ in made.device_knots] == [4, 16, 64]
    (kept,) = kept_models()
    measured: list[int] = []

    def made_up(*arguments: Any) -> Any:
        measured.append(1)
        return made

    monkeypatch.setattr(module, "measure", made_up)
    assert split_costs(*parts) == made and not measured and not caplog.records
    whole = kept.path.read_text(encoding="utf-8")
    values = json.loads(whole)
    elsewhere = {**values, "measured_on": {**values["measured_on"], "threads": 999}}
    unknown = {**values, "costs": {**values["costs"], "rate": 1.0}}
    impossible = {**values, "costs": {**values["costs"], "load_s": -1.0}}
    wrong = [whole[:100], json.dumps(elsewhere), json.dumps(unknown), json.dumps(impossible), "[]", ""]
    for number, text in enumerate(wrong, start=1):
        kept.path.write_text(text, encoding="utf-8")
        caplog.clear()
        assert split_costs(*parts) == made
        assert len(measured) == number
        assert len(caplog.records) == 1 and str(kept.path) in caplog.text
        assert kept.path.read_text(encoding="utf-8") == whole
