"""A predictor's card that asks for what its weights do not hold is refused before anything is built."""

import hashlib
import json
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch

from moetool.base.durable import sha256_file
from moetool.base.errors import MismatchError, MoetoolError
from moetool.caching.policy import build_policy
from moetool.runtime.policy_state import restore_state, save_state
from moetool.training.predictor import CARD, WEIGHTS, Predictor, build, load_predictor, save
from tests.synthetic import make_spec

SPEC = make_spec()
FACTS: dict[str, Any] = {
    "trace": {"sha256": "0" * 64, "requests": 2, "tokens": 8},
    "requests": {"train": [0], "validation": [], "test": [1]},
    "seen_prompts": ["experts:00"],
    "tokens": {"train": 4},
    "fit": {},
}


def saved(name: str, folder: Path, **options: Any) -> Path:
    folder.mkdir()
    save(build(name, SPEC, options), folder, FACTS)
    return folder


def changed(folder: Path, **changes: Any) -> Path:
    card = json.loads((folder / CARD).read_text())
    (folder / CARD).write_text(json.dumps({**card, **changes}))
    return folder


def reweighted(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """The folder with other weights, whose checksum is in the card."""
    tensors = safetensors.torch.load_file(folder / WEIGHTS)
    change(tensors)
    safetensors.torch.save_file(tensors, folder / WEIGHTS)
    size = (folder / WEIGHTS).stat().st_size
    return changed(folder, weights={"bytes": size, "sha256": sha256_file(folder / WEIGHTS)})


def refused(folder: Path, says: str) -> None:
    """In one line, in a second, in little memory."""
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(MismatchError, match=says) as caught:
        load_predictor(folder)
    assert "\n" not in str(caught.value)
    assert "train again: moetool train" in str(caught.value)
    assert time.process_time() - began < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**18  # KiB


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("expert_mlp", {"hidden": [10**9]}),
        ("expert_mlp", {"hidden": [8] * 100_000}),
        ("lstm", {"hidden": 10**6}),
        ("lstm", {"hidden": 2**62}),
        ("path_mlp", {"hidden": 10**9}),
        ("next_use", {"tokens": 10**7}),
        ("cascade", {"width": 10**8, "heads": 4, "vocabulary": 8}),
        ("cascade", {"vocabulary": 10**12}),
        ("single_transformer", {"vocabulary": 10**10}),
        ("promoe", {"hidden": 10**10}),
        ("fused", {"paths": 10**12}),
        ("activation_matrix", {"history": 10**15}),
    ],
)
def test_options_beyond_the_weights_are_refused(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    refused(changed(saved("popularity", tmp_path / "p"), predictor=name, options=options), "is damaged")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"spec": {**SPEC.to_json(), "num_experts_L": [10**9] * 3}}, "num_experts_L.0: found 1,000,000,000"),
        ({"spec": {**SPEC.to_json(), "layer_ids_L": []}}, "layers: found 0"),
        ({"spec": {**SPEC.to_json(), "hidden_size": -4}}, "hidden_size: found -4"),
        ({"spec": make_spec(layers=500, experts=2000).to_json()}, "does not fit|is damaged"),
        ({"options": {"hidden": 2**63}}, "options: found a whole number of more than 64 bits"),
        ({"options": {"hidden": [-1]}}, r"card\.json does not fit this version \(unknown option of affinity 'hidden'"),
        ({"predictor": "nope"}, "install what it needs"),
        ({"predictor": 3}, "predictor: found 3, expected a name"),
        ({"predictor": "os.path"}, "os.path is not a predictor: it has no Options"),
        ({"predictor": "..evil"}, "is not a module name"),
        ({"weights": {}}, "weights.sha256: found None"),
        ({"weights": {"sha256": {"../x": "0"}}}, "weights.sha256: found ../x: 0"),
        ({"trace": {}}, "trace.sha256: found None"),
        ({"requests": {"train": ["a"]}}, "requests.train"),
        ({"requests": {"train": [-1]}}, "requests.train"),
        ({"seen_prompts": 5}, "seen_prompts: found 5"),
    ],
)
def test_cards_that_cannot_be_are_refused(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    refused(changed(saved("affinity", tmp_path / "p"), **changes), says)


def test_weights_that_are_no_numbers_or_name_what_is_not_there_are_refused(tmp_path: Path) -> None:
    def nan(tensors: dict[str, torch.Tensor]) -> None:
        tensors["popularity_LE"][0, 0] = torch.nan

    refused(reweighted(saved("popularity", tmp_path / "a"), nan), "popularity_LE has values that are not finite")
    refused(
        reweighted(saved("fused", tmp_path / "b", paths=4), lambda t: t["experts_CLK"].fill_(99)),
        "experts_CLK has experts that are not among the 8",
    )
    refused(
        reweighted(saved("fused", tmp_path / "c", paths=4), lambda t: t["before_C"].fill_(9)),
        "before_C names paths that are not among the 0",
    )
    refused(reweighted(saved("fused", tmp_path / "d", paths=4), lambda t: t["num_paths"].fill_(5)), "num_paths is 5")

    def maps(tensors: dict[str, torch.Tensor], next_row: int = -1, value: float = 0.5) -> None:
        tensors["maps_LCE"] = torch.full((3, 2, 8), value)
        tensors["embedding_CD"] = torch.zeros(2, 4)
        tensors["next_C"] = torch.tensor([-1, next_row], dtype=torch.int32)

    load_predictor(reweighted(saved("expert_map", tmp_path / "e"), maps))
    refused(reweighted(saved("expert_map", tmp_path / "f"), lambda t: maps(t, 7)), "links to missing maps")
    refused(reweighted(saved("expert_map", tmp_path / "g"), lambda t: maps(t, value=torch.nan)), "not finite")


def test_pipes_in_the_place_of_files_are_refused(tmp_path: Path) -> None:
    for number, name in enumerate((CARD, WEIGHTS)):
        folder = saved("popularity", tmp_path / str(number))
        (folder / name).unlink()
        os.mkfifo(folder / name)
        refused(folder, "a named pipe, expected a regular file")


def test_a_predictor_that_is_whole_is_loaded(tmp_path: Path) -> None:
    for name in ("cascade", "next_use", "fused", "expert_mlp", "activation_matrix", "promoe", "lstm"):
        loaded = load_predictor(saved(name, tmp_path / name))
        assert isinstance(loaded, Predictor)
        assert hashlib.sha256((tmp_path / name / CARD).read_bytes()).hexdigest() == loaded.sha256


def test_damaged_policy_state_is_refused(tmp_path: Path) -> None:
    options = {"memory": 4}
    policy = build_policy("foresight", SPEC, options, 12)
    file = tmp_path / "state"
    save_state(file, "foresight", policy)
    assert restore_state(file, "foresight", build_policy("foresight", SPEC, options, 12)) == []
    with safetensors.safe_open(file, framework="numpy") as stored:
        metadata = stored.metadata()
    arrays = safetensors.numpy.load_file(file)
    corrupted = {name: np.full_like(array, np.nan) for name, array in arrays.items()}
    safetensors.numpy.save_file(corrupted, file, metadata)
    with pytest.raises(MismatchError, match=r"not finite.*remove it to start without learned state"):
        restore_state(file, "foresight", policy)
    file.write_bytes(b"\xff" * 100)
    with pytest.raises(MismatchError, match="is damaged"):
        restore_state(file, "foresight", policy)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(MoetoolError, match="a named pipe"):
        restore_state(file, "foresight", policy)
