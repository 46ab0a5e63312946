"""Profiling: every curve is there, with the model and by its config alone; what cannot be profiled is said."""

import json
import math
import queue
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moetool.base.errors import CapacityError, MoetoolError, UsageError
from moetool.costing.costs import CostProfile, Curve
from moetool.measuring.probes import disk, layer, link
from moetool.measuring.probes.prediction import prediction_curve
from moetool.measuring.probes.repeat import Timings, repeat
from moetool.measuring.profile import ProfileOptions, profile
from moetool.models.checkpoint import Checkpoint
from moetool.models.files.location import shape_names
from moetool.models.packed_linear import PackedLinear
from tests import families, quantized
from tests.refusals import refused
from tests.servers import PATIENCE_S

TINY = {
    "model_type": "deepseek_v2",
    "dtype": "bfloat16",
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "vocab_size": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "max_position_embeddings": 256,
}


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A folder that holds nothing but the config of a small model, whose first layer is dense."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    return folder


@pytest.fixture
def peer() -> Iterator[str]:
    """The address of a link server on this machine."""
    ready: queue.Queue[str] = queue.Queue()
    threading.Thread(target=link.serve, args=("0", ready.put), daemon=True).start()
    return ready.get(timeout=PATIENCE_S)


def _curves(made: CostProfile) -> Iterator[tuple[str, Curve | None]]:
    for costs in made.compute:
        for part in ("expert", "attention", "prompt_attention", "gate", "shared", "dense", "head"):
            yield f"{part} {costs.dtype}", getattr(costs, part)
    for loads in made.loads:
        yield f"{loads.tier} {loads.threads}", loads.seconds


def test_the_reference_model_with_no_time_gives_every_curve(reference: Path, tmp_path: Path, peer: str) -> None:
    done: list[int] = []
    notes: list[str] = []
    asked = ProfileOptions(device="cpu", seconds=0, peer=peer, scratch=tmp_path)
    made = profile("reference", asked, on_progress=done.append, on_note=notes.append)
    assert [note.split()[:2] for note in notes[:2]] == [["device", "cpu"], ["dtype", "bfloat16"]]
    for name, curve in _curves(made):
        if name.startswith("dense"):
            assert curve is None  # all its layers have experts
            continue
        assert curve is not None
        assert all(0 < value < math.inf for value in (*curve.x, *curve.y)), name
    assert [(costs.device, costs.dtype) for costs in made.compute] == [("cpu", "bfloat16")]
    assert [loads.threads for loads in made.loads if loads.tier == "disk"] == [1, 2, 4, 8]
    assert made.tier("disk").seconds.x[-1] == made.spec.slot_bytes
    assert made.link is not None and made.link.x[-1] == 2**24
    assert (made.config_only, made.num_hidden_layers) == (False, 8)
    assert done[-1] == 100 and done == sorted(done)
    made.check(Checkpoint.open(reference).spec)
    made.save(tmp_path / "p.json")
    assert CostProfile.load(tmp_path / "p.json") == made
    assert list(tmp_path.iterdir()) == [tmp_path / "p.json"]


def test_linear_layers_are_timed_as_the_server_keeps_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}
    families.save("qwen3_moe", tmp_path / "dense", **sizes, num_hidden_layers=2, moe_intermediate_size=32)
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    fp8 = quantized.fp8_block(128)
    quantized.quantize(tmp_path / "dense", tmp_path / "m", config, lambda name: None if "experts" in name else fp8)
    rows: list[int] = []
    real = PackedLinear.forward

    def forward(self: PackedLinear, input: torch.Tensor) -> torch.Tensor:
        rows.append(input.numel() // self.in_features)
        return real(self, input)

    monkeypatch.setattr(PackedLinear, "forward", forward)
    with Checkpoint.open(tmp_path / "m") as checkpoint:
        made = layer.layer_curves(checkpoint, torch.bfloat16, "cpu", 0.0)
        assert {1, 8, 16, 32} <= set(rows) and rows.count(1) % 4 == 0  # of one layer: query, key, value, output
        assert min(made.attention.y) > 0
        rows.clear()
        layer.layer_curves(checkpoint, torch.float32, "cpu", 0.0)
    assert rows == []


def test_a_config_alone_gives_the_same_curves(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moetool.measuring.profile.MIN_SCRATCH_BYTES", 10**6)
    made = profile(
        str(tiny / "config.json"), ProfileOptions(config_only=True, dtype="float32", seconds=0, scratch=tmp_path)
    )
    assert all(curve is not None and min(curve.y) > 0 for _, curve in _curves(made))
    assert made.config_only
    assert made.num_hidden_layers == 4
    assert made.spec.layer_ids_L == (1, 2, 3)
    assert made.spec.expert_bytes_L == (3 * 32 * 64 * 2,) * 3
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]  # the scratch file is gone


def test_a_predictor_is_timed(predictor: Any) -> None:
    curve = prediction_curve(predictor, 0)
    assert curve.x[0] == 1
    assert min(curve.y) > 0


def test_the_shapes_that_come_along_are_those_of_the_models() -> None:
    facts = {}
    for name in shape_names():
        spec = Checkpoint.open(name, weights=False).spec
        facts[name] = (spec.num_layers, spec.num_experts, max(spec.top_k_L), spec.hidden_size, spec.slot_bytes)
    assert facts == {
        "deepseek-v2-lite": (26, 64, 6, 2048, 3 * 1408 * 2048 * 2),
        "gpt-oss-20b": (24, 32, 4, 2880, 3 * 2880 * (2880 // 2 + 2880 // 32 + 2)),  # MXFP4, biases in bfloat16
        "qwen3-30b-a3b": (48, 128, 8, 2048, 3 * 768 * 2048 * 2),
    }


@pytest.mark.follows("moetool.measuring.probes.link link_curve")
def test_what_cannot_be_profiled_is_said_before_anything_is_measured(tiny: Path, tmp_path: Path) -> None:
    with refused(UsageError, "deepseek-v2-lite", "--config-only"):
        profile("deepseek-v2-lite")
    with refused(UsageError, ".safetensors", "--config-only"):
        profile(str(tiny))
    with refused(UsageError, "deepseek-v2-light", "deepseek-v2-lite"):
        profile("deepseek-v2-light", ProfileOptions(config_only=True))
    with refused(UsageError, "no config"):
        profile(str(tmp_path / "none"), ProfileOptions(config_only=True))
    with refused(UsageError, "--config-only", "--predictor"):
        profile(str(tiny), ProfileOptions(config_only=True, predictor=tmp_path))
    with refused(UsageError, "float31"):
        profile("reference", ProfileOptions(dtype="float31"))
    with refused(UsageError, "there"):
        profile("reference", ProfileOptions(peer="there"))
    with refused(MoetoolError, "127.0.0.1:1", "moetool profile --listen"):
        profile("reference", ProfileOptions(peer="1"))
    there: queue.Queue[str] = queue.Queue()
    threading.Thread(target=link.serve, args=("127.0.0.1:0", there.put), daemon=True).start()
    assert link.link_curve(there.get(timeout=PATIENCE_S), 0.0).y[0] > 0


@pytest.mark.follows("moetool.measuring.probes.layer _materialise")
def test_no_room_for_a_layer_or_on_the_disk(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "memory_bytes", lambda: (10**6, 1000))
    with refused(CapacityError, "1,000") as caught:
        layer.layer_curves(Checkpoint.open(tiny), torch.float32, "cpu", 0)
    needed = int(str(caught.value).split()[0].replace(",", ""))
    monkeypatch.setattr(layer, "memory_bytes", lambda: (10**6, needed - 1))
    with refused(CapacityError, "narrower --dtype"):
        layer.layer_curves(Checkpoint.open(tiny), torch.float32, "cpu", 0)
    layer.layer_curves(Checkpoint.open(tiny), torch.bfloat16, "cpu", 0)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(10, 5, 5))
    with refused(CapacityError, "5 bytes free"), disk.scratch_shards(tiny, 100):
        pass


def test_everything_is_measured_once_and_then_whatever_had_the_least_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("moetool.measuring.probes.repeat.time.perf_counter", lambda: clock[0])
    log: list[str] = []

    def step(name: str, seconds: float) -> Any:
        def run() -> None:
            log.append(name)
            clock[0] += seconds

        return run

    repeat([step("dear", 5), step("cheap", 1)], seconds=0)
    assert log == ["dear", "cheap"]
    log.clear()
    repeat([step("dear", 5), step("cheap", 1)], seconds=13, most=4)
    assert log == ["dear", "cheap", "cheap", "cheap", "cheap", "dear"]


def test_the_first_timing_is_a_warm_up_unless_it_is_the_only_one() -> None:
    timings = Timings()
    for seconds in (9.0, 2.0, 2.0):
        timings.add(1, seconds)
    timings.add(2, 7.0)
    assert timings.curve().y == (2, 7)


def test_a_client_that_asks_too_much_is_dropped_and_the_next_one_served(peer: str) -> None:
    import socket

    host, port = link.parse_peer(peer)
    for header in (b"\xff" * 8, b"abc"):
        with socket.create_connection((host, port), timeout=PATIENCE_S) as client:
            client.sendall(header)
            client.shutdown(socket.SHUT_WR)
            assert client.recv(1) == b""
    assert min(link.link_curve(peer, 0).y) > 0
