"""`moetool doctor`: ten lines, whatever the machine."""

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from moetool.base.errors import UsageError
from moetool.base.machine import cgroup_memory, memory_bytes
from moetool.measuring import doctor as module
from moetool.measuring.doctor import doctor
from moetool.models import libraries
from moetool.models.libraries import OLDEST_TRANSFORMERS, read_machine, require_transformers

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
    assert module.gpu(machine).value.startswith("a GPU, 24.0 GB, driver ")
    assert "float32" in module.bfloat16_units(machine).meaning
    assert module.bfloat16_units(replace(machine, amx=True, avx512_bf16=True)).value == "AMX and AVX512-BF16"
    assert module.gpu(replace(machine, gpu=None)).value == "none"


def test_library_versions_outside_the_tested_range_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    required = ["torch>=2.11", "transformers<5.24,>=5.21", "torch>=3; extra == 'later'"]
    monkeypatch.setattr(module.importlib.metadata, "requires", lambda name: required)
    machine = replace(read_machine(), torch="2.13.0+cpu", transformers="5.23.0")
    assert module.libraries(machine).meaning == "in the tested range"
    old = module.libraries(replace(machine, transformers="4.57.1"))
    assert old.meaning == "transformers 4.57.1 is outside the tested <5.24,>=5.21"
    assert old.data["in_tested_range"] is False


def test_an_old_transformers_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("5.20.2", "4.57.6"):
        monkeypatch.setattr(libraries.importlib.metadata, "version", lambda name, found=version: found)
        with pytest.raises(UsageError, match=rf"^transformers {version} is too old: expected 5\.21 or newer; pip"):
            require_transformers()
    for version in ("5.21.0", "5.23.0.dev0", "6.0"):
        monkeypatch.setattr(libraries.importlib.metadata, "version", lambda name, found=version: found)
        require_transformers()


def test_every_lower_bound_is_one_that_the_tested_versions_keep() -> None:
    root = Path(__file__).parents[3]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    lines = [line for line in (root / "constraints.txt").read_text().splitlines() if "==" in line]
    tested = {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}
    extras = project["optional-dependencies"].values()
    required = [Requirement(text) for texts in (project["dependencies"], *extras) for text in texts]
    for one in required:
        assert one.specifier.contains(tested[canonicalize_name(one.name)]), one
    (transformers,) = [one for one in required if one.name == "transformers"]
    assert f">={'.'.join(map(str, OLDEST_TRANSFORMERS))}" in str(transformers.specifier).split(",")


def _group(folder: Path, limit: str, used: int, inactive: int, version: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    key = "inactive_file" if version == 2 else "total_inactive_file"
    for name, value in zip((*names, "memory.stat"), (limit, used, f"cache 1\n{key} {inactive}\n"), strict=True):
        (folder / name).write_text(f"{value}\n")


@pytest.mark.parametrize("version", [1, 2])
def test_every_control_group_above_the_process_limits_its_memory(tmp_path: Path, version: int) -> None:
    root, member = tmp_path / "cgroup", tmp_path / "membership"
    base = root if version == 2 else root / "memory"
    _group(base / "a" / "b", "9223372036854771712" if version == 1 else "max", 10, 0, version)
    _group(base / "a", "5000", 3000, 1000, version)
    _group(base, "9000", 3500, 1000, version)
    member.write_text("3:cpuset:/\n4:memory:/a/b\n0::/a/b\n" if version == 1 else "0::/a/b\n")
    assert cgroup_memory(root, member) == [(5000, 2000), (9000, 2500)]
    member.write_text("0::/gone\n4:memory:/gone\n")  # a container sees its own group as the root
    assert cgroup_memory(root, member) == [(9000, 2500)]
    assert cgroup_memory(tmp_path / "nothing", member) == []


def test_memory_is_at_most_that_of_the_control_groups() -> None:
    total, free = memory_bytes()
    assert 0 < free <= total
    for limit, used in cgroup_memory():
        assert total <= limit
        assert free <= max(0, limit - used) + 2**30  # others use memory meanwhile
