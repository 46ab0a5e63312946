"""`moetool reference train`: a kill changes nothing, a full disk leaves what was saved, the result is a plain model."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

from moetool import assets, durable
from moetool.errors import CapacityError, MismatchError, MoetoolError, UsageError
from moetool.reference import training_state as states
from moetool.reference.data import SEPARATOR
from moetool.reference.train import train
from moetool.reference.training_recipe import Recipe, read_recipe
from moetool.reference.training_state import State

TINY: dict[str, Any] = {
    "data": {"held_out": 0.2, "held_out_tokens": 128},
    "model": {
        **{"hidden_size": 16, "num_layers": 2, "num_experts": 4, "top_k": 2, "expert_width": 8},
        **{"num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "max_positions": 64},
    },
    "fit": {"max_steps": 6, "batch_size": 4, "sequence_length": 16, "save_every": 2, "warm_up": 0.2},
}


class Killed(BaseException):
    """Stands for a signal that nothing catches."""


def recipe(**fit: Any) -> Recipe:
    return read_recipe(
        assets.path("recipes", "reference", "model.toml"),
        {**TINY, "fit": {**TINY["fit"], **fit}, "sources": {"numbers": "made up (no licence needed)"}},
    )


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    rng = random.Random(0)
    words = ["the", "court", "of", "a", "judge", "was", "open", "and", "she", "said", "that", "it", "would", "close"]
    for name, make in (
        ("numbers", lambda: " ".join(str(rng.randrange(1000)) for _ in range(60))),
        ("words", lambda: " ".join(rng.choice(words) for _ in range(60))),
    ):
        documents = "".join(f"{make()}\n{SEPARATOR}\n" for _ in range(30))
        (folder / f"{name}.txt").write_text(documents)
    return folder


@pytest.fixture(scope="module")
def whole(text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run that nothing stopped."""
    out = tmp_path_factory.mktemp("whole") / "model"
    return out, train(recipe(), text, out)


def files(folder: Path) -> dict[str, str]:
    return {file.name: durable.sha256_file(file) for file in folder.iterdir() if file.name == "model.safetensors"}


def test_the_result_is_a_plain_checkpoint_that_learned_with_a_card(whole: tuple[Path, dict[str, Any]]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out, facts = whole
    assert facts["loss"][0] == pytest.approx(8.3, abs=0.2)  # ln 4096
    assert facts["loss"][-1] < facts["loss"][0] and len(facts["loss"]) == 6
    assert facts == json.loads((out / "training.json").read_text())
    assert not out.with_name("model.training").exists()
    card = (out / "README.md").read_text()
    assert "| numbers | made up (no licence needed) |" in card and "| words | not said |" in card

    tokenizer = AutoTokenizer.from_pretrained(out)
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == torch.bfloat16 and model.config._experts_implementation != "moetool_sorted"
    assert tokenizer.decode(model.generate(**tokenizer("the court", return_tensors="pt"), max_new_tokens=2)[0])


def test_held_out_cross_entropy_is_transformers_own(text: Path, whole: tuple[Path, dict[str, Any]]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from moetool.reference.data import held_out_rows, read_domains

    out, facts = whole
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    words = read_domains(text, AutoTokenizer.from_pretrained(out), 0.2)[1]
    rows = torch.from_numpy(held_out_rows(words, 16, 128))
    assert facts["held_out"]["tokens"]["words"] == rows[:, 1:].numel() == 128
    expected = float(model(rows, labels=rows).loss.detach())
    assert facts["held_out"]["cross_entropy"]["words"] == pytest.approx(expected, abs=1e-3)
    assert len(facts["held_out"]["between"]) == 2


@pytest.mark.parametrize("saves", [1, 2])
def test_a_killed_run_goes_on_as_if_nothing_had_happened(
    text: Path, whole: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saves: int
) -> None:
    real = State.save
    left = {"saves": saves}

    def killed(self: State, model: Any, optimizer: Any, progress: Any) -> None:
        if not left["saves"]:
            raise Killed
        left["saves"] -= 1
        real(self, model, optimizer, progress)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(State, "save", killed)
        train(recipe(), text, tmp_path / "model")
    assert not (tmp_path / "model").exists()
    saved = json.loads((tmp_path / "model.training" / "state.json").read_text())
    assert saved["progress"]["step"] == 2 * saves

    with pytest.raises(UsageError, match="continue with --resume"):
        train(recipe(), text, tmp_path / "model")
    with pytest.raises(MismatchError, match=r"seed 0, and this one has 1.*--overwrite"):
        other = read_recipe(assets.path("recipes", "reference", "model.toml"), {**TINY, "seed": 1})
        train(other, text, tmp_path / "model", resume=True)
    with pytest.raises(MismatchError, match=r"fit.max_steps 6, and this one has 9"):
        train(recipe(max_steps=9), text, tmp_path / "model", resume=True)

    facts = train(recipe(), text, tmp_path / "model", resume=True)
    out, expected = whole
    assert facts["loss"] == expected["loss"] and facts["held_out"] == expected["held_out"]
    assert files(tmp_path / "model") == files(out)


def test_a_run_is_made_longer_before_its_rate_falls(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wsd(steps: int) -> Recipe:
        return recipe(max_steps=steps, schedule="wsd", warm_up=0.0, decay=0.5)

    long = train(wsd(8), text, tmp_path / "long")
    real = State.save
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(State, "save", lambda self, *args: real(self, *args) or _kill())
        train(wsd(4), text, tmp_path / "made longer")
    facts = train(wsd(8), text, tmp_path / "made longer", resume=True)
    assert facts["loss"] == long["loss"]
    assert files(tmp_path / "made longer") == files(tmp_path / "long")


def _kill() -> None:
    raise Killed


@pytest.mark.parametrize("kind", [OSError, SafetensorError])
def test_a_full_disk_leaves_the_state_before_and_the_result_before(
    text: Path,
    whole: tuple[Path, dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[Exception],
) -> None:
    import safetensors.torch

    real = safetensors.torch.save_file
    left = {"writes": 1}

    def full(*args: Any, **kwargs: Any) -> None:
        if not left["writes"]:
            raise kind("No space left on device")
        left["writes"] -= 1
        real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(safetensors.torch, "save_file", full)
        with pytest.raises(MoetoolError, match=r"No space left.*--resume"):
            train(recipe(), text, tmp_path / "model")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.training"]
    facts = train(recipe(), text, tmp_path / "model", resume=True)
    assert facts["loss"] == whole[1]["loss"]

    with monkeypatch.context() as patch, pytest.raises(CapacityError, match="MB free, expected"):
        patch.setattr(states.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000}))
        train(recipe(), text, tmp_path / "model", overwrite=True)
    assert files(tmp_path / "model") == files(whole[0])


def test_a_run_continues_from_a_checkpoint_and_compares_with_it(
    text: Path, whole: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    out, first = whole
    facts = train(recipe(max_steps=2), text, tmp_path / "model", start=str(out))
    assert facts["held_out_of_start"]["cross_entropy"] == first["held_out"]["cross_entropy"]
    assert facts["loss"][0] < first["loss"][0]
    assert facts["continues"]["tokens"] == first["tokens"]
    assert f"| continues | model, {first['tokens']:,} tokens old" in (tmp_path / "model" / "README.md").read_text()
    with pytest.raises(MismatchError, match=r"hidden_size 192, but the recipe has 16"):
        train(recipe(), text, tmp_path / "other", start="reference")


def test_a_tokenizer_is_learned_from_the_training_documents_and_goes_with_the_model(
    text: Path, tmp_path: Path, reference: Path
) -> None:
    from transformers import AutoTokenizer

    new = {**TINY, "data": {**TINY["data"], "tokenizer": "new", "vocabulary": 300}}
    facts = train(read_recipe(assets.path("recipes", "reference", "model.toml"), new), text, tmp_path / "model")
    assert facts["loss"][0] == pytest.approx(5.7, abs=0.2)  # ln 300
    made, like = AutoTokenizer.from_pretrained(tmp_path / "model"), AutoTokenizer.from_pretrained(reference)
    assert len(made) == 300 and made.all_special_ids == like.all_special_ids
    sentence = "the court said 2024, ünïcode 法院"
    assert made.decode(made(sentence)["input_ids"]) == sentence
    assert len(made("the court said")["input_ids"]) < len("the court said") // 2
    assert [made.decode(token) for token in made("2024")["input_ids"]] == list("2024")
    chat = [{"role": "user", "content": "the court"}]
    assert made.apply_chat_template(chat, tokenize=False) == like.apply_chat_template(chat, tokenize=False)
    with pytest.raises(UsageError, match="expected at least 260"):
        few = {**TINY, "data": {**TINY["data"], "tokenizer": "new", "vocabulary": 100}}
        train(read_recipe(assets.path("recipes", "reference", "model.toml"), few), text, tmp_path / "other")


def test_a_state_that_is_damaged_is_refused(text: Path, tmp_path: Path) -> None:
    state = tmp_path / "model.training"
    state.mkdir()
    (state / "state.json").write_text("{}")
    with pytest.raises(MismatchError, match="is damaged"):
        train(recipe(), text, tmp_path / "model", resume=True)
    with pytest.raises(UsageError, match="nothing to resume"):
        train(recipe(), text, tmp_path / "absent", resume=True)


def test_a_loss_that_is_no_number_ends_the_run(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from moetool.reference import steps

    monkeypatch.setattr(steps, "losses", lambda model, rows: (torch.tensor(torch.nan), torch.tensor(1.0)))
    with pytest.raises(MoetoolError, match=r"the loss is nan in step 1"):
        train(recipe(), text, tmp_path / "model")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_process_killed_outright_goes_on_where_it_was(
    text: Path, whole: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    import os
    import subprocess
    import sys
    import time

    recipe_file = tmp_path / "recipe.toml"
    lines = ["[sources]", 'numbers = "made up (no licence needed)"']
    for section, values in TINY.items():
        lines += [f"[{section}]", *(f"{name} = {value}" for name, value in values.items())]
    lines[lines.index("[fit]") + 1 : 0] = ["learning_rate = 3e-3", "threads = 1"]
    recipe_file.write_text("\n".join(lines) + "\n")
    out = tmp_path / "model"
    command = [sys.executable, "-m", "moetool.cli.main", "reference", "train", "--recipe", str(recipe_file)]
    command += ["--data", str(text), "--out", str(out)]
    child = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE)
    while not out.with_name("model.training").exists() and child.poll() is None:
        time.sleep(0.005)
    child.kill()
    child.communicate()
    again = subprocess.run([*command, *(["--resume"] if not out.exists() else ["--overwrite"])], capture_output=True)
    assert again.returncode == 0, again.stderr.decode()
    assert files(out) == files(whole[0])
