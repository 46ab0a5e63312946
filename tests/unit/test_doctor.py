"""`moetool doctor`: ten lines, whatever the machine."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from moetool import doctor as module
from moetool.doctor import doctor
from moetool.machine import memory_bytes, read_machine

NAMES = [
    "processor",
    "memory",
    "bfloat16 units",
    "bfloat16 / float32",
    "O_DIRECT",
    "disk reads",
    "GPU",
    "pinned memory",
    "ray",
    "libraries",
]


def test_every_line_is_there_and_says_something(tmp_path: Path) -> None:
    findings = doctor(tmp_path, file_bytes=4 * 10**6)
    assert [finding.name for finding in findings] == NAMES
    for finding in findings:
        assert finding.value and finding.meaning
        assert "\n" not in finding.value + finding.meaning
    rows = json.loads(json.dumps([finding.to_json() for finding in findings], allow_nan=False))
    assert rows[5]["bytes_per_s_1_thread"] > 0
    assert rows[3]["gain_64_tokens"] > 0
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_no_crash(tmp_path: Path) -> None:
    findings = {finding.name: finding for finding in doctor(tmp_path / "none", file_bytes=10**6)}
    assert list(findings) == NAMES
    assert findings["disk reads"].value.startswith("unknown")


def test_a_machine_with_a_gpu_and_without_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = replace(read_machine(), gpu="a GPU", gpu_memory_bytes=24 * 10**9, amx=False, avx512_bf16=False)
    assert module._gpu(machine).value.startswith("a GPU, 24.0 GB, driver ")
    assert "float32" in module._bfloat16_units(machine).meaning
    assert module._bfloat16_units(replace(machine, amx=True, avx512_bf16=True)).value == "AMX and AVX512-BF16"
    assert module._gpu(replace(machine, gpu=None)).value == "none"


def test_library_versions_outside_the_tested_range_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    required = ["torch>=2.11", "transformers<5.24,>=5.17", "torch>=3; extra == 'later'"]
    monkeypatch.setattr(module.importlib.metadata, "requires", lambda name: required)
    machine = replace(read_machine(), torch="2.13.0+cpu", transformers="5.23.0")
    assert module._libraries(machine).meaning == "in the tested range"
    old = module._libraries(replace(machine, transformers="4.57.1"))
    assert old.meaning == "transformers 4.57.1 is outside the tested <5.24,>=5.17"
    assert old.data["in_tested_range"] is False


def test_a_container_limits_the_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    limit = tmp_path / "memory.max"
    limit.write_text("1000000\n")
    monkeypatch.setattr("moetool.machine._CGROUP_LIMITS", (str(limit),))
    assert memory_bytes()[0] == 1_000_000
    limit.write_text("max\n")
    assert memory_bytes()[0] > 1_000_000
