"""The machine of an estimate, named or given by its sizes."""

from pathlib import Path

import pytest

from moetool.base.errors import UsageError
from moetool.measuring.fit_machine import SYSTEM_BYTES, FitOptions, fit_machine, size
from tests.refusals import refused


def test_a_named_machine_keeps_its_figures() -> None:
    found = fit_machine(FitOptions(machine="pc-rtx-5090-ddr5"))
    assert (found.device_bytes, found.gpu_bytes, found.flags) == (32 * 10**9, 32 * 10**9, "")
    assert found.host_bytes == 64 * 10**9 - SYSTEM_BYTES
    laptop = fit_machine(FitOptions(machine="laptop-16gb"))
    assert not laptop.has_gpu and laptop.device_bytes == laptop.host_bytes == 14 * 10**9
    assert laptop.rates.link_bytes_s == 0


def test_given_sizes_replace_figures(tmp_path: Path) -> None:
    options = FitOptions(machine="laptop-16gb", gpu_bytes=8 * 10**9, disk_bytes_s=2e9, host_bytes=10**10)
    found = fit_machine(options)
    assert (found.has_gpu, found.device_bytes, found.host_bytes) == (True, 8 * 10**9, 10**10)
    assert found.rates.disk_bytes_s == 2e9
    assert found.flags == " --device cuda --host-memory 10GB"
    assert ("disk", "2.0 GB/s", "as given") in found.facts


def test_a_disk_without_a_figure_is_assumed() -> None:
    found = fit_machine(FitOptions(machine="rtx-3090"))
    assert ("disk", "3.0 GB/s", "assumed") in found.facts and found.rates.link_bytes_s == pytest.approx(25.2e9)


def test_unknown_machines_are_refused() -> None:
    with refused(UsageError, "h100"):
        fit_machine(FitOptions(machine="h1000"))


def test_sizes_as_flags_take_them() -> None:
    assert (size(16 * 10**9), size(1_500_000_000)) == ("16GB", "1500MB")
