"""From a model to a replica, and its predictions and serving, by the commands."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

from moetool.cli import main as cli
from moetool.models.shards import Shards
from tests import families


@pytest.fixture(scope="module")
def model(reference: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that reads text, by the embedded model's tokenizer."""
    from transformers import AutoModelForCausalLM

    path = tmp_path_factory.mktemp("tiny") / "model"
    config = families.config("qwen3_moe")
    config.vocab_size, config.max_position_embeddings = 4096, 1024
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, tensor in made.named_parameters():
        if "norm" not in name:
            tensor.data.normal_(0, 0.2)
    made.save_pretrained(path)
    for file in reference.glob("tokenizer*"):
        shutil.copy(file, path)
    return path


def _main(*args: object) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["moetool", *map(str, args)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
    return int(ended.value.code or 0)


def _run(*args: object) -> None:
    assert _main(*args) == 0


def test_train_capture_evaluate(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    replica, trace = tmp_path / "replica", tmp_path / "trace"
    sizes = (
        "--set",
        "length=32",
        "--set",
        "max_tokens=512",
        "--set",
        "grid=1",
        "--set",
        "min_tokens=120",
        "--set",
        "dense_symmetric=false",
    )
    _run("train", "awq_replica", model, "--data", "chat", "--group", 16, *sizes, "--out", replica)
    said = capsys.readouterr().out
    assert "4 bits in groups of 16" in said and "loaded again by transformers" in said and "experts matched" in said
    assert "fewer than 120 tokens for experts" in said
    card = json.loads((replica / "card.json").read_text())
    assert card["quantization"]["dense_symmetric"] is False and card["tokens"]["train"] == 512

    _run("capture", model, "--data", "chat", "--max-prompts", 20, "--max-new-tokens", 3, "--out", trace)
    capsys.readouterr()
    _run("evaluate", replica, "--trace", trace, "--json")
    (row,) = json.loads(capsys.readouterr().out)
    assert row["predictor"] == "awq_replica" and row["requests"] == "all"
    assert row["num_skipped"] > 0 and row["num_requests"] + row["num_skipped"] == 20
    assert row["scores"][0]["match"] > 0.7
    assert row["prompt_prediction"]["scores"][0]["match"] > 0.6
    assert row["size_bytes"] < 1.1 * card["weights"]["bytes"]
    _run("evaluate", replica, "--trace", trace, "--set", "awq_replica.activation_bits=4", "--json")
    (rounded,) = json.loads(capsys.readouterr().out)
    assert rounded["scores"][0]["match"] < row["scores"][0]["match"]

    pooled = ("--device-memory", "2MB", "--max-prompts", 2, "--max-new-tokens", 3)
    _run("capture", replica, "--data", "chat", *pooled, "--out", tmp_path / "again", "--json")
    assert json.loads(capsys.readouterr().out)["requests"] == 2


def _unreadable(*args: object) -> memoryview:
    raise AssertionError("a weight was read")


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (
            "--data {few} --set length=32",
            2,
            "the calibration text has 3 tokens in 1 prompts and 3 in 1 prompts for scoring",
        ),
        ("--data chat --asymmetric", 2, "--asymmetric: transformers unpacks stacked experts without zero points"),
        ("--data chat", 2, "--group 64 does not divide the widths 16, 32 of the weights, expected one that does: 16"),
        ("--data chat --group 0", 2, "group is 0, expected at least 1"),
        ("--data chat --bits 3", 2, "bits is 3, expected one of 2, 4, 8"),
        ("--data chat --group 16 --set dtype=int8", 2, "unknown dtype 'int8'"),
        ("--data chatt --group 16", 2, "did you mean 'chat'?"),
    ],
)
def test_errors_are_reported_before_reading_weights(
    args: str,
    code: int,
    says: str,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    few = tmp_path / "few.jsonl"
    few.write_text('{"prompt": "one two three"}\n{"prompt": "four five"}\n')
    monkeypatch.setattr(Shards, "read", _unreadable)
    if "length" in args or "dtype" in args:
        args += " --group 16"
    out = tmp_path / "replica"
    assert _main("train", "awq_replica", model, *args.format(few=few).split(), "--out", out) == code
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == [few]
