"""SMoE's partial forward in a server: what it says, that it changes no bit, and that its log replays."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moetool.base.errors import UsageError
from moetool.base.types import GateEvent
from moetool.caching.devices import open_pool
from moetool.caching.policies import lru, smoe
from moetool.caching.policy import build_policy
from moetool.caching.residency import Residency
from moetool.models.checkpoint import Checkpoint
from moetool.models.loading import load_lazy
from moetool.runtime.experts.copies import CpuCopies
from moetool.runtime.experts.device_stores import open_stores
from moetool.runtime.experts.forward import ExpertRuntime
from moetool.runtime.experts.resident_forward import options_beside_gpu, partial_costs
from moetool.runtime.request import SamplingParams
from moetool.training.predictor import build
from moetool.tuning.replay import ReplaySetup
from tests import families
from tests.engines import engine, generate, require_replayed
from tests.refusals import refused
from tests.streams import SlowLink

LENGTHS = (7, 12, 5, 9)


class Listening(smoe.Policy):
    """SMoE that keeps what it was told of each layer, and of the one after it."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.events: list[GateEvent] = []

    def after_first_expert(self, event: GateEvent) -> Sequence[int]:
        self.events.append(event)
        return super().after_first_expert(event)


@pytest.fixture(scope="module", params=["qwen3_moe", "deepseek_v3", "glm4_moe"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The last two route by sigmoid scores and have shared experts."""
    folder: Path = tmp_path_factory.mktemp(request.param) / "model"
    families.save(request.param, folder, num_hidden_layers=4, n_group=1)
    return folder


def _prompts() -> list[list[int]]:
    return [[(11 * i + 5 * n) % 50 + 3 for i in range(length)] for n, length in enumerate(LENGTHS)]


def _listened(model: Path, slots: int, alpha: float) -> list[GateEvent]:
    options = smoe.Options(predict_from="resident", alpha=alpha)
    policy = Listening(Checkpoint.open(model).spec, options, slots, None)
    made = engine(model, None, policy, slots)
    generate(made, _prompts(), 5)
    made.close()
    return policy.events


def _told(events: list[GateEvent]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Predicted and true scores [T, E] of each layer but the first."""
    pairs = [(one, other) for one, other in pairwise(events) if other.layer == one.layer + 1]
    assert len(pairs) >= 8
    return [(one.resident_TE, other.scores_TE) for one, other in pairs]  # type: ignore[misc]


def _right(events: list[GateEvent]) -> float:
    """Share of the next layer's highest scores that were predicted, over prompts and new tokens."""
    best = [[np.argsort(-scores_TE, axis=1)[:, :2] for scores_TE in pair] for pair in _told(events)]
    return float(np.mean([(said[:, :, None] == true[:, None]).any(2).mean() for said, true in best]))


@pytest.mark.parametrize("pooled", [False, True])
def test_with_every_expert_resident_it_says_what_the_next_router_says(model: Path, pooled: bool) -> None:
    spec = Checkpoint.open(model).spec
    policy = Listening(spec, smoe.Options(predict_from="resident"), spec.total_experts, None)
    warm = engine(model, None, policy, spec.total_experts, pooled=pooled)
    for layer in range(spec.num_layers):
        for expert in range(spec.num_experts_L[layer]):
            assert isinstance(warm.residency, Residency)
            assert warm.residency.load_into_free_slot(spec.expert_key(layer, expert)) is not None
    generate(warm, _prompts(), 4)
    warm.close()
    for said_TE, true_TE in _told(policy.events):
        np.testing.assert_allclose(said_TE, true_TE, rtol=2e-3, atol=2e-3)
    assert _right(_listened(model, 4, 0.0)) < _right(_listened(model, 20, 0.0)) < _right(policy.events)


@pytest.mark.parametrize("pooled", [False, True])
def test_it_changes_no_bit(model: Path, pooled: bool) -> None:
    made = {}
    for look in ("ahead", "resident"):
        for slots in (5, 16):
            served = engine(model, None, "smoe", slots, options={"alpha": 0.0, "predict_from": look}, pooled=pooled)
            made[look, slots] = generate(served, _prompts(), 6)
            assert served.residency.counts.prefetch_loads
            served.close()
    tokens, logits = made["ahead", 5]
    for others, theirs in made.values():
        assert others == tokens
        assert all(torch.equal(one, other) for one, other in zip(logits, theirs, strict=True))


@pytest.mark.parametrize(("slots", "alpha", "pooled"), [(4, 0.0, False), (12, 0.4, True), (18, 0.9, False)])
def test_replay_decides_as_serve_did(model: Path, slots: int, alpha: float, pooled: bool, tmp_path: Path) -> None:
    options = {"alpha": alpha, "predict_from": "resident"}
    made = engine(model, None, "smoe", slots, log=tmp_path / "log", options=options, pooled=pooled)
    for n, prompt in enumerate(_prompts()):
        made.submit(prompt, SamplingParams(max_tokens=3 + 2 * n, ignore_eos=True), lambda output: None)
        made.step()
    while not made.idle:
        made.step()
    trace, row = require_replayed(made, tmp_path / "log", "smoe", slots, ReplaySetup(options={"smoe": options}))
    assert "resident" in trace.columns and trace.resident == 0.0  # those of the server's own cache
    assert row.counts.prefetch_loads or alpha > 0.5


@pytest.mark.follows("moetool.runtime.experts.resident_forward PooledResidentForward.__init__")
def test_where_it_cannot_run_it_is_refused_by_name(model: Path, tmp_path: Path) -> None:
    loaded = load_lazy(Checkpoint.open(model), torch.float32)
    two = [build_policy("smoe", loaded.spec, {"predict_from": "resident"}, 6) for _ in range(2)]
    pool = open_pool(two)
    stores = open_stores(loaded, pool, 1)
    with refused(UsageError, "device's", "pool", "policy.predict_from=ahead"):
        ExpertRuntime(loaded, pool, stores)
    ahead = open_pool([build_policy("smoe", loaded.spec, {"predict_from": "ahead"}, 6) for _ in range(2)])
    ExpertRuntime(loaded, ahead, stores)
    stores.close()
    told = build("resident_forward", loaded.spec).eval()
    with refused(UsageError, "needed before"):
        engine(model, None, "promoe", 8, predictor=told)
    assert options_beside_gpu(smoe.Policy, {}, loaded, 6) == {}  # on a CPU
    families.save("granitemoe", tmp_path / "other", residual_multiplier=0.25)
    other = load_lazy(Checkpoint.open(tmp_path / "other"), torch.float32)
    assert partial_costs(other) is None
    other.close()
    with refused(UsageError, "granitemoe", "layer 1"):
        engine(tmp_path / "other", None, "smoe", 8, options={"predict_from": "resident"})
    loaded.close()


class OwnMemory(CpuCopies):
    """A device that is the CPU: it copies at the speed of its memory, in the calling thread."""

    staged = True


@pytest.mark.parametrize(("link", "bytes_s", "chosen"), [(SlowLink, 1e5, "resident"), (OwnMemory, 1e12, "ahead")])
def test_beside_a_device_measured_costs_choose(
    link: type, bytes_s: float, chosen: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in behind a link on which an expert takes 0.1 s, or next to nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("moetool.runtime.experts.copies.CpuCopies", type("Link", (link,), {"bytes_s": bytes_s}))
    loaded = load_lazy(Checkpoint.open(model), torch.float32)
    measured = partial_costs(loaded)
    assert measured is not None and measured == partial_costs(loaded)  # kept
    assert loaded.files is not None and measured.load_s > 0.9 * loaded.files.stored_bytes / bytes_s
    assert options_beside_gpu(smoe.Policy, {}, loaded, 6) == {"predict_from": chosen}
    assert options_beside_gpu(lru.Policy, {}, loaded, 6) == {}
    loaded.close()
