"""The files of a directory or repository that are the checkpoint: transformers' own choice, or a refusal."""

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from moetool.base.errors import MismatchError, UsageError
from moetool.base.json_files import read_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_ADAPTER = "adapter_config.json"
_DISTRIBUTED = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")


def choose_weights(files: Collection[str], where: str, named: object = None) -> str:
    """Return the file that leads to a model's weights: `SINGLE`, or `INDEX`, which names them.

    transformers reads `SINGLE` where both exist, and neither variants (`model.fp16.safetensors`) nor other names
    (`consolidated.safetensors`) unless told to.

    Args:
        files: names of the files, without those in subdirectories.
        where: directory or repository, for errors.
        named: the file that the config names (`transformers_weights`), if any.

    Raises:
        UsageError: neither exists, or transformers may read other files than it.
    """
    found = next((name for name in (SINGLE, INDEX) if name in files), None)
    shards = sorted(name for name in files if _DISTRIBUTED.fullmatch(name))
    if shards:
        raise UsageError(
            f"{where} holds {shards[0]}{_and(found)}, a part of a distributed checkpoint, which transformers reads "
            "first and moetool cannot read; save the model with save_pretrained, or remove these files"
        )
    if _ADAPTER in files:
        raise UsageError(
            f"{where} holds an adapter ({_ADAPTER}{_and(found)}), which transformers applies to the weights if peft "
            "is installed, and moetool cannot apply; merge it into the weights, or remove its files"
        )
    if named not in (None, found):
        raise UsageError(
            f"the config in {where} names {named} as its weights (transformers_weights), expected "
            f"{found or SINGLE}; rename the file, or remove the entry"
        )
    if found is None:
        raise UsageError(f"{where} has neither {SINGLE} nor {INDEX}; {_instead(files)}")
    return found


def names_of_index(content: dict[str, Any]) -> set[str]:
    """Names of the files in an index; empty if it is damaged."""
    weight_map = content.get("weight_map")
    return {str(name) for name in weight_map.values()} if isinstance(weight_map, dict) else set()


def second_set(index: Path, files: Collection[str], where: str) -> str:
    """A warning if an index beside `SINGLE` names other existing files; else empty.

    Args:
        index: path of the index, which may not exist.
        files: the files that exist.
        where: directory or repository.
    """
    try:
        others = sorted(names_of_index(read_json(index, advice="")) & {*files} - {SINGLE})
    except (OSError, MismatchError):  # nobody reads this index
        return ""
    if not others:
        return ""
    more = f" and {len(others) - 1} more" if len(others) > 1 else ""
    return (
        f"{where} holds two sets of weights, {SINGLE} and those of {INDEX} ({others[0]}{more}): {SINGLE} is read, as "
        "transformers does; if the others are meant, remove it"
    )


def _and(found: str | None) -> str:
    return f" beside {found}" if found else ""


def _instead(files: Collection[str]) -> str:
    """Advice where there are no weights, by the other files."""
    if pickled := [name for name in _PICKLED if name in files]:
        return (
            f"transformers reads {pickled[0]}, which moetool does not, since it is a pickle; convert it to safetensors"
        )
    if others := sorted(name for name in files if name.endswith(".safetensors")):
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        return f"transformers does not read {others[0]}{more} without being told to; rename it, or add an index"
    if ggufs := sorted(name for name in files if name.endswith(".gguf")):
        return f"give one of its GGUF files, such as {ggufs[0]}"
    advice = "moetool reads only .safetensors weights and GGUF; look for a converted copy"
    return f"{advice}, or see whether it would run here: moetool fit DIR" if "config.json" in files else advice
