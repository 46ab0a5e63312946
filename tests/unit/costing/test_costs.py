"""Cost curves and profiles: reading between and beyond the knots, saved, loaded, refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetool.base.errors import MismatchError, UsageError
from moetool.base.machine import Machine
from moetool.costing.costs import ComputeCosts, CostProfile, Curve, LoadCosts
from tests.refusals import refused
from tests.synthetic import make_spec

MACHINE = Machine(
    cpu="one of ours",
    cores=2,
    memory_bytes=2**34,
    amx=False,
    avx512_bf16=True,
    gpu=None,
    gpu_memory_bytes=0,
    system="Linux 6",
    torch="2.13.0",
    transformers="5.23.0",
)


def _line(slope: float, start: float = 0.0) -> Curve:
    return Curve(x=(0.0, 1000.0), y=(start, start + 1000 * slope))


def _compute(dtype: str, expert: float, **changes: Any) -> ComputeCosts:
    flat = Curve(x=(1,), y=(0.001,))
    return replace(
        ComputeCosts(
            device="cpu",
            dtype=dtype,
            threads=2,
            expert=_line(expert),
            attention=flat,
            prompt_attention=flat,
            gate=flat,
            shared=flat,
            dense=None,
            head=flat,
        ),
        **changes,
    )


def make_profile() -> CostProfile:
    """A profile of round numbers: 1e-6 s a byte from disk on one thread, a quarter of that on four."""
    return CostProfile(
        spec=make_spec(),
        config_only=False,
        num_hidden_layers=make_spec().num_layers,
        machine=MACHINE,
        load_average=0.5,
        measured_s=12.25,
        compute=(_compute("float32", 0.002), _compute("bfloat16", 0.001)),
        loads=tuple(
            LoadCosts(tier="disk", threads=threads, direct=True, seconds=_line(1e-6 / threads)) for threads in (1, 4)
        ),
        link=Curve(x=(1, 1e6), y=(0.001, 0.1), residual=0.01, noise=0.2, samples=9),
        peer="there:7000",
    )


def test_a_curve_is_straight_between_its_knots_and_beyond_them() -> None:
    curve = Curve(x=(1, 2, 4), y=(10, 20, 30))
    assert [curve(x) for x in (1, 1.5, 2, 3, 4)] == [10, 15, 20, 25, 30]
    assert curve(8) == 50
    assert curve(0.5) == 5
    assert Curve(x=(3,), y=(7,))(100) == 7


def test_a_curve_never_falls_below_zero_nor_after_its_end() -> None:
    assert Curve(x=(2, 3), y=(1, 5))(1) == 0
    assert Curve(x=(1, 2), y=(5, 4))(1.5) == 4.5
    assert Curve(x=(1, 2), y=(5, 4))(100) == 4


@pytest.mark.parametrize(
    ("x", "y"), [((), ()), ((1,), ()), ((1, 1), (2, 3)), ((2, 1), (2, 3)), ((1, 2), (1, float("nan"))), ((1,), (-1,))]
)
def test_what_is_no_curve_is_refused(x: tuple[float, ...], y: tuple[float, ...]) -> None:
    with pytest.raises(ValueError):
        Curve(x=x, y=y)


def test_a_fit_goes_through_the_medians_with_as_few_knots_as_do() -> None:
    curve = Curve.fit({1: [1, 1, 9], 2: [2], 3: [3.01], 4: [4, 0, 5], 10: [100]})
    assert curve.x == (1, 4, 10)
    assert curve.y == (1, 4, 100)
    assert curve.residual == pytest.approx(0.01 / 3.01)
    assert curve.samples == 1
    assert Curve.fit({5: [2, 4, 8]}) == Curve(x=(5,), y=(4,), noise=0.5, samples=3)


@given(
    st.dictionaries(
        st.integers(1, 10**9), st.lists(st.floats(1e-7, 1e3), min_size=1, max_size=4), min_size=1, max_size=12
    )
)
def test_a_fit_keeps_its_promise(timings: dict[float, list[float]]) -> None:
    import statistics

    curve = Curve.fit(timings)
    assert curve.residual <= 0.02
    for amount, seconds in timings.items():
        assert curve(amount) == pytest.approx(statistics.median(seconds), rel=0.021)


def test_a_profile_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    profile = make_profile()
    profile.save(tmp_path / "p.json")
    assert CostProfile.load(tmp_path / "p.json") == profile


def test_costs_are_found_by_device_data_type_tier_and_threads() -> None:
    profile = make_profile()
    assert profile.on().dtype == "bfloat16"
    assert profile.on("cpu", "float32").expert(3) == pytest.approx(0.006)
    assert [profile.tier("disk", threads).threads for threads in (1, 2, 3, 8)] == [1, 1, 4, 4]
    with refused(MismatchError, "cuda", "float32 on cpu", "bfloat16 on cpu"):
        profile.on("cuda")
    with refused(MismatchError, "pinned", "disk"):
        profile.tier("pinned")


def test_the_bounds_of_one_token_add_up() -> None:
    profile = make_profile()
    spec = profile.spec
    layers, experts = spec.num_layers, sum(spec.top_k_L)
    assert profile.decode_s(100) == pytest.approx(0.001 * (3 * layers + 1) + 0.001 * experts)
    assert profile.load_all_s() == pytest.approx(1e-6 * experts * spec.slot_bytes)
    assert profile.load_all_s(threads=4) == pytest.approx(profile.load_all_s() / 4)
    with_dense = replace(
        profile, num_hidden_layers=layers + 2, compute=(_compute("float32", 0.002, dense=Curve(x=(1,), y=(0.5,))),)
    )
    assert with_dense.decode_s(100) == pytest.approx(0.001 * (3 * layers + 3) + 0.002 * experts + 1.0)


def test_a_profile_serves_every_model_of_its_shape_and_no_other() -> None:
    profile = make_profile()
    profile.check(replace(make_spec(), name="a fine-tune", revision="f" * 64))
    profile.check(make_spec(layers=9))
    with refused(MismatchError, "synthetic", "hidden size 7"):
        profile.check(replace(make_spec(), hidden_size=7))


def test_foreign_and_damaged_profiles_are_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    values = make_profile().to_json()

    def refuses(text: str, *facts: object) -> None:
        path.write_text(text)
        with refused(MismatchError, path, "moetool profile", *facts):
            CostProfile.load(path)

    refuses("{")
    refuses("[]", "JSON object")
    refuses("{}", None, "cost_profile", 1)
    refuses(json.dumps({**values, "kind": "cache_plan"}), "cache_plan")
    refuses(json.dumps({**values, "schema_version": 9}), 9, 1)
    refuses(json.dumps({**values, "colour": 1}), "colour")
    refuses(json.dumps({**values, "link": {"x": [2, 1], "y": [1, 2]}}), "link")
    refuses(json.dumps({**values, "loads": [{"tier": "disk"}]}), "loads.0.threads")
    with refused(UsageError, "no profile"):
        CostProfile.load(tmp_path / "absent.json")
