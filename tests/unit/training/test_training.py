"""Held-out requests, refusals, and the files of an interrupted run. Counting only: fitting is a contract test."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from moetool.base import durable
from moetool.base.errors import CapacityError, MismatchError, MoetoolError, UsageError
from moetool.trace.reader import Trace
from moetool.trace.rows import KEEP
from moetool.training.fit_options import FitOptions
from moetool.training.predictor import CARD, WEIGHTS, load_predictor
from moetool.training.training import split_requests, train
from predictors.popularity import Predictor, popularity
from tests.refusals import refused
from tests.synthetic_routes import make_spec, write_trace


def test_split_is_by_request_and_by_task(tmp_path: Path) -> None:
    trace = Trace(write_trace(tmp_path / "trace", num_requests=60, prompt_tokens=2, new_tokens=1))
    split = split_requests(trace, seed=1)
    assert sorted(split.train + split.validation + split.test) == list(range(60))
    assert (len(split.train), len(split.validation), len(split.test)) == (42, 9, 9)
    for part in (split.train, split.validation, split.test):
        share = np.bincount([request % 3 for request in part]) / len(part)  # three tasks, one after the other
        assert share == pytest.approx([1 / 3] * 3, abs=0.12)
    assert split == split_requests(trace, seed=1)
    assert split != split_requests(trace, seed=2)


def test_counts_come_from_training_requests_only(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace")
    card = train("popularity", trace, tmp_path / "out")
    source = Trace(trace)
    routes = np.concatenate([b.experts_TS[np.isin(b.request_T, card["requests"]["train"])] for b in source.batches()])
    expected_LE = popularity(routes.reshape(-1, 4, 2), 8)
    np.testing.assert_array_equal(load_predictor(tmp_path / "out").get_buffer("popularity_LE"), expected_LE)
    assert card["tokens"]["train"] == len(routes)
    assert card["trace"]["sha256"] == source.sha256


def test_card_and_readme_describe_the_predictor(tmp_path: Path) -> None:
    card = train("affinity", write_trace(tmp_path / "trace"), tmp_path / "out", seed=3)
    out = tmp_path / "out"
    assert json.loads((out / CARD).read_text()) == card
    assert card["weights"] == {
        "bytes": (out / WEIGHTS).stat().st_size,
        "sha256": durable.sha256_file(out / WEIGHTS),
    }
    assert card["seed"] == 3
    assert "affinity for synthetic" in (out / "README.md").read_text()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out", "trace"]


@pytest.mark.parametrize("num_requests", [0, 1, 2])
def test_too_few_requests_to_hold_any_out(tmp_path: Path, num_requests: int) -> None:
    trace = write_trace(tmp_path / "trace", num_requests=num_requests, prompt_tokens=4, new_tokens=9)
    with refused(UsageError, num_requests, 13 * num_requests):
        train("popularity", trace, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("num_requests", [1, 2])
def test_one_or_two_requests_are_split_in_time(tmp_path: Path, num_requests: int) -> None:
    trace = write_trace(tmp_path / "trace", num_requests=num_requests, prompt_tokens=8, new_tokens=12)
    card = train("popularity", trace, tmp_path / "out", fit=FitOptions(held_out=0.2))
    parts = {"train": [0, 12], "validation": [12, 16], "test": [16, 20]}
    assert card["in_time"] == {name: {str(r): span for r in range(num_requests)} for name, span in parts.items()}
    assert card["requests"] == {"train": list(range(num_requests)), "validation": [], "test": []}
    assert card["tokens"] == {"train": 12 * num_requests, "validation": 4 * num_requests}
    batches = list(Trace(trace).batches())
    routes = np.concatenate([b.experts_TS[b.position_T < 12] for b in batches])
    expected_LE = popularity(routes.reshape(-1, 4, 2), 8)
    np.testing.assert_array_equal(load_predictor(tmp_path / "out").get_buffer("popularity_LE"), expected_LE)


def test_the_share_that_is_held_out(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace")
    requests = train("popularity", trace, tmp_path / "out", fit=FitOptions(held_out=0.05))["requests"]
    assert {name: len(ids) for name, ids in requests.items()} == {"train": 18, "validation": 1, "test": 1}


def test_a_cut_through_a_prompt_whose_mean_tells_of_the_rest_is_refused(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace", num_requests=1, prompt_tokens=30, new_tokens=2, keep=KEEP)
    with refused(UsageError, "request 0"):
        train("lstm", trace, tmp_path / "out")
    train("affinity", trace, tmp_path / "out")  # looks at no means


def test_too_few_tokens(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace", num_requests=3, prompt_tokens=1, new_tokens=0)
    with refused(UsageError, 1):
        train("popularity", trace, tmp_path / "out")


def test_one_layer_and_unequal_layers_are_refused(tmp_path: Path) -> None:
    one = write_trace(tmp_path / "one", make_spec(num_layers=1))
    with refused(UsageError, 1):
        train("popularity", one, tmp_path / "out")
    spec = dataclasses.replace(make_spec(num_layers=3), num_experts_L=(8, 8, 16))
    unequal = write_trace(tmp_path / "unequal", spec)
    with refused(UsageError, "2 of 8, 2 of 16"):
        train("popularity", unequal, tmp_path / "out")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_epochs": 0}, "fit.max_epochs is 0"),
        ({"max_tokens": 1}, "fit.max_tokens is 1"),
        ({"batch_size": 1}, "fit.batch_size is 1"),
        ({"learning_rate": float("nan")}, "fit.learning_rate is nan"),
        ({"held_out": 0.5}, "fit.held_out is 0.5"),
    ],
)
def test_wrong_arguments(tmp_path: Path, arguments: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        train("popularity", tmp_path / "trace", tmp_path / "out", fit=FitOptions(**arguments))


@pytest.mark.parametrize("allocate", [lambda *_: np.zeros(2**62), lambda *_: bytearray(2**62)])
def test_sizes_that_numpy_or_python_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allocate: Callable[..., object]
) -> None:
    trace = write_trace(tmp_path / "trace")
    large = type("Large", (Predictor,), {"__init__": allocate})
    monkeypatch.setattr("predictors.popularity.Predictor", large)
    with refused(CapacityError, "popularity is too large", "give smaller options"):
        train("popularity", trace, tmp_path / "out")


def test_an_existing_output_is_kept(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace")
    train("popularity", trace, tmp_path / "out")
    with refused(UsageError, "exists"):
        train("affinity", trace, tmp_path / "out")
    assert load_predictor(tmp_path / "out").name == "popularity"
    train("affinity", trace, tmp_path / "out", overwrite=True)
    assert load_predictor(tmp_path / "out").name == "affinity"


def _damage_weights(out: Path) -> None:
    weights = bytearray((out / WEIGHTS).read_bytes())
    weights[-1] ^= 1
    (out / WEIGHTS).write_bytes(weights)


def _edit_card(out: Path, **changes: object) -> None:
    card = json.loads((out / CARD).read_text())
    card.update(changes)
    (out / CARD).write_text(json.dumps({key: value for key, value in card.items() if value is not None}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_damage_weights, "predictor.safetensors is damaged: its sha256 is"),
        (lambda out: (out / WEIGHTS).unlink(), "predictor.safetensors is missing"),
        (lambda out: (out / CARD).unlink(), "it has no card.json"),
        (lambda out: (out / CARD).write_text("{"), "card.json is damaged"),
        (lambda out: (out / CARD).write_bytes(b"\xff\xfe"), "card.json is damaged"),
        (lambda out: (out / CARD).write_text("[]"), "holds no JSON object"),
        (lambda out: _edit_card(out, schema_version=99), "version 99, expected a predictor of version 1"),
        (lambda out: _edit_card(out, kind="trace"), "holds trace"),
        (lambda out: _edit_card(out, requests=None), "it has no requests"),
        (lambda out: _edit_card(out, predictor="popularty"), "did you mean 'popularity'"),
        (lambda out: _edit_card(out, predictor="affinity"), "does not fit this version of affinity"),
        (lambda out: _edit_card(out, options={"depth": 3}), "unknown option"),
        (lambda out: _edit_card(out, spec=make_spec(num_experts=9).to_json()), "does not fit"),
        (lambda out: _edit_card(out, spec={"name": "x"}), "card.json is damaged: model spec: revision: Field required"),
    ],
)
def test_damage_is_refused_in_one_line(tmp_path: Path, damage: Callable[[Path], object], message: str) -> None:
    out = tmp_path / "out"
    train("popularity", write_trace(tmp_path / "trace"), out)
    damage(out)
    with pytest.raises(MismatchError, match=message) as caught:
        load_predictor(out)
    assert "\n" not in str(caught.value)


def test_a_missing_predictor_says_how_to_make_one(tmp_path: Path) -> None:
    with refused(UsageError, "expert_mlp"):
        load_predictor(tmp_path / "nothing")


# ---- faults: every call that changes the disk fails in turn, as if it were the last thing that happened


class _Fault(OSError):
    """The disk is full."""


def _failing(function: Callable, at: int, calls: list[int]) -> Callable:
    def wrapper(*args: object, **kwargs: object) -> object:
        calls[0] += 1
        if calls[0] == at:
            raise _Fault(28, "No space left on device")
        return function(*args, **kwargs)

    return wrapper


WRITES = [
    (Path, "write_text"),
    (Path, "replace"),
    (Path, "rename"),
    (Path, "mkdir"),
    (os, "fsync"),
    ("safetensors.torch", "save_file"),
]


@pytest.mark.parametrize(("owner", "name"), WRITES, ids=[name for _, name in WRITES])
@pytest.mark.parametrize("old", [False, True], ids=["fresh", "overwrite"])
def test_a_failed_write_leaves_the_old_predictor_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: object, name: str, old: bool
) -> None:
    trace, out = write_trace(tmp_path / "trace"), tmp_path / "out"
    failures = 0
    for at in range(1, 20):
        if old:
            train("popularity", trace, out, overwrite=True)
        calls = [0]
        with monkeypatch.context() as patch:
            if isinstance(owner, str):
                import safetensors.torch as owner
            patch.setattr(owner, name, _failing(getattr(owner, name), at, calls))
            try:
                train("affinity", trace, out, overwrite=True)
            except (OSError, MoetoolError):
                failures += 1
        if calls[0] < at:  # every call has failed once
            break
        for folder in tmp_path.glob("out*"):
            if folder != out:
                with pytest.raises(MoetoolError):
                    load_predictor(folder)
        if out.exists():
            assert load_predictor(out).name in ({"popularity", "affinity"} if old else {"affinity"})
        elif old:
            pytest.fail(f"the old predictor is gone after {name} failed for the {at}th time")
    assert failures


_FIT = """
import signal, sys
from pathlib import Path
from moetool.training import fitting
from moetool.training.training import train
from moetool.training.fit_options import FitOptions

signal.signal(signal.SIGINT, signal.default_int_handler)
keep = fitting.BestEpoch.on_train_epoch_end
fitting.BestEpoch.on_train_epoch_end = lambda *args: (keep(*args), print("epoch", flush=True))
fit = FitOptions(max_epochs=100_000, patience=100_000)
train("expert_mlp", Path(sys.argv[1]), Path(sys.argv[2]), fit=fit, overwrite=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGKILL"])
def test_a_killed_fit_leaves_the_old_predictor(tmp_path: Path, name: str) -> None:
    trace, out = write_trace(tmp_path / "trace"), tmp_path / "out"
    train("popularity", trace, out)
    with subprocess.Popen([sys.executable, "-c", _FIT, trace, out], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"epoch\n"
        process.send_signal(signal.Signals[name])
        assert process.wait(timeout=60) != 0
    assert load_predictor(out).name == "popularity"
    with pytest.raises(MoetoolError):
        load_predictor(tmp_path / "out.partial")
    train("affinity", trace, out, overwrite=True)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out", "trace"]


def test_the_learning_rate_rises_and_falls_whatever_the_number_of_steps() -> None:
    from moetool.training.fitting import share_of_rate

    for epochs in range(1, 60):
        rates = [share_of_rate(step, 7, 7 * epochs) for step in range(7 * epochs)]
        assert all(0 < rate <= 1 for rate in rates)
        assert max(rates) == 1
        peak, end = rates.index(1), len(rates) - rates[::-1].index(1)
        assert rates[:peak] == sorted(rates[:peak])
        assert set(rates[peak:end]) == {1}
        assert rates[end:] == sorted(rates[end:], reverse=True)
        assert len(rates) - end >= 7 * min(20, epochs // 2) - 1  # a long descent, however large the budget


def test_the_fit_slows_where_the_validation_loss_has_stopped_falling() -> None:
    from moetool.training.fitting import BestEpoch

    best, module = BestEpoch(4), SimpleNamespace(predictor=torch.nn.Linear(1, 1), slower=1.0)
    slowed = []
    for loss in (3.0, 2.0, 2.5, 2.5, 1.0, 1.5, 1.5, 1.5, 1.5):
        trainer = SimpleNamespace(callback_metrics={"loss": 1.0, "validation_loss": loss})
        best.on_train_epoch_end(trainer, module)
        slowed.append(round(module.slower, 3))
    assert slowed == [1, 1, 1, 0.3, 0.3, 0.3, 0.09, 0.09, 0.027]
    assert best.epoch == 4


@pytest.mark.parametrize(("patience", "stopped_by"), [(1, "validation"), (2, "max_epochs")])
def test_the_card_says_what_ended_a_fit_of_two_epochs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patience: int, stopped_by: str
) -> None:
    """The loss never falls, so that a patience of one epoch runs out at the last one."""
    from predictors.expert_mlp import Predictor

    monkeypatch.setattr(Predictor, "loss", lambda self, *_: 1.0 + 0.0 * sum(p.sum() for p in self.parameters()))
    trace = write_trace(tmp_path / "trace", keep=KEEP)
    fit = train("expert_mlp", trace, tmp_path / "out", fit=FitOptions(max_epochs=2, patience=patience))["fit"]
    assert (fit["epochs"], fit["stopped_by"]) == (2, stopped_by)
