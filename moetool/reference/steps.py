"""The steps of gradient descent. Only this module and `moetool.learning.fitting` import Lightning."""

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from moetool.errors import MoetoolError
from moetool.learning.fitting import interruptible, quiet
from moetool.reference.data import TextBatches
from moetool.reference.model import losses
from moetool.reference.training_recipe import Recipe, learning_rate
from moetool.reference.training_state import Progress, State


def run_steps(
    model: torch.nn.Module,
    batches: TextBatches,
    recipe: Recipe,
    progress: Progress,
    state: State,
    on_progress: Callable[[str, int, int], None],
) -> None:
    """Train `model` in place, from the step of `progress` to the recipe's last.

    Effects: updates `progress`; saves `state` every `fit.save_every` steps.

    Raises:
        MoetoolError: a loss is not finite.
        OSError: the state cannot be saved.
    """
    fit = recipe.fit
    if progress.step == fit.max_steps:
        return
    with quiet(), interruptible():
        trainer = pl.Trainer(
            accelerator="cuda" if torch.cuda.is_available() else "cpu",
            devices=1,
            precision="bf16-mixed" if fit.precision == "bfloat16" else "32-true",
            max_steps=fit.max_steps - progress.step,
            max_epochs=1,
            plugins=[LightningEnvironment()],  # one process, on whatever cluster it runs
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        rows = DataLoader(_Rows(batches, progress.step, fit.max_steps), batch_size=None)
        trainer.fit(_Steps(model, recipe, progress, state, on_progress), rows)
    model.cpu()


class _Rows(IterableDataset):
    """The rows of each remaining step."""

    def __init__(self, batches: TextBatches, start: int, end: int) -> None:
        self.batches, self.start, self.end = batches, start, end

    def __iter__(self) -> Iterator[Tensor]:
        for step in range(self.start, self.end):
            yield torch.from_numpy(self.batches.rows(step))


class _Steps(pl.LightningModule):
    """AdamW on cross-entropy and the balancing loss."""

    def __init__(
        self,
        model: torch.nn.Module,
        recipe: Recipe,
        progress: Progress,
        state: State,
        on_progress: Callable[[str, int, int], None],
    ) -> None:
        super().__init__()
        self.model = model
        self.recipe = recipe
        self.progress = progress
        self.state = state
        self.report = on_progress
        self.began = time.perf_counter() - progress.seconds

    def configure_optimizers(self) -> torch.optim.Optimizer:
        named = {parameter: name for name, parameter in self.model.named_parameters()}
        matrices, rest = ([p for p in named if (p.ndim > 1) is wanted] for wanted in (True, False))
        groups = [
            {"params": matrices, "weight_decay": self.recipe.fit.weight_decay},
            {"params": rest, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.recipe.fit.learning_rate, betas=(0.9, 0.95), fused=True)
        self.state.fill(optimizer, named, self.progress.step)
        return optimizer

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = learning_rate(self.recipe.fit, self.progress.step)

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.fit.clip)  # Lightning's refuses fused AdamW

    def training_step(self, rows_BL: Tensor, batch_idx: int) -> Tensor:
        loss, uneven = losses(self.model, rows_BL)
        if not math.isfinite(value := float(loss.detach())):
            raise MoetoolError(
                f"the loss is {value} in step {self.progress.step + 1}, expected a finite number; train again with a "
                "lower fit.learning_rate"
            )
        self.progress.losses.append(round(value, 6))
        return loss + self.recipe.model.balance * uneven

    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        fit = self.recipe.fit
        self.progress.step += 1
        self.progress.seconds = time.perf_counter() - self.began
        tokens = fit.batch_size * fit.sequence_length
        self.report("training on tokens", self.progress.step * tokens, fit.max_steps * tokens)
        if self.progress.step % fit.save_every == 0 or self.progress.step == fit.max_steps:
            self.state.save(self.model, self.trainer.optimizers[0], self.progress)
