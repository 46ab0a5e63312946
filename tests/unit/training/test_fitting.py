"""Checkpoints, logs and Trainer arguments of a fit: a killed fit resumes to the same weights."""

import csv
from pathlib import Path
from typing import Any

import pytest
import torch

from moetool.base.errors import MismatchError, UsageError
from moetool.trace.rows import KEEP
from moetool.training import fitting
from moetool.training.fit_options import FitOptions
from moetool.training.fit_trainer import CHECKPOINT
from moetool.training.training import train
from tests.refusals import refused
from tests.synthetic_routes import write_trace


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_trace(tmp_path_factory.mktemp("fitting") / "trace", keep=KEEP)


def _options(**more: Any) -> FitOptions:
    return FitOptions(**{"max_epochs": 5, "patience": 2, "batch_size": 16, **more})


def _killed_at(monkeypatch: pytest.MonkeyPatch, epoch: int, *arguments: Any, **more: Any) -> None:
    """Train until the end of an epoch, before its checkpoint."""
    end = fitting.BestEpoch.on_train_epoch_end

    def kill(self: fitting.BestEpoch, *args: Any) -> None:
        end(self, *args)
        if len(self.losses) == epoch:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(fitting.BestEpoch, "on_train_epoch_end", kill)
        with pytest.raises(KeyboardInterrupt):
            train(*arguments, **more)


SMALL: dict[str, dict[str, Any]] = {
    "expert_mlp": {"hidden": [16, 8]},
    "fused": {"hidden": 8, "paths": 64, "recent": 0},
    "lstm": {"hidden": 8},
}


@pytest.mark.parametrize("name", SMALL)
def test_a_killed_fit_resumes_to_the_same_weights(
    name: str, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dropout, running means of batches, random distances, the order of tokens and of whole requests."""
    given = {"options": SMALL[name]}
    whole = train(name, trace, tmp_path / "whole", fit=_options(), **given)
    fit = _options(checkpoint=tmp_path / "kept")
    _killed_at(monkeypatch, 3, name, trace, tmp_path / "out", fit=fit, **given)
    torch.rand(3)  # another process has other random numbers
    resumed = train(name, trace, tmp_path / "out", fit=fit, resume=True, **given)
    assert resumed["weights"] == whole["weights"]
    assert resumed["fit"] == whole["fit"]
    again = train(name, trace, tmp_path / "out", fit=fit, resume=True, overwrite=True, **given)  # has ended
    assert again["weights"] == whole["weights"]
    with (tmp_path / "kept" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    for name in ("validation_loss", "loss"):
        logged = [float(row[name]) for row in rows if row[name]]
        assert logged == pytest.approx(whole["fit"][name], abs=1e-6) and len(rows) == 2 * len(logged)


def test_a_checkpoint_of_another_fit_is_refused(trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fit = _options(checkpoint=tmp_path / "kept")
    _killed_at(monkeypatch, 2, "path_mlp", trace, tmp_path / "out", fit=fit)
    with refused(UsageError, CHECKPOINT, "--resume"):
        train("path_mlp", trace, tmp_path / "out", fit=fit)
    with refused(MismatchError, CHECKPOINT, "seed", 1):
        train("path_mlp", trace, tmp_path / "out", fit=fit, seed=1, resume=True)
    for name, value, told in (("max_epochs", 9, 9), ("trainer", {"precision": "bf16-mixed"}, "bf16-mixed")):
        other = _options(checkpoint=tmp_path / "kept", **{name: value})
        with refused(MismatchError, CHECKPOINT, f"fit.{name}", told):
            train("path_mlp", trace, tmp_path / "out", fit=other, resume=True)
    for inside in ("out", "out/kept"):
        with refused(UsageError, tmp_path / inside, tmp_path / "out", "fit.checkpoint"):
            train("path_mlp", trace, tmp_path / "out", fit=_options(checkpoint=tmp_path / inside))
    (tmp_path / "kept" / CHECKPOINT).write_bytes(b"PK\3\4 cut off")
    with refused(MismatchError, CHECKPOINT, "damaged"):
        train("path_mlp", trace, tmp_path / "out", fit=fit, resume=True)
    with refused(UsageError, "fit.checkpoint"):
        train("path_mlp", trace, tmp_path / "out", fit=_options(), resume=True)
    with refused(UsageError, "popularity", "--resume"):
        train("popularity", trace, tmp_path / "out", resume=True)
    assert not (tmp_path / "out").exists()


def test_arguments_of_the_trainer(trace: Path, tmp_path: Path) -> None:
    """A precision, a limit of batches, and callbacks by name or as LightningCLI writes them."""
    rates = {
        "class_path": "lightning.pytorch.callbacks.LearningRateMonitor",
        "init_args": {"logging_interval": "epoch"},
    }
    trainer = {
        "precision": "bf16-mixed",
        "gradient_clip_val": 0.5,
        "limit_train_batches": 2,
        "callbacks": ["Timer", rates],
    }
    card = train("path_mlp", trace, tmp_path / "out", fit=_options(max_epochs=2, trainer=trainer))
    assert card["fit"]["trainer"] == trainer
    with (tmp_path / "out" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows if row["loss"]] == ["1", "3"]
    assert any("lr" in name for name in rows[0])
    assert card["weights"] != train("path_mlp", trace, tmp_path / "plain", fit=_options(max_epochs=2))["weights"]


@pytest.mark.parametrize(
    ("trainer", "told"),
    [
        ({"check_val_every_n_epoch": 2}, "validation_loss"),
        ({"limit_val_batches": 0}, "validation_loss"),
        ({"limit_val_batches": 1e-9}, "limit_val_batches"),
        ({"limit_train_batches": 0}, "epoch"),
    ],
)
def test_arguments_that_take_the_validation_away(
    trainer: dict[str, Any], told: str, trace: Path, tmp_path: Path
) -> None:
    with refused(UsageError, "fit.trainer", told):
        train("path_mlp", trace, tmp_path / "out", fit=_options(max_epochs=2, trainer=trainer))
