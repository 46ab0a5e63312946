"""Check that a model's layers fit together, and that they are those in its weight files."""

import logging
import re
import sys
import traceback
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from moetool.base.errors import MismatchError, first_line
from moetool.models.cache_size import run_alike_once
from moetool.models.conversion import TensorSource
from moetool.models.experts.expert_form import holds_experts
from moetool.models.experts.moe_layers import MoeLayer

_LOG = logging.getLogger(__name__)
_NO_FAULT = re.compile(r"meta tensor|Cache").search
"""In errors of a forward that needs numbers, or a cache that some layers lack."""
_split = re.compile(r"(.*?\.)(\d{1,6})\.(.+)").fullmatch


def check_forward(model: Any, file: Path) -> None:
    """Refuse a config whose sizes do not fit together, so that the model's own forward fails.

    Args:
        model: on the meta device, where a forward takes no memory.
        file: its config, for errors.

    Effects: replaces forwards of its layers, so that it is of no further use.

    Raises:
        MismatchError: with the module that fails, and torch's words. A forward that needs numbers, or a kernel of
            another library (causal-conv1d, flash-linear-attention), is not checked beyond the first such operation.
    """
    run_alike_once(model)
    for module in model.modules():
        if holds_experts(module):
            module.forward = lambda hidden, *rest, **more: hidden.new_empty(hidden.shape)
    tokens = torch.zeros(1, 8, dtype=torch.long, device="meta")
    try:
        with torch.inference_mode():
            model(tokens, position_ids=torch.arange(8, device="meta")[None], use_cache=True)
    except Exception as error:  # libraries of kernels raise any
        if isinstance(error, NotImplementedError) or _NO_FAULT(str(error)) or _of_other_library(error):
            return
        raise MismatchError(
            f"{file}: its sizes do not fit together, since a forward fails{_module_of(error, model)}: "
            f"{first_line(error)}; correct it, or download the model again"
        ) from None


def _of_other_library(error: Exception) -> bool:
    """Whether an error passed code of another library than torch and transformers: few kernels take meta tensors."""
    modules = {str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(error.__traceback__)}
    packages = {module.split(".")[0] for module in modules}
    return not packages <= {"moetool", "torch", "transformers", *sys.stdlib_module_names}


def _module_of(error: Exception, model: Any) -> str:
    """Name the innermost module that an error passed."""
    names = {id(module): name for name, module in model.named_modules()}
    owners = [id(frame.f_locals.get("self")) for frame, _ in traceback.walk_tb(error.__traceback__)]
    return next((f" in {names[owner]}" for owner in reversed(owners) if names.get(owner)), "")


def check_layers(
    layers: Sequence[MoeLayer],
    sources: Mapping[str, TensorSource],
    weights: Collection[str],
    path: Path,
    *,
    by_header: bool = False,
) -> None:
    """Refuse weight files of other counts than the config, and warn of weights that the model's layers do not take.

    A block behind the layers that holds other tensors than they do is a multi-token prediction block. Transformers
    ignores it.

    Args:
        sources: the tensors of each parameter of the model.
        weights: weights in the files, by their names in an unquantized checkpoint.
        path: path of the checkpoint, for errors.
        by_header: whether the config comes from the header of the same file, so that the model takes all weights.

    Raises:
        MismatchError: the files hold a further layer, or layers of more or fewer experts, or with a gap in their
            numbers; or with `by_header` a weight that the model's layers do not take.
    """
    for layer in layers:
        _require_experts(layer, sources, path)
    used = {name for source in sources.values() for name in source.tensor_names}
    kinds: dict[str, set[str]] = {}
    last: dict[str, int] = {}
    for name in used:
        if (match := _split(name)) is not None:
            root, number, leaf = match[1], int(match[2]), _kind(match[3])
            kinds.setdefault(root, set()).add(leaf)
            last[root] = max(last.get(root, 0), number)
    further: dict[tuple[str, int], set[str]] = {}
    ignored = []
    for name in sorted(set(weights) - used):
        match = _split(name)
        if match is None or (root := match[1]) not in kinds:
            continue
        if (number := int(match[2])) > last[root]:
            further.setdefault((root, number), set()).add(_kind(match[3]))
        elif name.endswith((".weight", ".bias")):
            ignored.append(name)
    for (root, number), leaves in sorted(further.items()):
        if leaves <= kinds[root]:
            raise MismatchError(
                f"{path}: its weight files hold the layer {root}{number}, but its config.json counts "
                f"{last[root] + 1} layers (num_hidden_layers); correct it, or download the model again"
            )
    if ignored and by_header:
        raise MismatchError(
            f"{path}: it holds {ignored[0]}, which the model of its header lacks: a count there is wrong; convert or "
            "download the model again"
        )
    if ignored:
        _LOG.warning(
            "%s: the model ignores %d weights of its layers, such as %s: check whether its config describes them",
            path,
            len(ignored),
            ignored[0],
        )


def _require_experts(layer: MoeLayer, sources: Mapping[str, TensorSource], path: Path) -> None:
    """Raises: MismatchError: experts of one tensor each are of another count than the config's, or miss a number."""
    found = [source for name in layer.form.parameters if (source := sources.get(f"{layer.path}.{name}")) is not None]
    names = [name for source in found for names in source.names.values() if len(names) > 1 for name in names]
    numbers = {int(match[1]) for name in names if (match := re.match(r".*\.(\d+)\.", name))}
    counts = (layer.form.num_experts, layer.num_experts)  # some files hold identity experts too
    without_gap = numbers == set(range(len(numbers)))
    if len(numbers) in counts and not without_gap:  # transformers would stack them, each in the place of another
        raise MismatchError(
            f"{path}: its weight files hold expert {max(numbers)} of {layer.path}, expected 0 to {len(numbers) - 1} by "
            "its config.json; number them without gaps, or download the model again"
        )
    if numbers and without_gap and len(numbers) not in counts:
        raise MismatchError(
            f"{path}: its weight files hold {len(numbers)} experts of {layer.path}, expected {counts[0]} by its "
            "config.json; correct it, or download the model again"
        )


def _kind(leaf: str) -> str:
    """A name within a layer, without numbers of experts."""
    return re.sub(r"\.\d+\.", ".N.", leaf)
