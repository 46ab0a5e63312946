"""Nodes of a capture, in this process: which errors end it, and which lose a node."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moetool.base.errors import MoetoolError
from moetool.capture.run import CaptureOptions, RunSetup
from moetool.cluster import capture_shards
from moetool.cluster.capture_shards import CaptureNode, capture_on_cluster
from moetool.cluster.launch import parse_where
from moetool.prompts import gather
from moetool.trace.reader import Trace

OPTIONS = CaptureOptions(max_new_tokens=2, batch_size=1, dtype="float32", keep=("topk",), threads=1)


class _Nodes:
    """The workers of a cluster, without processes.

    Attributes:
        fails: error of the node's next call of a method.
        forwarded: calls of `forward`.
    """

    fails: dict[tuple[int, str], Exception]
    forwarded: list[int]

    def __init__(
        self, where: Any, build: type[CaptureNode], arguments: list[dict[str, Any]], names: list[str], **more: Any
    ) -> None:
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
    texts = gather.load(["chat"], max_prompts=3)
    return capture_on_cluster("reference", texts, out, OPTIONS, parse_where("local:2"), RunSetup(**setup))


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
