"""Quick measurements of this machine."""

from pathlib import Path

import pytest

from moetool.costing.estimates import LOAD_PASSES
from moetool.measuring.machine_rates import disk_rates, measured_rates
from moetool.models.checkpoint import Checkpoint


def test_rates_are_plausible_and_leave_nothing_behind(tmp_path: Path) -> None:
    rates, facts = measured_rates("cpu", tmp_path)
    assert 1e8 < rates.memory_bytes_s < 1e12
    assert 1e8 < rates.flops < 1e15
    assert 1e-5 < rates.layer_s < 0.1
    assert 1e6 < rates.disk_bytes_s < 1e11
    assert rates.link_bytes_s == 0
    assert {what for what, _, _ in facts} == {"memory bandwidth", "fixed time per layer", "disk", "loads"}
    assert 1e7 < rates.load_bytes_s < 1e12
    assert not list(tmp_path.iterdir())


def test_experts_that_cannot_be_read_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: object) -> None:
        raise OSError

    monkeypatch.setattr("moetool.measuring.machine_rates.DiskProbe", fail)
    checkpoint = Checkpoint.open("reference")
    files = checkpoint.expert_files()
    try:
        assert disk_rates(tmp_path, None, files) == (1e9, 0.0, f"assumed: {checkpoint.path} cannot be read")
        assert disk_rates(tmp_path, 2e9, files) == (2e9, 0.0, "as given")
    finally:
        files.shards.close()


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates, facts = measured_rates("cpu", tmp_path / "missing")
    assert "assumed" in next(origin for what, _, origin in facts if what == "disk")
    assert rates.disk_bytes_s > 0
    given = measured_rates("cpu", tmp_path, 2.5e9)[0]
    assert given.disk_bytes_s == 2.5e9
    assert given.load_bytes_s == pytest.approx(given.memory_bytes_s / LOAD_PASSES)
