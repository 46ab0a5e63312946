"""The card of a predictor on disk, and the bounded build of its predictor."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import safetensors
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from moetool.base import validation as check
from moetool.base.bounded_read import require_regular
from moetool.base.errors import MismatchError, UsageError, first_line, shortened
from moetool.base.json_files import read_json
from moetool.base.types import ModelSpec

SCHEMA_VERSION = 1
CARD = "card.json"
_OBJECTS = ("options", "spec", "weights", "trace", "requests", "tokens", "fit")
"""Fields of a card that are objects if present."""
_REQUIRED = ("predictor", "options", "spec", "weights", "trace", "requests", "seen_prompts")
_SPARE_ELEMENTS = 2**16  # allowance for buffers outside the state dict

T = TypeVar("T")


def read_card(path: Path, again: str) -> dict[str, Any]:
    """Read and check the card in the folder of a predictor.

    Args:
        again: command that makes the predictor again.

    Raises:
        UsageError: there is no such folder.
        MismatchError: it is not a predictor of this schema version, or its card is invalid.
    """
    if path.is_file():
        raise UsageError(
            f"{path} is one file, not a predictor; make one with: moetool train PREDICTOR --trace DIR --out NEW"
        )
    if not path.is_dir():
        raise UsageError(f"no predictor at {path}; make one with: moetool train expert_mlp --trace DIR --out {path}")
    try:
        card = read_json(path / CARD, advice=again, constants=True)  # figures may be NaN
    except FileNotFoundError:
        raise MismatchError(
            f"{path} is not a predictor: it has no {CARD}, expected one from 'moetool train'; train one with: "
            f"moetool train PREDICTOR --trace DIR --out NEW"
        ) from None
    except IsADirectoryError as error:
        raise MismatchError(f"{path / CARD} is damaged ({first_line(error)}); {again}") from None
    found = card.get("kind"), card.get("schema_version")
    if found != ("predictor", SCHEMA_VERSION):
        raise MismatchError(
            f"{path} holds {shortened(found[0] or 'something else', 40)} of schema version "
            f"{shortened(found[1], 40)}, expected a predictor of version {SCHEMA_VERSION}; {again}"
        )
    if missing := [key for key in _REQUIRED if key not in card]:
        raise MismatchError(f"{path / CARD} is damaged: it has no {', '.join(missing)}; {again}")
    if wrong := [key for key in _OBJECTS if not isinstance(card.get(key, {}), dict)]:
        raise MismatchError(f"{path / CARD} is damaged: {', '.join(wrong)} should be JSON objects; {again}")
    try:
        validate_card(card)
    except MismatchError as error:
        raise MismatchError(f"{path / CARD} is damaged: {error}; {again}") from None
    return card


def validate_card(card: Mapping[str, Any]) -> None:
    """Raise MismatchError if a required field has another type, or the spec is invalid."""
    ModelSpec.from_json(card["spec"])
    check.require(isinstance(card["predictor"], str), "predictor", card["predictor"], "a name")
    check.require_plain("options", card["options"])
    sha256 = card["weights"].get("sha256")
    check.require(isinstance(sha256, str | dict), "weights.sha256", sha256, "a checksum, or one of each file")
    if isinstance(sha256, dict):
        for name, value in sha256.items():
            plain = Path(name).name == name and isinstance(value, str)
            check.require(plain, "weights.sha256", f"{name}: {value}", "the checksums of files of the folder")
        revision = card["weights"].get("revision")
        check.require(isinstance(revision, str), "weights.revision", revision, "a checksum")
    trace = card["trace"].get("sha256")
    check.require(isinstance(trace, str), "trace.sha256", trace, "a checksum")
    for part in ("train", "validation", "test"):
        numbers = card["requests"].get(part, [])
        whole = isinstance(numbers, list) and all(type(number) is int and number >= 0 for number in numbers)
        check.require(whole, f"requests.{part}", numbers, "numbers of requests")
    prompts = card["seen_prompts"]
    names = isinstance(prompts, list) and all(isinstance(prompt, str) for prompt in prompts)
    check.require(names, "seen_prompts", prompts, "texts")


def count_elements(file: Path) -> int:
    """Return the number of elements in a safetensors file, by its header.

    Raises:
        OSError: the file does not exist.
        ValueError: it is not a regular file.
        SafetensorError: its header is damaged.
    """
    require_regular(file)
    total = 0
    with safetensors.safe_open(file, framework="pt") as stored:
        for name in stored.keys():  # noqa: SIM118 - not a dictionary
            size = 1
            for length in stored.get_slice(name).get_shape():
                size *= length
            total += size
    return total


def build_within(build: Callable[[], T], elements: int) -> T:
    """Build a predictor with no more elements than its weights file, checked before allocation.

    Args:
        build: builder, called twice, first without memory.
        elements: number of elements in the file.

    Raises:
        MismatchError: its options require more.
    """
    limit = 2 * elements + _SPARE_ELEMENTS  # a module may register a tensor and replace it
    with contextlib.suppress(RuntimeError, TypeError), _bounded(limit), torch.device("meta"):
        build()  # code that needs values fails here, after bounded registrations
    with _bounded(limit):
        return build()


@contextlib.contextmanager
def _bounded(limit: int) -> Iterator[None]:
    """Raise a MismatchError as soon as parameters and buffers exceed a number of elements."""
    total = 0

    def count(module: nn.Module, name: str, tensor: Tensor | None) -> None:
        nonlocal total
        total += 0 if tensor is None else tensor.numel()
        if tensor is not None and total > limit:
            raise MismatchError(f"its options require {name} of shape {list(tensor.shape)}, more than its weights hold")

    handles = [
        torch_module.register_module_parameter_registration_hook(count),
        torch_module.register_module_buffer_registration_hook(count),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
