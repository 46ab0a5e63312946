"""Machines by name and by file."""

from pathlib import Path

from moetool.base import assets
from moetool.base.errors import UsageError
from moetool.costing.machines import read_named_machine, recipe_names
from tests.refusals import refused


def test_every_file_is_a_machine_and_names_its_sources() -> None:
    assert {"rtx-3080", "rtx-a5000", "rtx-a6000", "h20-node", "h200-node", "jetson-agx-orin"} <= set(
        recipe_names("machines")
    )
    assert {"pc-rtx-3090-ddr4", "pc-rtx-5090-ddr5", "pc-rx-7900-xtx-ddr5", "laptop-16gb", "h100"} <= set(
        recipe_names("machines")
    )
    for name in recipe_names("machines"):
        machine = read_named_machine(name)
        if machine.gpus:
            assert machine.half_flops > machine.memory_bytes_s > machine.host_bytes_s, name
        if machine.host_memory_bytes:
            assert machine.host_flops > machine.host_memory_bytes_s > machine.disk_bytes_s > 0, name
        assert (machine.gpus > 1) == (machine.node_link_bytes_s > 0), name
        lines = assets.path("recipes", "machines", f"{name}.toml").read_text().splitlines()
        figures = [line for line in lines if "bytes_s = " in line or "flops = " in line]
        assert all("[" in line.partition("#")[2] for line in figures), name
        assert any(line.startswith("# [1]") for line in lines), name


def test_a_machine_of_a_file(tmp_path: Path) -> None:
    text = assets.path("recipes", "machines", "laptop-16gb.toml").read_text()
    (tmp_path / "mine.toml").write_text(text.replace("disk_bytes_s = 3.0e9", "disk_bytes_s = 1.5e9"))
    assert read_named_machine(str(tmp_path / "mine.toml")).disk_bytes_s == 1.5e9
    (tmp_path / "mine.toml").write_text(text.replace("disk_bytes_s", "disc_bytes_s"))
    with refused(UsageError, "disc_bytes_s"):
        read_named_machine(str(tmp_path / "mine.toml"))
    with refused(UsageError, "mine2.toml"):
        read_named_machine(str(tmp_path / "mine2.toml"))
    with refused(UsageError, "laptop-16gb"):
        read_named_machine("laptop-16g")


def test_figures_must_be_possible(tmp_path: Path) -> None:
    text = assets.path("recipes", "machines", "laptop-16gb.toml").read_text()
    (tmp_path / "mine.toml").write_text(text.replace("gpus = 0", "gpus = 1"))
    with refused(UsageError, "memory_bytes"):
        read_named_machine(str(tmp_path / "mine.toml"))
