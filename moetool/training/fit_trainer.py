"""Lightning's Trainer of a fit: its arguments, callbacks and logs, and the checkpoints from which a fit resumes."""

import importlib
import inspect
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.utilities import rank_zero_only

from moetool.base.errors import MismatchError, UsageError, first_line, unknown_name
from moetool.training.fit_options import FitOptions

CHECKPOINT = "last.ckpt"
_OWN = {
    "max_epochs": "fit.max_epochs",
    "logger": "fit.logger",
    "enable_checkpointing": "fit.checkpoint",
    "default_root_dir": "fit.checkpoint",
}
"""Arguments of the Trainer that options of the fit set."""


def build_trainer(options: FitOptions, callbacks: Sequence[pl.Callback], folder: Path) -> pl.Trainer:
    """Return a Trainer of one device, or as `fit.trainer` says.

    Args:
        callbacks: callbacks of the fit, before those of `fit.trainer`.
        folder: where logs go without `fit.checkpoint`.

    Raises:
        UsageError: an unknown argument or callback, a value that the Trainer refuses, or a logger that is not
            installed.
    """
    given = dict(options.trainer)
    known = set(inspect.signature(pl.Trainer).parameters)
    for name in given:
        if name in _OWN:
            raise UsageError(f"fit.trainer.{name} is set by {_OWN[name]}; give that instead")
        if name not in known:
            raise unknown_name("argument of Lightning's Trainer", name, known - _OWN.keys(), "fit.trainer")
    every = [*callbacks, *_callbacks(given.pop("callbacks", []))]
    if options.checkpoint is not None:
        kept = {"filename": CHECKPOINT.removesuffix(".ckpt"), "save_top_k": 1, "enable_version_counter": False}
        every.append(ModelCheckpoint(dirpath=options.checkpoint, save_on_train_epoch_end=True, **kept))
    arguments: dict[str, Any] = {
        "accelerator": "cuda" if torch.cuda.is_available() else "cpu",
        "devices": 1,
        "num_sanity_val_steps": 0,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        **({"strategy": "ddp_find_unused_parameters_true"} if is_distributed(options) else {}),
        **given,
    }
    if not is_distributed(options):  # one process, on whatever cluster it runs
        arguments["plugins"] = [LightningEnvironment(), *arguments.get("plugins", [])]
    logger = _logger(options.logger, options.checkpoint or folder)
    try:
        trainer = pl.Trainer(
            max_epochs=options.max_epochs,
            callbacks=every,
            logger=logger or False,
            enable_checkpointing=options.checkpoint is not None,
            default_root_dir=folder,
            **arguments,
        )
    except (MisconfigurationException, TypeError, ValueError) as error:
        raise UsageError(f"fit.trainer: Lightning refuses these arguments: {first_line(error)}") from None
    if logger is not None:
        logger.log_hyperparams({name: getattr(options, name) for name in ("batch_size", "learning_rate", "patience")})
    return trainer


def is_distributed(options: FitOptions) -> bool:
    """Whether `fit.trainer` asks for several devices or nodes."""
    devices, nodes = (options.trainer.get(name, 1) for name in ("devices", "num_nodes"))
    several = len(devices) > 1 if isinstance(devices, list) else str(devices) not in ("0", "1")
    return several or nodes != 1


def is_first_process(options: FitOptions) -> bool:
    """Whether this process writes the predictor; Lightning or a launcher runs the command once for each device."""
    return not is_distributed(options) or rank_zero_only.rank == 0


def checkpoint_to_resume(options: FitOptions, facts: Mapping[str, Any], *, resume: bool) -> Path | None:
    """Return the checkpoint to continue from; None if there is none yet.

    Args:
        facts: what the fit depends on (trace, predictor, options, seed), as its checkpoints hold it.

    Raises:
        UsageError: without `resume`, there is a checkpoint already; or `fit.checkpoint` is not given.
        MismatchError: it is damaged, or of another fit.
    """
    if options.checkpoint is None:
        if resume:
            raise UsageError("--resume needs the directory of checkpoints; give --set fit.checkpoint=DIR")
        return None
    path = options.checkpoint / CHECKPOINT
    if not path.is_file():
        return None
    if not resume:
        raise UsageError(f"{path} exists already; continue with --resume, or choose another fit.checkpoint")
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)["fit"]["facts"]
    except (OSError, RuntimeError, EOFError, KeyError, TypeError, pickle.UnpicklingError) as error:
        raise MismatchError(f"{path} is damaged ({first_line(error)}); remove it to begin again") from None
    for name, value in facts.items():
        if found.get(name) != value:
            raise MismatchError(
                f"{path} is of a fit with {name} {found.get(name)!r}, expected {value!r}; resume with the same, or "
                f"choose another fit.checkpoint"
            )
    return path


def _logger(kind: str, folder: Path) -> Logger | None:
    """Return a logger that writes into the folder itself."""
    if kind == "none":
        return None
    try:
        made: Logger = (TensorBoardLogger if kind == "tensorboard" else CSVLogger)(folder, name="", version="")
    except ModuleNotFoundError:
        raise UsageError(f"fit.logger {kind} is not installed; pip install {kind}, or leave it out") from None
    return made


def _callbacks(given: Any) -> list[pl.Callback]:
    """Return callbacks by class path, or `{class_path, init_args}` as in LightningCLI; Lightning's by name alone.

    Raises:
        UsageError: one is unknown, no callback, or refuses its arguments.
    """
    made = []
    for one in given if isinstance(given, list) else [given]:
        path, arguments = (one.get("class_path"), one.get("init_args", {})) if isinstance(one, dict) else (one, {})
        module, _, name = str(path).rpartition(".")
        try:
            kind = getattr(importlib.import_module(module or "lightning.pytorch.callbacks"), name)
            if not (isinstance(kind, type) and issubclass(kind, pl.Callback)):
                raise TypeError("it is no Callback of Lightning")
            made.append(kind(**arguments))
        except (ImportError, AttributeError, TypeError, ValueError, MisconfigurationException) as error:
            raise UsageError(f"fit.trainer.callbacks: {path}: {first_line(error)}") from None
    return made
