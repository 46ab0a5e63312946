"""A policy's learned state survives a restart; another policy's is not taken."""

from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from moetool.base import plugins
from moetool.base.errors import MismatchError, MoetoolError
from moetool.base.types import ModelSpec
from moetool.caching.policy import Policy, build_policy, policy_class
from moetool.caching.residency import Residency
from moetool.runtime.policy_state import restore_state, save_state
from tests.refusals import refused
from tests.synthetic import make_spec, random_stream, run_forwards

LEARNING = ("finemoe", "lfu", "moe_infinity")


def make(name: str, spec: ModelSpec) -> Policy:
    return build_policy(name, spec, {}, 12)


def run(policy: Policy, seed: int) -> Residency:
    residency = Residency(policy)
    stream = list(random_stream(policy.spec, num_requests=4, prompt_tokens=5, new_tokens=6, seed=seed))
    last = {request: i for i, (info, _) in enumerate(stream) for request in info.request_T}
    for i, (info, events) in enumerate(stream):
        run_forwards(residency, [(info, events)])
        for request in sorted(set(info.request_T)):
            if last[request] == i:
                residency.end_request(request)
    return residency


@pytest.mark.parametrize("name", LEARNING)
def test_a_restored_policy_goes_on_where_it_was(name: str, tmp_path: Path) -> None:
    spec = make_spec(layers=3, experts=8, top_k=2)
    first, file = make(name, spec), tmp_path / "state.safetensors"
    run(first, seed=1)
    save_state(file, name, first)
    second, third = make(name, spec), make(name, spec)
    assert restore_state(file, name, second) == [] == restore_state(file, name, third)
    for key, array in first.state().items():
        assert np.array_equal(second.state()[key], array) and array.size
    gone_on = run(second, seed=2).counts
    assert run(third, seed=2).counts == gone_on
    assert run(make(name, spec), seed=2).counts != gone_on  # it matters


def test_another_policys_or_models_state_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "state.safetensors"
    lfu = make("lfu", make_spec(layers=3, experts=8, top_k=2))
    assert restore_state(file, "lfu", lfu) is None
    run(lfu, seed=1)
    save_state(file, "lfu", lfu)
    with refused(MismatchError, "lfu", "moe_infinity"):
        restore_state(file, "moe_infinity", make("moe_infinity", lfu.spec))
    other = ModelSpec.from_json({**lfu.spec.to_json(), "revision": "f" * 64})
    with refused(MismatchError, "lfu", "ffffffffffff"):
        restore_state(file, "lfu", make("lfu", other))
    file.write_bytes(file.read_bytes()[:50])
    with refused(MismatchError, "damaged"):
        restore_state(file, "lfu", lfu)


@pytest.mark.parametrize(
    "residents", [np.array(3), np.array([[1, 2]]), np.array([1.0, 2.0]), np.array([99]), np.array([1, 1])]
)
def test_residents_that_are_no_keys_are_refused(residents: np.ndarray, tmp_path: Path) -> None:
    file = tmp_path / "state.safetensors"
    lfu = make("lfu", make_spec(layers=3, experts=8, top_k=2))
    save_state(file, "lfu", lfu, [1, 2])
    arrays = safetensors.numpy.load_file(file)
    with safetensors.safe_open(file, framework="numpy") as opened:
        metadata = opened.metadata()
    safetensors.numpy.save_file({**arrays, "residents": residents}, file, metadata=metadata)
    with refused(MismatchError, "residents"):
        restore_state(file, "lfu", lfu)


def test_a_failed_save_leaves_the_former_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "state.safetensors"
    lfu = make("lfu", make_spec(layers=3, experts=8, top_k=2))
    run(lfu, seed=1)
    save_state(file, "lfu", lfu)
    former = file.read_bytes()

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with refused(MoetoolError, "No space left"):
        save_state(file, "lfu", lfu)
    assert file.read_bytes() == former and list(tmp_path.iterdir()) == [file]


def test_every_policy_that_learns_is_among_these() -> None:
    learning = {name for name in plugins.names("policy") if policy_class(name).state is not Policy.state}
    assert set(LEARNING) <= learning
