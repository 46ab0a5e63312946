"""State of an unfinished run on disk, from which a killed run resumes exactly.

It has no random state: the batches follow from the seed and the step, and the model has no dropout.
"""

import json
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from moetool import durable
from moetool.bounded_read import require_regular
from moetool.config import parse
from moetool.errors import CapacityError, MismatchError, UsageError, first_line
from moetool.json_files import read_json
from moetool.reference.training_recipe import GradientOptions, same_so_far
from moetool.validation import require, require_number, require_plain, require_whole

MARKER = "state.json"

_WEIGHTS = "state.safetensors"
_DAMAGE = (ValueError, LookupError, TypeError, RuntimeError, FileNotFoundError, UsageError)
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(slots=True, kw_only=True)
class Progress:
    """Progress of a run.

    Attributes:
        step: number of completed steps.
        losses: cross-entropy of each step's batch.
        seconds: seconds of these steps, over all processes of the run.
        start: scores of the starting checkpoint on the held-out text; None without one.
    """

    step: int = 0
    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0
    start: dict[str, Any] | None = None

    def validate(self) -> None:
        """Raise MismatchError if the numbers cannot come from a run."""
        require_whole("progress.step", self.step, 0)
        require(len(self.losses) == self.step, "progress.losses", len(self.losses), f"one of each of {self.step} steps")
        require_plain("progress", asdict(self))
        require_number("progress.seconds", self.seconds)


class State:
    """The state of one run, in a folder of its own.

    Attributes:
        identity: the run's inputs, its recipe included. Only a run with the same inputs, or with differences in later
            steps only, can resume.
        moments: AdamW's moments, by kind and parameter.
    """

    def __init__(self, folder: Path, identity: dict[str, Any]) -> None:
        self.folder, self.identity = folder, json.loads(json.dumps(identity))
        self.moments: dict[str, dict[str, torch.Tensor]] = {}

    def load(self, model: torch.nn.Module) -> Progress:
        """Restore a model and the moments of its optimizer.

        Raises:
            MismatchError: the state is of another run, or damaged.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            saved = read_json(self.folder / MARKER, advice="start again with --overwrite")
            require_regular(self.folder / _WEIGHTS)
            progress = parse(Progress, saved["progress"], "progress")
            progress.validate()
            if differences := self._differences(saved["identity"], progress.step):
                raise MismatchError(
                    f"{self.folder} is of a run with {differences[0]}; give the same, or start again with --overwrite"
                )
            tensors = load_file(self.folder / _WEIGHTS)
            for name, tensor in tensors.items():
                require(bool(tensor.isfinite().all()), name, "NaN or infinite", "finite numbers")
            for name, parameter in model.named_parameters():
                parameter.data.copy_(tensors[f"weight/{name}"])
            self.moments = {
                kind: {name: tensors[f"{kind}/{name}"] for name, _ in model.named_parameters()} for kind in _MOMENTS
            }
        except (*_DAMAGE, SafetensorError) as error:
            raise MismatchError(
                f"{self.folder} is damaged ({first_line(error)}); start again with --overwrite"
            ) from error
        return progress

    def _differences(self, saved: dict[str, Any], steps: int) -> list[str]:
        """Describe the differences between a saved run and this one, except those that may change on resume."""
        one, other = ({**given, "recipe": dict(given["recipe"])} for given in (saved, self.identity))
        fits = [parse(GradientOptions, given["recipe"].pop("fit"), "fit") for given in (one, other)]
        for given in (one, other):
            given["recipe"].pop("sources")  # only the card repeats them
        found = _differences(one, other)
        if not same_so_far(fits[0], fits[1], steps):
            found += _differences({"fit": asdict(fits[0])}, {"fit": asdict(fits[1])})
        return found

    def fill(self, optimizer: torch.optim.Optimizer, names: dict[torch.nn.Parameter, str], step: int) -> None:
        """Give the loaded moments to AdamW."""
        if not self.moments:
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                optimizer.state[parameter] = {
                    "step": torch.tensor(float(step), device=parameter.device),
                    **{kind: self.moments[kind][names[parameter]].to(parameter.device) for kind in _MOMENTS},
                }
        self.moments = {}

    def save(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, progress: Progress) -> None:
        """Replace the saved state, whole or not at all.

        Raises:
            OSError: the write fails; the earlier state stays.
        """
        from safetensors.torch import save_file

        tensors = {}
        for name, parameter in model.named_parameters():
            tensors[f"weight/{name}"] = parameter.detach()
            tensors.update({f"{kind}/{name}": optimizer.state[parameter][kind] for kind in _MOMENTS})
        with durable.staged_directory(self.folder, overwrite=True, marker=MARKER) as staged:
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, staged / _WEIGHTS)
            content = {"identity": self.identity, "progress": asdict(progress)}
            (staged / MARKER).write_text(json.dumps(content) + "\n", encoding="utf-8")

    def remove(self) -> None:
        """Remove the state at the end of the run."""
        shutil.rmtree(self.folder, ignore_errors=True)


def require_room(folder: Path, model: torch.nn.Module) -> None:
    """Check that the disk has room for two states (the last and the next) and the result.

    Raises:
        CapacityError: it has too little.
    """
    parameters = sum(parameter.numel() for parameter in model.parameters())
    need = parameters * (2 * 3 * 4 + 2)
    free = shutil.disk_usage(folder).free
    if free < need:
        raise CapacityError(
            f"{folder} has {free / 1e6:,.0f} MB free, expected {need / 1e6:,.0f} MB for two states of the run and its "
            "result; free space or choose another --out"
        )


def _differences(saved: Any, given: Any, path: str = "") -> list[str]:
    """Describe the differences between two nested dictionaries."""
    if isinstance(saved, dict) and isinstance(given, dict):
        names = dict.fromkeys([*saved, *given])
        return [d for n in names for d in _differences(saved.get(n), given.get(n), f"{path}.{n}" if path else n)]
    return [] if saved == given else [f"{path} {saved!r}, and this one has {given!r}"]
