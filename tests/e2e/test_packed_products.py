"""Experts of four bits served as they are packed: the same bits under every budget and policy, and the model's own."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from moetool.bench.rounded_checkpoint import rounded_checkpoint
from moetool.caching._policy import build_policy
from moetool.caching._residency import Residency
from moetool.models.checkpoint import Checkpoint
from moetool.models.loading import load_lazy
from moetool.models.packed import PackedWeight, Scheme
from moetool.models.packed_product import tile_rows
from moetool.runtime.expert_forward import ExpertRuntime
from moetool.runtime.expert_store import ExpertStore
from moetool.types import ForwardInfo, Phase
from tests.engines import Chaos

pytestmark = pytest.mark.skipif(not tile_rows(), reason="torch has no kernel for four bits on this processor")


@pytest.fixture(scope="module")
def rounded(reference: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model with experts rounded to nearest."""
    path = tmp_path_factory.mktemp("rounded") / "model"
    shutil.copytree(reference, path)
    made = rounded_checkpoint(Checkpoint.open(path), Scheme(group=64))
    assert rounded_checkpoint(Checkpoint.open(path), Scheme(group=64)) == made  # found again
    return made


def _logits(path: Path, slots: int, *, dtype: torch.dtype, products: bool, seed: int | None = None) -> Any:
    """The logits of one prompt and of three tokens more, out of a pool of so many slots."""
    loaded = load_lazy(Checkpoint.open(path), dtype, products=products)
    assert loaded.files is not None
    policy = build_policy("lru", loaded.spec, {}, slots) if seed is None else Chaos(loaded.spec, slots, seed)
    store = ExpertStore(loaded.files, slots)
    runtime = ExpertRuntime(loaded, Residency(policy), store)
    made, cache = [], None
    try:
        with torch.inference_mode():
            for number, ids in enumerate([[5, 77, 1210, 9, 400, 3, 871], [12], [905], [31]]):
                begun = 6 + number if number else 0
                info = ForwardInfo(
                    forward_id=number,
                    request_T=(0,) * len(ids),
                    phase_T=(Phase.DECODE if number else Phase.PREFILL,) * len(ids),
                    position_T=tuple(range(begun, begun + len(ids))),
                )
                runtime.begin_forward(info)
                output = loaded.model(torch.tensor([ids]), past_key_values=cache, use_cache=True)
                runtime.end_forward()
                cache = output.past_key_values
                made.append(output.logits[0])
        held = store.ready(3, 0)
        assert all(isinstance(weight, PackedWeight) for weight in held)
        tiles = {block.tile for weight in held if isinstance(weight, PackedWeight) for block in weight.blocks}
        assert tiles == {tile_rows() if products and dtype == torch.bfloat16 else 0}
        return torch.cat(made)
    finally:
        runtime.close()
        loaded.files.shards.close()


def test_no_budget_and_no_policy_changes_a_bit(rounded: Path) -> None:
    whole = _logits(rounded, 256, dtype=torch.bfloat16, products=True)
    for slots, seed in ((40, None), (9, 2)):
        assert torch.equal(_logits(rounded, slots, dtype=torch.bfloat16, products=True, seed=seed), whole)


def test_they_come_as_near_to_the_model_as_unpacked_weights(rounded: Path) -> None:
    """In float32 nothing is multiplied packed; in bfloat16 both ways are as far from that as its own rounding."""
    exact, same = (_logits(rounded, 256, dtype=torch.float32, products=products) for products in (False, True))
    assert torch.equal(same, exact)
    packed, unpacked = (_logits(rounded, 256, dtype=torch.bfloat16, products=p) for p in (True, False))
    assert not torch.equal(packed, unpacked)
    errors = [float((found.float() - exact).norm() / exact.norm()) for found in (packed, unpacked)]
    assert errors[0] < 1.1 * errors[1] < 0.05
