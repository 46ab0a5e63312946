"""Configs of no model, or of one that would take minutes to build, are refused before that."""

import json
from pathlib import Path
from typing import Any

import pytest

from moetool.base.errors import MismatchError
from moetool.models.checkpoint import Checkpoint
from moetool.models.shape import open_shape
from tests.refusals import refused


@pytest.mark.parametrize(
    ("name", "value"), [("num_hidden_layers", 10**6), ("num_local_experts", 10**9), ("vocab_size", 10**12)]
)
@pytest.mark.parametrize("nested", [False, True])
def test_more_than_any_model_has(reference: Path, tmp_path: Path, name: str, value: Any, nested: bool) -> None:
    config = json.loads((reference / "config.json").read_text())
    changed = {name: value}
    (tmp_path / "config.json").write_text(json.dumps(config | ({"text_config": changed} if nested else changed)))
    with pytest.raises(MismatchError, match=rf"{name} is {value:,}, expected at most"):
        Checkpoint.open(tmp_path, weights=False)


@pytest.mark.parametrize(
    ("changed", "fact"),
    [({"model_type": None}, "model_type"), ({"dtype": "int3"}, "int3"), ({"dtype": "int8"}, "int8")],
)
def test_no_type_of_model_or_numbers(reference: Path, tmp_path: Path, changed: dict[str, Any], fact: str) -> None:
    config = json.loads((reference / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changed))
    with refused(MismatchError, tmp_path / "config.json", fact):
        open_shape(str(tmp_path))
