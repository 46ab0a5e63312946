"""Costs of link, host and device: measured on a stand-in with a slow link, and kept."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moetool.caching.policy import build_policy
from moetool.caching.residency import Residency
from moetool.models.checkpoint import Checkpoint
from moetool.models.loading import load_lazy
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


def test_the_costs_of_a_stand_in_are_measured_and_kept(parts: Any) -> None:
    made = split_costs(*parts)
    assert made.load_s > 0.95 * LOAD_S and made.host_s > 0 and made.device_s > 0 and made.layer_s > 0
    assert [rows for rows, _ in made.host_knots] == [rows for rows, _ in made.device_knots] == [4, 16, 64]
    assert len(kept_models()) == 1 and split_costs(*parts) == made
