"""Arguments of Lightning's Trainer, its callbacks and its loggers."""

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import LearningRateMonitor, Timer
from lightning.pytorch.loggers import CSVLogger

from moetool.base.errors import UsageError
from moetool.training import fit_trainer
from moetool.training.fit_options import FitOptions
from moetool.training.fit_trainer import build_trainer, is_distributed
from tests.refusals import refused


def _options(logger: str = "none", **trainer: Any) -> FitOptions:
    return FitOptions(trainer=trainer, logger=logger)  # type: ignore[arg-type]


def test_arguments_and_callbacks_reach_the_trainer(tmp_path: Path) -> None:
    timer = {"class_path": "lightning.pytorch.callbacks.Timer", "init_args": {"duration": "00:00:05:00"}}
    given = _options("csv", gradient_clip_val=0.5, callbacks=["LearningRateMonitor", timer])
    trainer = build_trainer(given, [], tmp_path)
    assert trainer.gradient_clip_val == 0.5 and trainer.world_size == 1
    assert {LearningRateMonitor, Timer} <= {type(callback) for callback in trainer.callbacks}
    assert [type(logger) for logger in trainer.loggers] == [CSVLogger]
    assert trainer.checkpoint_callback is None


@pytest.mark.parametrize(
    ("trainer", "told"),
    [
        ({"epochs": 3}, ["epochs"]),
        ({"max_epochs": 3}, ["max_epochs", "fit.max_epochs"]),
        ({"precision": "third"}, ["third"]),
        ({"callbacks": ["Timr"]}, ["Timr"]),
        ({"callbacks": ["subprocess.Popen"]}, ["subprocess.Popen", "Callback"]),
        ({"callbacks": [{"class_path": "Timer", "init_args": {"until": 3}}]}, ["Timer", "until"]),
    ],
)
def test_wrong_arguments_are_refused(trainer: dict[str, Any], told: list[str], tmp_path: Path) -> None:
    with refused(UsageError, *told):
        build_trainer(_options(**trainer), [], tmp_path)


def test_a_logger_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*args: Any, **kwargs: Any) -> None:
        raise ModuleNotFoundError("No module named 'tensorboard'")

    monkeypatch.setattr(fit_trainer, "TensorBoardLogger", missing)
    with refused(UsageError, "tensorboard", "pip install"):
        build_trainer(_options("tensorboard"), [], tmp_path)


@pytest.mark.parametrize(
    ("trainer", "several"),
    [({}, False), ({"devices": 1}, False), ({"devices": [1]}, False), ({"devices": 2}, True), ({"num_nodes": 2}, True)],
)
def test_several_devices_are_several_processes(trainer: dict[str, Any], several: bool) -> None:
    assert is_distributed(_options(**trainer)) is several
