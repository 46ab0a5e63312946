"""`moetool fit`, and the estimate that `moetool serve` prints before a download."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from moetool.base import assets
from moetool.cli import serving
from tests import hub
from tests.command_line import Run

LAPTOP = ("--machine", "laptop-16gb")


def test_a_verdict_and_all_parts(run: Run) -> None:
    code, out, err = run("fit", "qwen3-30b-a3b", *LAPTOP)
    assert code == 0, err
    for part in ("30.5 B parameters", "200-word answer", "dense weights", "expert slots", "tokens/s", "32GB"):
        assert part in out
    assert "moetool serve MODEL" in out and "laptop-16gb.toml" in out


def test_json_has_the_same(run: Run) -> None:
    code, out, _ = run("fit", "reference", *LAPTOP, "--memory", "4GB", "--disk-speed", "2GB/s", "--json")
    found = json.loads(out)
    assert code == 0 and found["fits"] and found["command"] == "moetool serve reference --process-memory 4GB"
    assert found["tokens_per_s"] == pytest.approx(1 / sum(found["token"][f"{p}_s"] for p in _PARTS))


def test_the_capture_of_a_model_that_does_not_fit_says_why(run: Run) -> None:
    arguments = ("fit", "qwen3-30b-a3b", *LAPTOP, "--memory", "1GB", "--capture", "1000")
    code, out, _ = run(*arguments)
    assert code == 0 and "capture of 1,000 prompts: not possible" in " ".join(out.split())
    code, out, _ = run(*arguments, "--json")
    found = json.loads(out)
    assert code == 0 and not found["fits"] and found["capture"] is None


def test_a_gpu_that_is_too_small_may_be_left_out(run: Run) -> None:
    small = ("fit", "qwen3-30b-a3b", "--machine", "pc-rtx-4090-ddr5", "--gpu-memory", "2GB", "--json")
    for memory, fits in (("64GB", True), ("2GB", False)):
        code, out, _ = run(*small, "--memory", memory)
        found = json.loads(out)
        assert code == 0 and not found["fits"] and ("--device cpu" in found["verdict"]) == fits


_PARTS = ("memory", "fixed", "link", "disk")


def test_a_directory_with_a_config_alone(run: Run, tmp_path: Path) -> None:
    shutil.copy(assets.path("recipes", "shapes", "deepseek-v2-lite") / "config.json", tmp_path)
    code, out, err = run("fit", tmp_path, "--machine", "pc-rtx-3090-ddr4")
    assert code == 0, err
    assert "15.7 B parameters" in out and "link to the GPU" in out


@pytest.mark.parametrize(
    ("arguments", "fact"),
    [
        (("qwen3-30b-a3b", "--machine", "laptop-16"), "laptop-16gb"),
        (("qwen3-30b-a3b", "--memory", "lots"), "lots"),
        (("qwen3-30b-a3b", "--disk-speed", "fast/s"), "--disk-speed: 'fast/s' is not a speed"),
        (("qwen3-30b-a3b", "--memory", "lots", "--gpu-memory", "x", "--disk-speed", "1GB/s"), "; --gpu-memory: 'x'"),
        (("qwen3-30b-a3b", "--machine", "h10", "--memory", "lots"), "'lots' is not an amount of memory; write bytes"),
        (("qwen3-30b-a3b", "--machine", "h10", "--memory", "lots"), "unknown machine 'h10'"),
        (("qwen3-30b-a3b", "--machine", "h10", "--disk-speed", "fast"), "'fast' is not a speed"),
        (("qwen3-30b-a3", *LAPTOP), "qwen3-30b-a3b"),
        (("/no/such/folder", *LAPTOP), "/no/such/folder"),
    ],
)
def test_wrong_words_are_one_line(run: Run, arguments: tuple[str, ...], fact: str) -> None:
    code, out, err = run("fit", *arguments)
    assert code == 2 and out == "" and fact in err and len(err.strip().splitlines()) == 1


@pytest.fixture
def on_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    with hub.running(tmp_path / "cache", monkeypatch) as served:
        served.folders["lab/toy"] = assets.path("data", "reference-moe")
        yield served


def test_a_hub_name_downloads_no_weights(run: Run, on_hub: hub.Hub) -> None:
    code, out, err = run("fit", "lab/toy", *LAPTOP)
    assert code == 0, err
    assert "moetool serve lab/toy" in out
    assert "config.json" in on_hub.sent and "model.safetensors" not in on_hub.sent


@pytest.mark.parametrize(("answer", "yes"), [(False, False), (True, False), (None, True)])
def test_serve_asks_before_it_downloads(
    run: Run, on_hub: hub.Hub, monkeypatch: pytest.MonkeyPatch, answer: bool | None, yes: bool
) -> None:
    asked: list[str] = []

    def confirm(text: str, **options: Any) -> bool:
        asked.append(text)
        if not answer:
            raise serving.typer.Abort
        return True

    class Downloading(Exception):
        """The next step after the answer."""

    monkeypatch.setattr("moetool.base.tables.asks", lambda: True)
    monkeypatch.setattr(serving.typer, "confirm", confirm)
    monkeypatch.setattr("moetool.models.files.location.locate", lambda model: (_ for _ in ()).throw(Downloading()))
    monkeypatch.setattr("moetool.models.checkpoint.locate", lambda model: (_ for _ in ()).throw(Downloading()))
    arguments = ("serve", "lab/toy", "--port", "0", *(("--yes",) if yes else ()))
    if answer or yes:
        with pytest.raises(Downloading):
            run(*arguments)
    else:
        code, _, err = run(*arguments)
        assert code == 1 and "200-word answer" in err and err.strip().endswith("stopped")
    assert bool(asked) is not yes
    assert "model.safetensors" not in on_hub.sent


def test_a_family_without_a_class_has_its_shape_and_does_not_run(run: Run, tmp_path: Path) -> None:
    config = {"num_hidden_layers": 40, "n_routed_experts": 384, "num_experts_per_tok": 6, "hidden_size": 5120}
    config |= {"moe_intermediate_size": 2304, "vocab_size": 129280}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "deepseek_v41", "text_config": config}))
    code, out, err = run("fit", tmp_path)
    assert code == 0, err
    for part in ("does not run", "deepseek_v41", "384", "a token uses 6", "70.8 MB"):  # 3 * 2304 * 5120 of 2 bytes
        assert part in out
    code, out, _ = run("fit", tmp_path, "--json")
    found = json.loads(out)
    assert code == 0 and not found["fits"] and found["spec"]["expert_bytes_L"] == [3 * 2304 * 5120 * 2] * 40
    for command in (("serve", tmp_path), ("plan", "cache", "--trace", tmp_path, "--model", tmp_path)):
        code, _, err = run(*command)
        assert code != 0 and len(err.strip().splitlines()) == 1
