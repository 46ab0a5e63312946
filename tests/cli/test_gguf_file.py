"""Commands that take a GGUF file as the model."""

import json
import shutil
from pathlib import Path

import pytest

from tests.command_line import Run

pytest.importorskip("gguf")
from tests.gguf_models import written  # needs the package


def test_capture_and_plan_as_of_the_model_that_the_file_stands_for(run: Run, reference: Path, tmp_path: Path) -> None:
    path, twin = written("qwen3_moe", tmp_path, spelled=reference, vocab_size=4096)
    for file in reference.glob("tokenizer*"):
        shutil.copy(file, twin)
    common = ("--data", "chat", "--max-prompts", 2, "--max-new-tokens", 3, "--dtype", "float32")
    for model, name in ((path, "trace"), (twin, "other")):
        code, _, err = run("capture", model, *common, "--out", tmp_path / name)
        assert code == 0, err
    code, out, err = run("trace", "diff", tmp_path / "trace", tmp_path / "other", "--json")
    found = json.loads(out)
    assert (code, found["requests"], found["left_out"]) == (0, 2, 0), err
    assert found["tokens"] > 6 and all(layer["changed"] == 0 for layer in found["layers"])
    plan, options = tmp_path / "plan.json", ("--device-memory", "4MB", "--config-only", "--frontier", 0)
    code, _, err = run("plan", "cache", "--trace", tmp_path / "trace", "--model", path, *options, "--out", plan)
    assert code == 0 and json.loads(plan.read_text())["spec"]["expert_bytes_L"] == [4608] * 3, err
