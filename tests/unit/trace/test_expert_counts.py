"""Counts stand for traces where a placement is planned or scored."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from moetool.base.errors import MismatchError, UsageError
from moetool.placement.demand import read_demand
from moetool.placement.exports import ktransformers
from moetool.placement.planning import open_traces, plan_placement, score_plan
from moetool.trace.expert_counts import Counted, ExpertCounts, open_workload
from moetool.trace.foreign.exporting import export_trace
from moetool.trace.foreign.importing import import_trace
from moetool.trace.reader import Trace
from tests import synthetic_routes
from tests.clusters import make_cluster
from tests.refusals import refused


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A trace, and the counts of it that SGLang would have recorded."""
    folder = tmp_path_factory.mktemp("counts")
    trace = synthetic_routes.write_trace(folder / "trace", num_requests=6, prompt_tokens=6, new_tokens=4)
    export_trace(trace, "sglang_stat", folder / "stat.pt")
    import_trace([folder / "stat.pt"], "sglang_stat", folder / "counts", settings={"model": str(trace)})
    return trace, folder / "counts"


def test_a_placement_from_counts_is_that_from_the_trace(paths: tuple[Path, Path], tmp_path: Path) -> None:
    cluster = make_cluster([[24], [24]], slot_bytes=1024)
    plans = []
    for path in paths:
        traces = open_traces([f"s0={path}"])
        assert (read_demand(traces, cluster).tokens_LE == read_demand({"s0": Trace(paths[0])}, cluster).tokens_LE).all()
        plan, rows = plan_placement(traces, cluster, "prism", {})
        plans.append(plan)
        assert score_plan(plan, traces).requests == "planned on" == rows[0].requests
    assert plans[0].experts_LG == plans[1].experts_LG and plans[0].value == plans[1].value
    assert plans[1].traces[0].requests == len(ExpertCounts(paths[1]).counts_WLE)
    ktransformers.write_plan(plans[1], tmp_path / "k.pt")
    count_LE = torch.load(tmp_path / "k.pt", weights_only=True)["logical_count"].numpy()
    assert (count_LE == read_demand({"s0": Trace(paths[0])}, cluster).tokens_LE).all()


def test_passes_are_held_out_as_requests_are(paths: tuple[Path, Path]) -> None:
    counts = ExpertCounts(paths[1])
    cluster = make_cluster([[24], [24]], slot_bytes=1024)
    plan, rows = plan_placement({"s0": counts}, cluster, "prism", {}, split=0.5)
    assert [row.requests for row in rows] == ["planned on", "held out"]
    assert plan.traces[0].requests == len(counts.counts_WLE) // 2


@pytest.mark.follows("moetool.trace.expert_counts _manifest")
def test_counts_that_are_missing_are_imported(paths: tuple[Path, Path], tmp_path: Path) -> None:
    with refused(UsageError, "no counts", f"moetool trace import FILE --out {tmp_path / 'c'}"):
        ExpertCounts(tmp_path / "c")
    import_trace([paths[1].parent / "stat.pt"], None, tmp_path / "c", settings={"model": str(paths[0])})
    assert (ExpertCounts(tmp_path / "c").counts_WLE == ExpertCounts(paths[1]).counts_WLE).all()


def test_counts_know_what_they_are(paths: tuple[Path, Path]) -> None:
    trace, path = paths
    counts = open_workload(path)
    assert isinstance(counts, ExpertCounts) and isinstance(open_workload(trace), Trace)
    found = counts.describe()
    assert found["passes"] == len(counts.counts_WLE) and found["tokens"] == Trace(trace).num_tokens
    assert any("not for replay" in note for note in found["provenance"]["imported"]["notes"])
    with refused(MismatchError, "counts"):
        Trace(path)
    with refused(MismatchError, "counts", "version 1"):
        ExpertCounts(trace)
    with refused(UsageError, "no counts"):
        ExpertCounts(path / "none")


def test_damaged_counts_are_refused(paths: tuple[Path, Path], tmp_path: Path) -> None:
    counts = ExpertCounts(paths[1])
    whole = {name: (paths[1] / name).read_bytes() for name in ("manifest.json", "counts.parquet")}
    manifest = json.loads(whole["manifest.json"])
    changes: list[tuple[str, bytes]] = [
        ("counts.parquet", whole["counts.parquet"][:-7]),
        ("counts.parquet", b""),
        ("manifest.json", b"{"),
        ("manifest.json", b"[]"),
        ("manifest.json", json.dumps({**manifest, "schema_version": 2}).encode()),
        ("manifest.json", json.dumps({**manifest, "files": {}}).encode()),
        ("manifest.json", json.dumps({**manifest, "spec": {"name": "x"}}).encode()),
        ("manifest.json", json.dumps({**manifest, "spec": {**manifest["spec"], "layer_ids_L": [1]}}).encode()),
    ]
    for i, (name, content) in enumerate(changes):
        folder = tmp_path / str(i)
        folder.mkdir()
        for each, old in whole.items():
            (folder / each).write_bytes(content if each == name else old)
        with pytest.raises(MismatchError):
            ExpertCounts(folder)
    for counts_WLE in (counts.counts_WLE * 0, counts.counts_WLE[:0], -counts.counts_WLE):
        with pytest.raises(MismatchError):
            Counted(spec=counts.spec, counts_WLE=np.asarray(counts_WLE))
