"""`moetool bench gpu` as a dry run on the CPU: every cell is kept, measured or with a reason."""

from pathlib import Path

import pytest

from moetool.base.errors import UsageError
from moetool.bench.bench_result import read_result, show
from moetool.bench.gpu import GpuBenchOptions, bench_gpu
from moetool.caching.machine_split import SplitCosts
from tests.command_line import exit_code
from tests.refusals import refused
from tests.streams import SlowLink
from tests.synthetic_routes import make_spec, write_trace
from tests.tiny_shape import write_shape

OPTIONS = GpuBenchOptions(layers=4, shares=(0.25,), new_tokens=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpu")
    write_shape(folder / "tiny")
    write_trace(folder / "routes" / "tiny", make_spec(num_layers=6))
    return folder


def test_every_cell_is_measured_or_says_why_not(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = folder / "out" / "gpu.json"
    made = bench_gpu(
        [str(folder / "tiny"), "absent"],
        folder / "routes",
        device="cpu",
        options=OPTIONS,
        work=folder / "work",
        file=file,
    )
    cells = {row["policy"]: row for row in made.of(shape="tiny", routers=False)}
    own = {row["policy"]: row for row in made.of(shape="tiny", routers=True)}
    rate = made.facts["host_bytes_s"]
    assert rate > 0
    assert list(cells) == ["all", "on_demand", "lru", "foresight", "duoserve"]
    assert list(own) == ["transformers", "all", "lru", "finemoe", "smoe"]
    for row in (*own.values(), *(cells[name] for name in ("all", "on_demand", "lru", "foresight"))):
        assert "why" not in row
        assert row["decode_s"] > 0
    assert cells["all"]["moved_token_bytes"] == 0
    assert cells["all"]["hit_rate"] == 1
    assert cells["lru"]["moved_token_bytes"] > 0
    assert cells["lru"]["bound_s"] == pytest.approx(cells["lru"]["moved_token_bytes"] / rate)
    assert "needs a predictor" in cells["duoserve"]["why"]
    assert all(row["why"].startswith("no routes at") for row in made.of(shape="absent"))
    for row in (cells[name] for name in ("all", "on_demand", "lru", "foresight")):
        parts = row["policy_s"] + row["wait_s"] + row["rest_s"]
        assert row["policy_s"] > 0 and row["hosted_s"] == 0
        assert parts == pytest.approx(sum(row["rounds"][0]) / len(row["rounds"][0]))
    assert read_result(file).rows == made.rows
    show(made)
    assert "not measured" in capsys.readouterr().out


def test_beside_a_device_the_split_has_cells_of_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moetool.runtime.experts.copies.CpuCopies", SlowLink)
    monkeypatch.setattr("moetool.bench.serving_runs.measure", lambda *parts: SplitCosts(load_s=1.0, host_s=1e-3))
    options = GpuBenchOptions(layers=4, shares=(0.25,), new_tokens=4, policies=("lru", "foresight"), plain=False)
    made = bench_gpu([str(folder / "tiny")], folder / "routes", device="cpu", options=options, work=folder / "split")
    cells = {row["policy"]: row for row in made.of(routers=False)}
    assert list(cells) == ["all", "lru", "foresight", "lru, split", "foresight, split"]
    assert not any("why" in row for row in made.rows)
    assert cells["lru"]["hosted_s"] == 0
    assert cells["lru, split"]["hosted_s"] > 0 and cells["foresight, split"]["hosted_s"] > 0


def test_cells_after_the_time_limit_are_not_started(folder: Path) -> None:
    options = GpuBenchOptions(layers=4, shares=(0.25,), policies=("lru",), limit_s=0.0)
    made = bench_gpu([str(folder / "tiny")], folder / "routes", device="cpu", options=options, work=folder / "late")
    assert {row["why"] for row in made.rows} == {"not started within 0 s"}


def test_out_may_be_a_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = folder / "named" / "x.json"
    given = ("bench", "gpu", "--shape", folder / "tiny", "--routes", folder / "routes", "--device", "cpu")
    given = (*given, "--set", "layers=4", "--set", "shares=[0.25]", "--set", "policies=[lru]", "--set", "plain=false")
    assert exit_code(monkeypatch, *given, "--set", "new_tokens=2", "--out", file) == 0
    assert file.is_file() and (file.parent / "work").is_dir()


def test_a_missing_gpu_and_wrong_shares_are_refused(folder: Path) -> None:
    with refused(UsageError, "shares", "0"):
        GpuBenchOptions(shares=(1.5,))
    with refused(UsageError, "tpu"):
        bench_gpu([], folder, device="tpu", options=OPTIONS, work=folder / "x")
