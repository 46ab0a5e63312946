"""Fit a predictor by gradient descent. Only this module and `fit_trainer` import Lightning."""

import contextlib
import itertools
import logging
import math
import signal
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from moetool.base import tables
from moetool.base.errors import MoetoolError, UsageError, first_line
from moetool.training.fit_options import FitOptions
from moetool.training.fit_trainer import build_trainer, checkpoint_to_resume
from moetool.training.predictor import Predictor
from moetool.training.tokens import Tokens

_LOG = logging.getLogger(__name__)
_MAX_VALIDATION_PAIRS = 2048
_SLOWER = 0.3  # factor of the learning rate after half of the patience without a lower validation loss


def fit(
    model: Predictor,
    train: Tokens,
    validation: Tokens,
    options: FitOptions,
    *,
    seed: int,
    folder: Path,
    facts: Mapping[str, Any],
    resume: bool = False,
) -> dict[str, Any]:
    """Fit `model` in place and leave it on the CPU with the weights of its best epoch.

    Args:
        train: training tokens with all layers.
        validation: tokens that decide when to stop and which epoch is best.
        seed: seed of sample order and dropout.
        folder: where the logs go without `fit.checkpoint`.
        facts: what else the fit depends on; a checkpoint of other facts is refused.
        resume: continue from the checkpoint if there is one; on one device this gives the same weights.

    Effects: shows progress on stderr; writes the log, and the checkpoint of `fit.checkpoint` after each epoch.

    Returns:
        Facts of the fit for the card: tokens, epochs, losses of each epoch.

    Raises:
        UsageError: as `build_trainer` and `checkpoint_to_resume`; or arguments of the Trainer leave out an epoch's
            validation.
        MismatchError: as `checkpoint_to_resume`.
        MoetoolError: a loss is not finite.
    """
    fixed = ("max_epochs", "max_tokens", "patience", "batch_size", "learning_rate", "held_out", "trainer")
    facts = {**facts, "seed": seed, **{f"fit.{name}": getattr(options, name) for name in fixed}}
    start = checkpoint_to_resume(options, facts, resume=resume)
    whole_requests = model.remembers and train.example_T is None
    data = _Pairs(train, validation, options, seed, whole_requests=whole_requests, every_layer=model.one_layer)
    best = BestEpoch(options.patience)
    stopping = EarlyStopping("validation_loss", patience=options.patience, check_finite=False)
    bar = _Bar()
    with quiet():
        trainer = build_trainer(options, [best, bar, stopping, _FitState(best, stopping, data.order, facts)], folder)
        data.epoch.processes = trainer.world_size
        shown = trainer.is_global_zero and not trainer.progress_bar_callback
        progress = tables.progress(f"fitting {model.name}", options.max_epochs * len(data.epoch))
        on_progress = progress if shown else contextlib.nullcontext(bar.on_progress)
        with on_progress as bar.on_progress, interruptible(), torch.random.fork_rng():
            torch.manual_seed(seed)
            try:
                trainer.fit(_Fit(model, options.learning_rate), datamodule=data, ckpt_path=start, weights_only=True)
            except MisconfigurationException as error:
                raise UsageError(f"fit.trainer: Lightning refuses these arguments: {first_line(error)}") from None
    if not best.losses:
        raise UsageError("the arguments of fit.trainer end the fit before its first epoch; leave them out")
    model.cpu().load_state_dict(best.state)
    return {
        "tokens": data.num_tokens,
        "pairs": data.num_tokens * (train.num_layers - 1),
        "epochs": len(best.losses),
        "best_epoch": best.epoch + 1,
        "max_epochs": options.max_epochs,
        "stopped_by": "validation" if stopping.stopped_epoch else "max_epochs",  # epoch 0 means never
        "batch_size": data.batch_size,
        "learning_rate": options.learning_rate,
        "patience": options.patience,
        "lightning": pl.__version__,
        **({"trainer": dict(options.trainer)} if options.trainer else {}),
        **{name: [round(epoch[name], 6) for epoch in best.losses] for name in ("loss", "validation_loss")},
    }


Pairs = tuple[Tensor, Tensor]
"""Indices of tokens, and the layer to predict for each, int64."""


class _Batches(IterableDataset):
    """Lazily read batches of `Tokens` and layer_B, int64.

    Args:
        draw: yields the pairs of each batch of a pass.
        length: number of batches in a pass.

    Attributes:
        process, processes: the number of this process among those that take turns with the batches.
    """

    def __init__(self, tokens: Tokens, draw: Callable[[], Iterable[Pairs]], length: int) -> None:
        self.tokens, self.draw, self._length = tokens, draw, length
        self.process, self.processes = 0, 1

    def __len__(self) -> int:
        return self._length // self.processes

    def __iter__(self) -> Iterator[tuple[Tokens, Tensor]]:
        whole_turns = itertools.islice(self.draw(), len(self) * self.processes)
        for token_N, layer_N in itertools.islice(whole_turns, self.process, None, self.processes):
            yield self.tokens.take(token_N), layer_N


def _token_batches(
    tokens: Tokens, index_N: Tensor, batch_size: int, generator: torch.Generator, *, every_layer: bool
) -> _Batches:
    """Return passes over these tokens in whole batches, in a new order each.

    Args:
        every_layer: whether a pass covers every predictable layer of each token; otherwise each token once, at a random
            layer.
    """
    later = tokens.num_layers - 1
    rounds = later if every_layer else 1
    length = len(index_N) // batch_size  # a last batch of one token would break batch norm

    def draw() -> Iterator[Pairs]:
        order_N = torch.randperm(len(index_N), generator=generator)
        layer_N = torch.empty_like(order_N)
        layer_N[order_N] = torch.randint(1, tokens.num_layers, (len(index_N),), generator=generator)
        for turn in range(rounds):
            if turn:
                order_N = torch.randperm(len(index_N), generator=generator)
                layer_N = 1 + layer_N % later
            pairs = zip(index_N[order_N].split(batch_size), layer_N[order_N].split(batch_size), strict=True)
            yield from itertools.islice(pairs, length)

    return _Batches(tokens, draw, rounds * length)


def _request_batches(tokens: Tokens, index_N: Tensor, batch_size: int, generator: torch.Generator) -> _Batches:
    """Return passes over whole requests, in a new order each, with `batch_size` tokens per batch on average.

    Tokens of a request stay together and in order.
    """
    assert tokens.request_T is not None
    request_N = tokens.request_T[index_N]
    counts = request_N.unique(return_counts=True)[1].tolist()
    requests = index_N[request_N.argsort(stable=True)].split(counts)
    per_batch = max(1, batch_size * len(requests) // len(index_N))

    def draw() -> Iterator[Pairs]:
        for members in torch.randperm(len(requests), generator=generator).split(per_batch):
            token_N = torch.cat([requests[i] for i in members.tolist()])
            yield token_N, torch.randint(1, tokens.num_layers, (len(token_N),), generator=generator)

    return _Batches(tokens, draw, -(-len(requests) // per_batch))


class _Pairs(pl.LightningDataModule):
    """Pairs of a token and its layer to predict: a new order in every epoch, a fixed one for validation.

    Args:
        whole_requests: whether batches hold whole requests.
        every_layer: as in `_token_batches`.

    Attributes:
        order: generator of the order of training tokens.
    """

    def __init__(
        self,
        train: Tokens,
        validation: Tokens,
        options: FitOptions,
        seed: int,
        *,
        whole_requests: bool,
        every_layer: bool,
    ) -> None:
        super().__init__()
        max_tokens = options.max_tokens
        self.order = generator = torch.Generator().manual_seed(seed)
        index_N = torch.arange(len(train))
        if max_tokens is not None and max_tokens < len(train):
            index_N = torch.randperm(len(train), generator=generator)[:max_tokens]
        self.num_tokens, self.batch_size = len(index_N), min(options.batch_size, len(index_N))
        if whole_requests:
            self.epoch = _request_batches(train, index_N.sort().values, options.batch_size, generator)
            every_N = torch.arange(len(validation))
            pairs = list(_request_batches(validation, every_N, options.batch_size, generator).draw())
        else:
            self.epoch = _token_batches(train, index_N, self.batch_size, generator, every_layer=every_layer)
            later = validation.num_layers - 1
            pair_N = torch.randperm(len(validation) * later, generator=generator)[:_MAX_VALIDATION_PAIRS]
            pairs = [(pair // later, 1 + pair % later) for pair in pair_N.split(options.batch_size)]
        self.validation = _Batches(validation, lambda: pairs, len(pairs))

    def train_dataloader(self) -> DataLoader:
        assert self.trainer is not None
        self.epoch.process = self.trainer.global_rank
        return _loader(self.epoch)

    def val_dataloader(self) -> DataLoader:
        return _loader(self.validation)


def _loader(batches: _Batches) -> DataLoader:
    """Return a loader that draws from no shared generator, so that a resumed fit has the same random numbers."""
    return DataLoader(batches, batch_size=None, generator=torch.Generator())


class _Fit(pl.LightningModule):
    """Fits a predictor by its own loss with AdamW. The learning rate is scaled by `share_of_rate` and `slower`.

    Attributes:
        slower: factor of the learning rate, lowered when the validation loss stops falling.
    """

    def __init__(self, predictor: Predictor, learning_rate: float) -> None:
        super().__init__()
        self.predictor = predictor
        self.learning_rate = learning_rate
        self.slower = 1.0

    def training_step(self, batch: tuple[Tokens, Tensor], batch_idx: int) -> Tensor:
        loss = self.predictor.loss(*batch)
        self.log("loss", loss, on_step=False, on_epoch=True, batch_size=len(batch[1]), sync_dist=True)
        return loss

    def validation_step(self, batch: tuple[Tokens, Tensor], batch_idx: int) -> None:
        self.log("validation_loss", self.predictor.loss(*batch), batch_size=len(batch[1]), sync_dist=True)

    def configure_optimizers(self) -> dict[str, Any]:
        clips = bool(self.trainer.gradient_clip_val)  # of mixed precision, Lightning clips no fused optimizer
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate, fused=not clips)
        total_steps = int(self.trainer.estimated_stepping_batches)
        steps = total_steps // (self.trainer.max_epochs or 1)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: self.slower * share_of_rate(step, steps, total_steps)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def share_of_rate(step: int, steps: int, total_steps: int) -> float:
    """Return the share of the full learning rate at a step: one epoch of warm-up, constant, then a cosine decay.

    The decay takes the last two thirds of up to 30 epochs, and the last 20 epochs of longer runs, which validation
    mostly stops earlier.
    """
    warm_up = max(1, min(steps, total_steps // 5))
    descent = max(1, min(total_steps * 2 // 3, 20 * steps))
    risen = min(1.0, (step + 1) / warm_up)
    fallen = max(0, step - (total_steps - descent)) / descent
    return risen * 0.5 * (1 + math.cos(math.pi * fallen))


class BestEpoch(pl.Callback):
    """Keeps the losses and the weights of the best epoch; lowers the learning rate halfway through the patience.

    Raises:
        UsageError: an epoch has no training or validation loss.
        MoetoolError: a loss is not finite.
    """

    def __init__(self, patience: int) -> None:
        self._half = max(1, patience // 2)
        self.losses: list[dict[str, float]] = []
        self.epoch = -1
        self.state: dict[str, Tensor] = {}

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        names = ("loss", "validation_loss")
        if missing := [name for name in names if name not in trainer.callback_metrics]:
            raise UsageError(
                f"with these arguments of fit.trainer, epoch {len(self.losses) + 1} has no {missing[-1]}, expected one "
                f"after each epoch, to know the best; leave out what limits validation or steps"
            )
        losses = {name: float(trainer.callback_metrics[name]) for name in names}
        for name, value in losses.items():
            if not math.isfinite(value):
                raise MoetoolError(
                    f"{name} is {value} in epoch {len(self.losses) + 1}, expected a finite number; "
                    f"train again with a lower learning rate"
                )
        self.losses.append(losses)
        _LOG.info("epoch %d: loss %.6f, validation loss %.6f", len(self.losses), *losses.values())
        if self.epoch < 0 or losses["validation_loss"] < self.losses[self.epoch]["validation_loss"]:
            self.epoch = len(self.losses) - 1
            self.state = {k: v.detach().clone() for k, v in pl_module.predictor.state_dict().items()}
        elif (len(self.losses) - 1 - self.epoch) % self._half == 0:
            pl_module.slower *= _SLOWER


class _FitState(pl.Callback):
    """Keeps in checkpoints what Lightning does not: the best epoch, its weights, random numbers, and the fit's facts.

    A resumed fit so gives the same weights. It logs the losses of earlier epochs again, since a CSV log begins anew.
    """

    def __init__(
        self, best: BestEpoch, stopping: EarlyStopping, order: torch.Generator, facts: Mapping[str, Any]
    ) -> None:
        self._best, self._stopping, self._order, self._facts = best, stopping, order, facts
        self._found: dict[str, Any] = {}

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint["fit"] = {
            "facts": self._facts,
            "losses": self._best.losses,
            "best_epoch": self._best.epoch,
            "best_weights": self._best.state,
            "slower": pl_module.slower,
            "order": self._order.get_state(),
            "random": torch.get_rng_state(),
            "random_cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        }

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._found = checkpoint["fit"]
        self._best.losses, self._best.epoch = self._found["losses"], self._found["best_epoch"]
        self._best.state = self._found["best_weights"]
        pl_module.slower = self._found["slower"]
        steps = checkpoint["global_step"] // len(self._best.losses)
        for epoch, losses in enumerate(self._best.losses):
            for logger in (each for each in trainer.loggers if isinstance(each, CSVLogger)):
                for name in ("validation_loss", "loss"):
                    logger.log_metrics({"epoch": epoch, name: losses[name]}, step=(epoch + 1) * steps - 1)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self._found:
            return
        self._order.set_state(self._found["order"])
        torch.set_rng_state(self._found["random"])
        if torch.cuda.is_available():
            torch.cuda.set_rng_state_all(self._found["random_cuda"])
        trainer.should_stop = self._stopping.wait_count >= self._stopping.patience


class _Bar(pl.Callback):
    """Reports each step."""

    def __init__(self) -> None:
        self.on_progress: Callable[[int], None] = lambda step: None

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        self.on_progress(trainer.global_step)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence Lightning's advice, which is for authors of training loops."""
    loggers = [logging.getLogger(f"lightning.{name}") for name in ("pytorch", "fabric")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let signals end the process as usual. Lightning exits on Ctrl-C and returns success on SIGTERM."""
    handler = signal.getsignal(signal.SIGINT)
    try:
        yield
    except SystemExit as error:
        if isinstance(error.__context__, KeyboardInterrupt):
            raise error.__context__ from None
        raise SystemExit(128 + signal.SIGTERM) from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, handler)  # Lightning ignores it
