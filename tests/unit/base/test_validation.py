"""Artefacts that cannot be are refused in one line: what was found, what is expected, the file, the next command."""

import json
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from moetool.base import artefact, json_files
from moetool.base.config import parse
from moetool.base.errors import CapacityError, MismatchError, MoetoolError, UsageError
from moetool.caching.plan import CachePlan
from moetool.costing.costs import CostProfile
from moetool.placement.cluster_file import load_cluster
from moetool.placement.plan import MigrationPlan, PlacementPlan
from tests.artefacts import CACHE_PLAN, MIGRATION_PLAN, PLACEMENT_PLAN, PROFILE, Json
from tests.refusals import refused

LOADERS: dict[str, tuple[Callable[[Path], object], Callable[[], Json], str]] = {
    "cache": (CachePlan.load, CACHE_PLAN, "moetool plan cache"),
    "placement": (PlacementPlan.load, PLACEMENT_PLAN, "moetool plan placement"),
    "migration": (MigrationPlan.load, MIGRATION_PLAN, "moetool plan migrate"),
    "profile": (CostProfile.load, PROFILE, "moetool profile"),
}


def put(values: Json, path: str, value: Any) -> Json:
    """The same values with another one at a dotted path."""
    *parents, last = path.split(".")
    place = values
    for name in parents:
        place = place[int(name) if isinstance(place, list) else name]
    place[int(last) if isinstance(place, list) else last] = value
    return values


@pytest.mark.parametrize("kind", LOADERS)
def test_the_examples_are_valid(kind: str, tmp_path: Path) -> None:
    load, make, _ = LOADERS[kind]
    file = tmp_path / "artefact.json"
    file.write_text(json.dumps(make()))
    load(file)


@pytest.mark.parametrize(
    ("kind", "path", "value", "says"),
    [
        ("cache", "layer_slots", [4, 4], "layer_slots: layers: found 2, expected"),
        ("cache", "layer_slots", [3, 3, 0], "layer_slots.2: found 0, expected 1 or more"),
        ("cache", "layer_slots", [4, 4, 3], "layer_slots: in all: found 11, expected at most 10"),
        ("cache", "slots", 0, "slots: found 0, expected 1 or more"),
        ("cache", "slots", 25, "slots: found 25, expected at most 24"),
        ("cache", "slots", 11, "budget_bytes: found 10,000, expected 11,000 or more for 11 slots"),
        ("cache", "slots", 10**400, "number"),
        ("cache", "budget_bytes", 20_000, "device_memory_bytes: found 13,500, expected at least the 23,500"),
        ("cache", "kv_tokens", -1, "kv_tokens: found -1, expected 0 or more"),
        ("cache", "dense_bytes", -5000, "dense_bytes: found -5,000"),
        ("cache", "prefetch_distance", -1, "prefetch_distance: found -1, expected 0 or more"),
        ("cache", "policy", "lruu", "unknown policy 'lruu': did you mean 'lru'"),
        ("cache", "policy", "../lru", "policy"),
        ("cache", "options", {"ahead": -1}, "unknown option 'ahead' of policy lru"),
        ("cache", "target_tpot_s", -1.0, "target_tpot_s: found -1.0, expected a number above 0"),
        ("cache", "requests_used", [1, 2, 4], "requests_used, requests_held_out: found 4 twice"),
        ("cache", "spec.num_experts_L", [8, 8], "spec.num_experts_L: found 2 values, expected 3"),
        ("cache", "spec.num_experts_L.0", 10**9, "spec.num_experts_L.0: found 1,000,000,000, expected at most 65,536"),
        ("cache", "spec.top_k_L.1", 0, "spec.top_k_L.1: found 0, expected 1 or more"),
        ("cache", "spec.top_k_L.1", 9, "spec.top_k_L.1: found 9, expected at most 8"),
        ("cache", "spec.layer_ids_L", [0, 2, 1], r"spec.layer_ids_L: found \[0, 2, 1\], expected rising"),
        ("cache", "spec.expert_bytes_L.2", 0, "spec.expert_bytes_L.2: found 0, expected 1 or more"),
        ("cache", "spec.score_function", "tanh", "found tanh, expected one of softmax, sigmoid"),
        ("placement", "experts_LG.0.0", [99], r"experts_LG.0.0: found \[99\], expected different ones of 0 to 7"),
        ("placement", "experts_LG.0.0", [-1, 0], r"experts_LG.0.0: found \[-1, 0\]"),
        ("placement", "experts_LG.1.0", [], "experts_LG.1: found expert 0 unplaced"),
        ("placement", "experts_LG.2", [[0, 1, 2, 3, 4, 5, 6, 7]], "found 3 layers of up to 2 GPUs, expected 3"),
        ("placement", "cluster.servers.0.gpus.0.speed", 0, "cluster|servers.0.gpus.0.speed: found 0.0"),
        ("placement", "cluster.servers", [], "servers: found 0, expected 1 or more"),
        ("placement", "starts", "last", "starts: found last, expected one of round_robin, random, first"),
        ("placement", "split", 2.0, "split: found 2.0, expected a number from 0 to 1"),
        ("placement", "value", -1.0, "value: found -1.0"),
        ("migration", "moves.0.expert", 8, "moves.0.expert: found 8, expected at most 7"),
        ("migration", "moves.0.layer", 3, "moves.0.layer: found 3, expected at most 2"),
        ("migration", "moves.0.gpu", 2, "moves.0.gpu: found 2, expected at most 1"),
        ("migration", "moves.0.source", 2, "moves.0.source: found 2, expected at most 1"),
        ("migration", "moves.0.source", 0, "moves.0.source: found 0, expected another GPU"),
        ("migration", "moves.0.kind", "teleport", "found teleport, expected one of copy, drop"),
        ("migration", "moves.0.bytes", 1, "moves.0.bytes: found 1, expected 1,000"),
        ("migration", "bytes", 5, "bytes: found 5, expected 1,000, the sum"),
        ("migration", "seconds", 9.0, "seconds: found 9.0, expected"),
        ("migration", "horizon_tokens", 0, "horizon_tokens: found 0.0, expected a number above 0"),
        ("profile", "compute.0.expert.x", [1, 1], "the knots of a curve must rise"),
        ("profile", "compute.0.expert.y", [-1.0, 1.0], "finite and 0 or more"),
        ("profile", "compute.0.expert.noise", -1.0, "residual and noise"),
        ("profile", "compute", [], "compute: found no costs"),
        ("profile", "compute.0.device", "tpu", "compute.0.device: found tpu"),
        ("profile", "num_hidden_layers", 2, "num_hidden_layers: found 2, expected 3 or more"),
        ("profile", "loads.0.threads", 0, "loads.0.threads: found 0, expected 1 or more"),
        ("profile", "loads.0.tier", "tape", "loads.0.tier: found tape, expected one of disk"),
    ],
)
def test_what_cannot_be_is_refused(kind: str, path: str, value: Any, says: str, tmp_path: Path) -> None:
    load, make, command = LOADERS[kind]
    file = tmp_path / "artefact.json"
    file.write_text(json.dumps(put(make(), path, value)))
    with pytest.raises(MismatchError, match=says) as caught:
        load(file)
    assert str(file) in str(caught.value)
    assert command in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_placement_that_does_not_fit_names_the_gpu(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(put(PLACEMENT_PLAN(), "cluster.servers.0.gpus.0.memory_bytes", 5)))
    with refused(CapacityError, "GPU 0", "5"):
        PlacementPlan.load(file)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("kind", LOADERS)
def test_numbers_that_are_none_are_refused_wherever_they_are(kind: str, number: str, tmp_path: Path) -> None:
    load, make, command = LOADERS[kind]
    file = tmp_path / "artefact.json"
    file.write_text(json.dumps({**make(), "evidence": ["here"]}).replace('"here"', number))
    with pytest.raises(MismatchError, match=f"{number[-8:]}.*{command}"):
        load(file)


def test_a_pipe_a_socket_a_device_and_a_folder_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        for load, _, command in LOADERS.values():
            for name, says in (("pipe", "a named pipe"), ("socket", "a socket")):
                with pytest.raises(MismatchError, match=f"it is {says}, expected a regular file.*{command}"):
                    load(tmp_path / name)
            with refused(MismatchError, "device"):
                load(Path("/dev/zero"))
            with refused(UsageError, "directory"):
                load(tmp_path)
    with refused(UsageError, "named pipe"):
        load_cluster(tmp_path / "pipe")
    with refused(UsageError, "Is a directory"):
        load_cluster(tmp_path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"[" * 100_000, "nested deeper"),
        (b'{"a":' * 120 + b"1" + b"}" * 120, "nested deeper"),
        (b"1" * 5000, "too large for a number"),
        (b'{"kind": "\xff"}', "utf-8"),
        (b"", "Expecting value"),
    ],
)
def test_json_is_bounded(content: bytes, says: str, tmp_path: Path) -> None:
    file = tmp_path / "file.json"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=says):
        json_files.parse_object(content)
    for load, _, _ in LOADERS.values():
        with pytest.raises(MismatchError, match=says):
            load(file)


def test_a_plan_is_of_bounded_length(tmp_path: Path) -> None:
    file = tmp_path / "file.json"
    file.write_bytes(b"{}" + b" " * artefact.MAX_BYTES)
    for load, _, _ in LOADERS.values():
        with refused(MismatchError, "67,108,864"):
            load(file)


def test_a_cluster_file_is_bounded(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    gpu = 'servers = [{name = "a", gpus = [{memory_bytes = "1GB", count = %s}]}]'
    for content, says in (
        (gpu % 10**9, "count: found 1000000000, expected 1 to 65,536"),
        (gpu % 60_000 + "\n" + 'x = ["' + "y" * 2**20 + '"]', "more than"),
        ("a." * 1000 + "a = 1", "nested deeper"),
        ("a = " + "[" * 5000, "nested deeper"),
        (gpu % "1, speed = nan", "speed: found nan"),
    ):
        file.write_text(content)
        with pytest.raises(MoetoolError, match=says):
            load_cluster(file)


def test_known_options_are_the_fields() -> None:
    @dataclass
    class Options:
        REFUSED: ClassVar[dict[str, str]] = {"former": "give present instead"}
        present: int = 0

    with pytest.raises(UsageError) as error:
        parse(Options, {"other": 1}, "--set")
    assert "present" in str(error.value) and "REFUSED" not in str(error.value)


@dataclass(frozen=True, slots=True)
class _Part:
    size: int


@dataclass(frozen=True, slots=True)
class _Settings:
    tokens: int = 0
    share: float | None = None
    mode: str = ""
    parts: tuple[_Part, ...] = ()

    def __post_init__(self) -> None:
        if self.mode == "none":
            raise ValueError("no mode")  # as the options of a user's plugin may


def test_all_wrong_settings_are_named_at_once_and_the_known_ones_listed_once() -> None:
    with refused(
        UsageError, "tokens is 'many': Input", "share is 'half': Input", "'mod'", "mean 'mode'", "'other'"
    ) as error:
        parse(_Settings, {"other": 1, "tokens": "many", "mod": "x", "share": "half"}, "--set")
    assert str(error.value).count("known: ") == 1
    with refused(UsageError, "unknown option 'other' of --set; known: mode, parts, share, tokens"):
        parse(_Settings, {"other": 1}, "--set")
    with refused(UsageError, "parts.0.size: Field required", "mean 'parts.0.size'", "parts.1.size: Field required"):
        parse(_Settings, {"parts": [{"sze": 1}, {}]}, "--set")
    with refused(UsageError, "option 'x6'", "92 more", "unknown option 'x99' of --set; known: mode") as error:
        parse(_Settings, {f"x{i}": 1 for i in range(100)}, "--set")
    assert "'x7'" not in str(error.value)
    with refused(UsageError, "--set", "no mode"):
        parse(_Settings, {"mode": "none"}, "--set")


def test_whole_numbers_beyond_64_bits_are_named_with_all_other_wrong_settings() -> None:
    large, parts = 10**20, [{"size": -(2**63)}, {"size": -(2**63) - 1}]
    wrong = f"parts.1.size is {-(2**63) - 1}"
    for tokens in (large, str(large)):
        with refused(UsageError, f"--set: tokens is {large}, expected a number of at most 64", wrong):
            parse(_Settings, {"tokens": tokens, "parts": parts}, "--set")
    with refused(UsageError, f"tokens is {large}", wrong, "share is 'half': Input should", "option 'other'"):
        parse(_Settings, {"tokens": large, "parts": parts, "share": "half", "other": 1}, "--set")
    assert parse(_Settings, {"tokens": 2**63 - 1, "parts": parts[:1], "share": large}, "--set").share == 1e20
