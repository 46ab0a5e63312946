"""What a checkpoint's config says of its packed weights, and the variants of the format that are refused."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moetool.errors import UsageError
from moetool.models.packed import BITS, FORMAT, METHOD

_UNREAD = {
    "kv_cache_scheme": "rounds keys and values",
    "sparsity_config": "leaves out weights (sparsity)",
    "transform_config": "turns weights and activations (transforms)",
}
"""What may stand beside the weights' own scheme, and what it does to the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """How the weights of a checkpoint are packed (`moetool.models.packed`).

    Attributes:
        bits: of each value.
        groups: consecutive inputs that share a scale, by any of the config's groups of modules; 0 for a whole row.
        symmetric: whether zero points are 0, by any of them.
        as_stored: whether weights become dense in the type of their scales, and not in the model's own.
    """

    bits: int
    groups: frozenset[int]
    symmetric: frozenset[bool]
    as_stored: bool


def packing_of(config: Mapping[str, Any], path: Path) -> Packing | None:
    """How the weights of a checkpoint are packed, by its config.json; None where they are not.

    Modules that the config ignores need no mention: they are what their tensors say.

    Raises:
        UsageError: it is quantized in another way.
    """
    found = config.get("quantization_config") or config.get("compression_config")
    if not found:
        return None
    method, form = found.get("quant_method"), found.get("format")
    if (method, form) != (METHOD, FORMAT):
        raise UsageError(
            f"{path} is quantized ({method}{f', {form}' if form else ''}); moetool reads float32, float16, bfloat16 "
            f"and {METHOD}' {FORMAT}: give the one that it was made from"
        )
    for name, what in _UNREAD.items():
        own = found.get(name)
        if own and not (name == "sparsity_config" and own.get("format", "dense") == "dense"):
            if name == "transform_config" and not own.get("config_groups"):
                continue
            raise UsageError(f"{path} also {what}, by its {name}; moetool does not: give the one it was made from")
    groups = list((found.get("config_groups") or {}).values())
    read = [_weights(group, path) for group in groups]
    widths = sorted({bits for bits, _, _ in read})
    if len(widths) != 1:
        raise UsageError(f"{path} mixes weights of {widths} bits, expected one width: give the original")
    return Packing(
        bits=widths[0],
        groups=frozenset(size for _, size, _ in read),
        symmetric=frozenset(symmetric for _, _, symmetric in read),
        as_stored=bool(found.get("dequantize")),
    )


def _weights(group: Mapping[str, Any], path: Path) -> tuple[int, int, bool]:
    """Bits, group size (0 for a whole row) and symmetry of one group of modules."""
    weights = group.get("weights") or {}
    bits, kind, size = weights.get("num_bits"), weights.get("type", "int"), weights.get("group_size")
    # Where the strategy is not said, compressed-tensors takes it from the size.
    inferred = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = weights.get("strategy") or inferred
    if kind != "int" or strategy not in ("group", "channel") or bits not in BITS:
        raise UsageError(
            f"{path} is quantized to {bits} bits ({kind}, by {strategy}), expected integers of "
            f"{', '.join(map(str, BITS))} bits by group or channel: give the one that it was made from"
        )
    if strategy == "group" and not (isinstance(size, int) and size > 0):
        raise UsageError(f"{path} is quantized by group with a group_size of {size}, expected a positive number")
    if group.get("input_activations") or group.get("output_activations"):
        raise UsageError(f"{path} also rounds activations, which moetool does not: give the one it was made from")
    if weights.get("actorder") not in (None, False, "weight", "static"):
        raise UsageError(f"{path} orders its groups by activation, which moetool does not read: give the original")
    if group.get("format") not in (None, FORMAT):
        raise UsageError(f"{path} stores a part of its weights as {group['format']}, expected {FORMAT} alone")
    return int(bits or 0), int(size or 0) if strategy == "group" else 0, bool(weights.get("symmetric", True))
