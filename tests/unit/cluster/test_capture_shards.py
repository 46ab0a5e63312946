"""Nodes of a capture, in this process: which errors end it, and which lose a node."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moetool.base.errors import MismatchError, MoetoolError
from moetool.base.json_files import read_json
from moetool.capture.automatic import CaptureMemory, CaptureSetup
from moetool.capture.resume import FACTS, stage_path
from moetool.capture.run import CaptureOptions, RunSetup, capture
from moetool.cluster import capture_shards
from moetool.cluster.capture_shards import CaptureNode, capture_on_cluster
from moetool.cluster.launch import parse_where
from moetool.prompts import gather
from moetool.prompts.gather import Prompt
from moetool.trace.reader import Trace

OPTIONS = CaptureOptions(max_new_tokens=2, batch_size=1, dtype="float32", keep=("topk",), threads=1)


class _Nodes:
    """The workers of a cluster, without processes.

    Attributes:
        fails: error of the node's next call of a method.
        forwarded: nodes of the calls of `forward`.
        memory: wishes of the nodes.
    """

    fails: dict[tuple[int, str], Exception]
    forwarded: list[int]
    memory: list[CaptureMemory]

    def __init__(
        self, where: Any, build: type[CaptureNode], arguments: list[dict[str, Any]], names: list[str], **more: Any
    ) -> None:
        _Nodes.memory = [one["memory"] for one in arguments]
        self._nodes = [build(**one) for one in arguments]

    def is_started(self, n: int) -> bool:
        return True

    def call(self, n: int, method: str, *args: Any, timeout_s: float) -> Any:
        if method == "forward":
            self.forwarded.append(n)
        if (error := self.fails.pop((n, method), None)) is not None:
            raise error
        return getattr(self._nodes[n], method)(*args)

    def close(self) -> None:
        for node in self._nodes:
            node.close()


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[_Nodes]]:
    monkeypatch.setattr(capture_shards, "Workers", _Nodes)
    _Nodes.fails, _Nodes.forwarded = {}, []
    yield _Nodes


def _capture(out: Path, **setup: Any) -> Any:
    return capture_on_cluster("reference", _texts(), out, OPTIONS, parse_where("local:2"), RunSetup(**setup))


def _texts() -> list[Prompt]:
    return gather.load(["chat"], max_prompts=3)


def _break(*args: Any) -> None:
    raise RuntimeError("no such kernel")


@pytest.mark.parametrize("on_node", [True, False], ids=["of the forward", "of the head"])
def test_an_unforeseen_error_ends_the_capture(
    on_node: bool, nodes: type[_Nodes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its text, after one try of each node at most."""
    if on_node:
        monkeypatch.setattr(capture_shards.BatchRun, "batch", _break)
    else:
        nodes.fails = {(n, "forward"): RuntimeError("no such kernel") for n in range(2)}
    with pytest.raises(MoetoolError, match="no such kernel") as caught:
        _capture(tmp_path / "t")
    assert "no node is left" not in str(caught.value)
    assert len(nodes.forwarded) <= 2


def test_a_lost_node_keeps_its_batches_and_leaves_the_progress(nodes: type[_Nodes], tmp_path: Path) -> None:
    """A node that does not say how far it is stays; one that does not answer a forward is lost."""
    notes: list[str] = []
    done: list[tuple[int, int]] = []
    nodes.fails = {(0, "state"): MoetoolError("late"), (1, "forward"): MoetoolError("gone")}
    _capture(tmp_path / "t", on_note=notes.append, on_progress=lambda now, total, note: done.append((now, total)))
    assert len(Trace(tmp_path / "t").requests) == 3
    assert [note for note in notes if "gone" in note] == ["gone; the others take up its batch"]
    assert sorted(set(nodes.forwarded)) == [0, 1] and nodes.forwarded.count(1) == 1
    assert done[-1][0] == done[-1][1]


def test_the_last_node_has_no_others(nodes: type[_Nodes], tmp_path: Path) -> None:
    notes: list[str] = []
    nodes.fails = {(n, "forward"): MoetoolError("gone") for n in range(2)}
    with pytest.raises(MoetoolError, match="gone"):
        _capture(tmp_path / "t", on_note=notes.append)
    assert [note for note in notes if "gone" in note] == ["gone; the others take up its batch", "gone"]


def test_a_capture_resumes_with_its_threads_and_the_heads_division_of_memory(
    nodes: type[_Nodes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupted capture of one process with two threads, by two workers whose default is one.

    Only the process that says how long it takes measures, beside the output.
    """
    folders: list[Path] = []
    monkeypatch.setattr(CaptureSetup, "cost_here", lambda setup, checkpoint, folder: folders.append(folder))
    before = torch.get_num_threads()
    with monkeypatch.context() as broken:
        batch, left = capture_shards.BatchRun.batch, iter([0])
        broken.setattr(capture_shards.BatchRun, "batch", lambda run, n: batch(run, n) if n in left else _break())
        with pytest.raises(RuntimeError):
            capture("reference", _texts(), tmp_path / "t", replace(OPTIONS, threads=2))
    kept = read_json(stage_path(tmp_path / "t") / FACTS, advice="")
    assert kept["threads"] == 2
    try:
        setup = RunSetup(resume=True)
        options = replace(OPTIONS, threads=0)
        capture_on_cluster("reference", _texts(), tmp_path / "t", options, parse_where("local:2"), setup)
    finally:
        torch.set_num_threads(before)
    assert Trace(tmp_path / "t").manifest["provenance"]["threads"] == 2
    assert len(nodes.forwarded) == 2  # one batch was kept
    limits = {memory.limit_bytes for memory in nodes.memory}
    assert len(nodes.memory) == 2 and len(limits) == 1 and None not in limits
    assert {memory.processes for memory in nodes.memory} == {1}
    assert folders == [tmp_path, tmp_path]


def test_a_node_with_other_threads_is_refused(
    nodes: type[_Nodes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture_shards, "use_threads", lambda config, threads: threads + 1)
    with pytest.raises(MismatchError, match="threads"):
        _capture(tmp_path / "t")
