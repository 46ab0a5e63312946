"""Memory goes to what is expected to save the most reads: expert slots or the KV cache."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from moetool.caching.layer_slots import equal_slots
from moetool.caching.policy import build_policy
from moetool.caching.residency import Residency
from moetool.models.checkpoint import Checkpoint
from moetool.runtime.automatic import choose
from moetool.runtime.expected_reads import (
    LEAST_TOKENS,
    PUBLISHED,
    ExpectedSplit,
    MissCurve,
    best_split,
    expected_loads,
    miss_curve,
    nearest_curve,
    published_curves,
)
from moetool.runtime.memory_share import fixed_share, flexible_share
from moetool.runtime.sizing import Footprint, divide
from moetool.runtime.warm_start import WarmStart, kept_routes
from tests.synthetic import DEEPSEEK_V2_LITE, make_forward, make_spec, run_forwards

MODEL = replace(DEEPSEEK_V2_LITE, dense_bytes=1_000_000_000)
MEMORY = 9 * 10**9


def best(model: Footprint = MODEL, curve: MissCurve = PUBLISHED, longest: int = 8192, **lend: bool) -> ExpectedSplit:
    share = partial(flexible_share, model, **lend) if lend else fixed_share
    return best_split(model, MEMORY, kv_tokens=None, chunk_tokens=None, longest=longest, curve=curve, share=share)


@pytest.mark.parametrize("lend", [{}, {"chunk": True, "cache": True}], ids=str)
def test_no_other_size_of_the_cache_is_expected_to_read_clearly_less(lend: dict[str, bool]) -> None:
    found = best(**lend)
    for tokens in range(1024, 8193, 512):
        split = divide(MODEL, MEMORY, kv_tokens=tokens)
        share = flexible_share(MODEL, split, **lend) if lend else fixed_share(split)
        assert found.loads <= 1.021 * expected_loads(MODEL, split, share, PUBLISHED, 8192)
    assert {tokens for tokens, _ in found.others} == {1024, 8192}


def test_the_cache_is_smaller_where_slots_are_worth_more_and_larger_where_it_borrows() -> None:
    usual = best().split.kv_tokens
    assert 1024 < usual < 8192 == best(chunk=True, cache=True).split.kv_tokens
    useless = MissCurve(shares=(0, 1), loads=(0.5, 0.5), source="")
    assert best(curve=useless).split.kv_tokens > usual
    steep = MissCurve(shares=(0, 0.3, 1), loads=(1, 0, 0), source="")
    assert best(curve=steep).split.kv_tokens < usual
    assert best(replace(MODEL, kv_token_bytes=20_000)).split.kv_tokens > usual
    assert best(longest=2048).split.kv_tokens <= 2048


def test_conversations_are_no_longer_than_the_context() -> None:
    short = replace(MODEL, max_context=2048)
    assert best(short, longest=8192) == best(short, longest=2048)
    assert best(short, longest=8192).loads < best(longest=8192).loads


def test_a_curve_from_kept_routes_is_that_of_a_replay() -> None:
    spec, draw = make_spec(layers=3, experts=16, top_k=2), np.random.default_rng(1)
    likely = (draw.dirichlet(np.full(16, 0.3), size=3) + 0.01) / 1.16
    experts_TLK = np.array([[draw.choice(16, 2, replace=False, p=p) for p in likely] for _ in range(400)])
    routes_NP = (experts_TLK + 16 * np.arange(3)[None, :, None]).reshape(400, 6)
    curve = miss_curve(spec, routes_NP)
    assert curve is not None and list(curve.loads) == sorted(curve.loads, reverse=True)
    assert curve.at(0) == 1 and curve.at(1) == 0
    for slots in (12, 24):
        residency = Residency(build_policy("lru", spec, {}, slots), layer_slots=equal_slots(spec, slots))
        for token in range(400):
            if token == 100:
                before = residency.counts
            run_forwards(residency, [make_forward(spec, experts_TLK[None, token], forward_id=token)])
        counts = residency.counts - before
        assert curve.at(slots / 48) == pytest.approx(counts.loads / counts.needed, abs=0.01)
    assert miss_curve(spec, routes_NP[: LEAST_TOKENS - 1]) is None
    assert miss_curve(spec, np.full((400, 6), -1)) is None


def test_the_table_says_what_is_expected_and_by_which_routes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    checkpoint = Checkpoint.open("reference")
    values, memory = {"device": "cpu", "dtype": "float32"}, 12_000_000

    def rows(**more: object) -> dict[str, tuple[str, str]]:
        made = choose(checkpoint, {**values, **more}, device_memory_bytes=memory)
        return {name: (value, why) for name, value, why in made.choices}

    first = rows()
    assert first["expected reads"][0].endswith("a turn")
    assert first["expected reads"][1].endswith("misses of DeepSeek-V2-Lite's routes")
    assert first["KV cache"][1] == "largest within 2 % of the fewest expected reads"
    assert "expected reads" not in rows(kv_tokens=512) and rows(kv_tokens=512)["KV cache"] == ("512 tokens", "as set")

    spec, draw = checkpoint.spec, np.random.default_rng(2)
    chosen_LK = [[draw.permutation(spec.num_experts)[:k] for k in spec.top_k_L] for _ in range(LEAST_TOKENS)]
    routes_NP = (np.array(chosen_LK) + spec.num_experts * np.arange(spec.num_layers)[:, None]).reshape(LEAST_TOKENS, -1)
    learned = SimpleNamespace(spec=spec, state=lambda: {"path_RP": routes_NP}, restore=lambda state: None)
    assert kept_routes(spec) is None
    kept = WarmStart(spec, "foresight", learned, lambda: [])
    kept.save()
    found_NP = kept_routes(spec)
    assert found_NP is not None and np.array_equal(found_NP, routes_NP)
    assert rows()["expected reads"][1].endswith("misses of this model's last tokens")
    assert rows(warm_start=False)["expected reads"] == first["expected reads"]
    kept.path.write_bytes(kept.path.read_bytes()[:100])
    assert kept_routes(spec) is None and rows()["expected reads"] == first["expected reads"]


def test_published_curves_fall_from_one_to_zero_and_the_nearest_has_like_experts() -> None:
    curves = published_curves()
    assert len(curves) == 3
    for curve in curves:
        assert (curve.at(0), curve.at(1)) == (1, 0)
        assert list(curve.loads) == sorted(curve.loads, reverse=True)
    assert "gpt-oss-20b" in nearest_curve(make_spec(2, 32, 4)).source
    assert "deepseek-v2-lite" in nearest_curve(make_spec(2, 60, 4)).source
    assert "qwen3-30b-a3b" in nearest_curve(make_spec(2, 256, 8)).source
    known = next(curve for curve in curves if "deepseek" in curve.source)
    for share in PUBLISHED.shares:  # an earlier replay of the same routes by another command
        assert known.at(share) == pytest.approx(PUBLISHED.at(share), abs=0.02)
