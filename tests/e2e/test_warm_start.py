"""A server begins where the last one of the same model ended, and a file that it cannot use costs one warning."""

import os
import time
from pathlib import Path
from typing import Any

import pytest

from moetool.cli.main import app
from moetool.models.checkpoint import Checkpoint
from moetool.runtime import warm_start
from moetool.runtime.assembly import build_engine
from moetool.runtime.automatic import ServeSetup, choose
from moetool.runtime.budget import divide_with_slots
from moetool.runtime.loop.engine import Engine
from moetool.runtime.request import SamplingParams
from moetool.runtime.serve_options import ServeOptions
from moetool.runtime.warm_start import kept_models

ASKED = "User: What is 12 + 7?\nAssistant:"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "moetool"


def _setup(num_slots: int = 64, **settings: Any) -> ServeSetup:
    checkpoint = Checkpoint.open("reference")
    values = {"kv_tokens": 256, "prefill_chunk": 128, "dtype": "float32", "device": "cpu", **settings}
    memory = divide_with_slots(checkpoint, ServeOptions(kv_tokens=256), num_slots).device_bytes
    return choose(checkpoint, values, device_memory_bytes=memory)


def _policy(setup: ServeSetup) -> tuple[str, str]:
    """Its row of the table of chosen settings."""
    ((value, why),) = [row[1:] for row in setup.choices if row[0] == "policy"]
    return value, why


def _open(policy: str = "foresight, equal slots per layer", **settings: Any) -> Engine:
    checkpoint, setup = Checkpoint.open("reference"), _setup(**settings)
    assert _policy(setup)[0] == policy
    made = build_engine(checkpoint, options=setup.options, policy=setup.policy, device_memory_bytes=setup.budget)
    made.state = "ready"
    return made


def _hit_rate(engine: Engine, num_tokens: int) -> float:
    """Of the forwards of one request, which then ends."""
    engine.submit(
        engine.tokenizer(ASKED)["input_ids"],
        SamplingParams(max_tokens=num_tokens, ignore_eos=True),
        lambda output: None,
    )
    before = engine.residency.counts
    while not engine.idle:
        engine.step()
    now = engine.residency.counts
    needed = now.needed - before.needed
    return (now.kept + now.prefetched - before.kept - before.prefetched) / needed


def test_the_second_start_hits_more_and_can_be_switched_off(cache: Path) -> None:
    first = _open()
    cold = _hit_rate(first, 50)
    _hit_rate(first, 100)
    first.close()
    (kept,) = kept_models()
    assert kept.path.parent == cache and kept.num_bytes == kept.path.stat().st_size
    second = _open()
    warm = _hit_rate(second, 50)
    second.close()
    off = _open(warm_start=False)
    again = _hit_rate(off, 50)
    off.close()
    assert again == cold and warm >= cold + 0.03, (cold, warm)


def test_a_file_that_cannot_be_used_is_ignored_with_a_warning(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = _open()
    _hit_rate(first, 8)
    first.close()
    path = kept_models()[0].path
    good = path.read_bytes()
    for bad in (b"", b"garbage" * 100, good[: len(good) // 2]):
        path.write_bytes(bad)
        caplog.clear()
        engine = _open()
        assert [record.levelname for record in caplog.records if "starts without warm state" in record.message] == [
            "WARNING"
        ]
        assert not engine.residency.slot_of
        engine.close()
        assert path.read_bytes() != bad  # a whole file again


def test_two_servers_of_one_model_leave_one_whole_file(cache: Path) -> None:
    engines = [_open(), _open()]
    for engine in engines:
        _hit_rate(engine, 8)
    for engine in engines:
        engine.close()
    assert [path.name for path in cache.iterdir()] == [kept_models()[0].path.name]
    third = _open()
    assert len(third.residency.slot_of) == 64
    third.close()


def test_the_oldest_files_go_where_the_folder_is_full(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.mkdir()
    for age, name in enumerate(("new", "old")):
        path = cache / f"{name}.warm.safetensors"
        path.write_bytes(bytes(1000))
        os.utime(path, (time.time() - 1000 * (age + 1),) * 2)
    engine = _open()
    _hit_rate(engine, 2)
    size = sum(array.nbytes for array in engine.residency.policy.state().values())
    monkeypatch.setattr(warm_start, "MOST_BYTES", size + 8000)
    engine.close()
    assert {kept.model for kept in kept_models()} >= {"new", "old"}
    monkeypatch.setattr(warm_start, "MOST_BYTES", size + 1500 + 1000)
    engine = _open()
    engine.close()
    assert "old" not in {kept.model for kept in kept_models()}


def test_the_cache_is_listed_and_removed(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache.mkdir()
    for name in ("a", "b"):
        (cache / f"{name}.warm.safetensors").write_bytes(bytes(10))
    app(["cache"], standalone_mode=False)
    printed = capsys.readouterr().out
    assert "a" in printed and "10 B" in printed and str(cache) in "".join(printed.split("\n"))
    app(["cache", "--remove", "a"], standalone_mode=False)
    assert [kept.model for kept in kept_models()] == ["b"]
    (cache / "c.prefixes.partial").write_bytes(bytes(10))  # of a killed server
    app(["cache", "--remove", "all"], standalone_mode=False)
    assert not kept_models() and not list(cache.iterdir())
