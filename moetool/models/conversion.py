"""Map checkpoint tensors to model parameters, by transformers' own conversion mapping.

Checkpoints name and split their tensors as their authors did; transformers renames, stacks and joins them when it
loads. This module reads the same tables in the same order, so that it supports every layout that transformers loads. It
keeps the mapping instead of the tensors.
"""

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from moetool.base.errors import MismatchError
from moetool.models.transformers_internals import conversion_mapping, weight_loading


@dataclass(frozen=True, slots=True)
class TensorSource:
    """Source of one parameter.

    Attributes:
        parameter: its name in the model; the first one if a conversion makes several.
        names: checkpoint tensors in natural order, by the conversion pattern that they match.
        converter: transformers' conversion; None if one tensor is the parameter itself.
    """

    parameter: str
    names: dict[str, list[str]]
    converter: Any | None

    @property
    def tensor_names(self) -> list[str]:
        """All checkpoint tensors, pattern by pattern."""
        return [name for names in self.names.values() for name in names]

    def convert(self, tensors: dict[str, torch.Tensor], model: Any) -> dict[str, torch.Tensor]:
        """Return the parameters made from the checkpoint tensors, by name.

        Raises:
            MismatchError: the tensors do not fit together.
        """
        if self.converter is None:
            return {self.parameter: next(iter(tensors.values()))}
        converter = copy.deepcopy(self.converter)
        for pattern, names in self.names.items():
            for name in names:
                converter.add_tensor(self.parameter, name, pattern, tensors[name])
        try:
            made: dict[str, torch.Tensor] = converter.convert(self.parameter, model=model, config=model.config)
        except (RuntimeError, ValueError) as error:
            raise MismatchError(f"cannot make {self.parameter} from the tensors in the weight files: {error}") from None
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def sources(model: Any, names: Iterable[str]) -> dict[str, TensorSource]:
    """Return the source of each parameter and buffer of the model.

    Tensors without a parameter in the model (further prediction layers, vision towers) are ignored.

    Args:
        model: a transformers model, its tensors on the meta device or not.
        names: all tensors of the checkpoint.
    """
    rules, mapping = weight_loading(), conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, rules.WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, rules.WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    parameters = model.state_dict()
    prefix = model.base_model_prefix

    found: dict[str, TensorSource] = {}
    for name in sorted(names, key=rules.dot_natural_key):
        # The text part of a multimodal checkpoint has separate names.
        for candidate in dict.fromkeys((name, name.replace("language_model.", "", 1))):
            renamed, pattern = rules.rename_source_key(candidate, renamings, converters, prefix, parameters)
            if renamed not in parameters and candidate in parameters:
                renamed, pattern = candidate, None
            if renamed in parameters:
                break
        else:
            continue
        source = found.setdefault(renamed, TensorSource(renamed, {}, by_pattern.get(pattern) if pattern else None))
        source.names.setdefault(pattern or name, []).append(name)
    return found
