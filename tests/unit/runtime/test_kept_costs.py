"""Measured costs: kept, and measured again where a file is wrong."""

import json
from contextlib import closing
from pathlib import Path

import pytest
import torch

from moetool.caching.policy import PartialCosts
from moetool.models.checkpoint import Checkpoint
from moetool.models.loading import load_lazy
from moetool.runtime.kept_costs import kept_costs
from moetool.runtime.warm_start import kept_models

COSTS = PartialCosts(load_s=1e-3, layer_s=2e-3)


def test_costs_are_measured_once_and_again_where_the_file_is_wrong(
    reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measured: list[int] = []

    def measure() -> PartialCosts:
        measured.append(1)
        return COSTS

    with closing(load_lazy(Checkpoint.open(reference), torch.float32)) as loaded:
        assert [kept_costs(loaded, PartialCosts, {}, measure) for _ in range(2)] == [COSTS] * 2
        assert len(measured) == 1 and not caplog.records
        (kept,) = kept_models()
        whole = kept.path.read_text(encoding="utf-8")
        values = json.loads(whole)
        elsewhere = {**values, "measured_on": {**values["measured_on"], "threads": 999}}
        unknown = {**values, "costs": {**values["costs"], "rate": 1.0}}
        impossible = {**values, "costs": {**values["costs"], "load_s": -1.0}}
        wrong = [whole[:100], json.dumps(elsewhere), json.dumps(unknown), json.dumps(impossible), "[]", ""]
        for number, text in enumerate(wrong, start=2):
            kept.path.write_text(text, encoding="utf-8")
            caplog.clear()
            assert kept_costs(loaded, PartialCosts, {}, measure) == COSTS
            assert len(measured) == number
            assert len(caplog.records) == 1 and str(kept.path) in caplog.text
            assert kept.path.read_text(encoding="utf-8") == whole
        kept_costs(loaded, PartialCosts, {"part": "another"}, measure)
        assert len(kept_models()) == 2
