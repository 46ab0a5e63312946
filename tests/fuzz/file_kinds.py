"""The kinds of files that moetool reads: how to corrupt one of each, and what reads it."""

import contextlib
import hashlib
import io
import json
import re
import signal
import socket
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pyarrow.parquet as pq
import safetensors
import safetensors.numpy
from hypothesis import strategies as st

from moetool.base import assets
from moetool.base.errors import MoetoolError, UsageError
from moetool.bench import bench_result
from moetool.bench.paper.claims import read_paper
from moetool.caching.plan import CachePlan
from moetool.caching.policy import build_policy
from moetool.cli.main import main
from moetool.cluster.edge.scheduler import Scheduler, SchedulerOptions
from moetool.cluster.frames import FrameConnection, pack
from moetool.costing.costs import CostProfile
from moetool.models.checkpoint import Checkpoint
from moetool.models.files.tensor_index import read_index
from moetool.placement.cluster_file import load_cluster
from moetool.placement.plan import MigrationPlan, PlacementPlan
from moetool.prompts import dataset_recipe
from moetool.runtime.policy_state import restore_state, save_state
from moetool.trace.expert_counts import Counted, open_workload, write_counts
from moetool.trace.foreign.importing import import_trace
from moetool.trace.reader import Trace
from moetool.trace.rows import SIGNALS
from moetool.training.predictor import CARD, WEIGHTS, build, load_predictor, save
from moetool.tuning.replay import replay
from tests import artefacts, corruption, edge_workers, foreign, traces
from tests.clusters import make_cluster
from tests.fuzz import compared_kinds
from tests.synthetic import make_forward, make_spec, random_experts
from tests.tiny_shape import CONFIG

Files = dict[str, bytes]
SPEC = make_spec()
LENGTHS = [(3, 3), (2, 4)]
CLUSTER = make_cluster([[24], [24]], slot_bytes=SPEC.slot_bytes)


@dataclass(frozen=True)
class Target:
    """A kind of file.

    Attributes:
        cases: strategy of the files that a reading gets, by their names in a folder.
        read: reads them, in that folder.
        examples: cases for a test that takes seconds.
    """

    cases: Callable[[], st.SearchStrategy[Files]]
    read: Callable[[Path], object]
    examples: int = 60


def _single(name: str, strategy: Callable[[], st.SearchStrategy[bytes]], read: Callable[[Path], object]) -> Target:
    return Target(lambda: strategy().map(lambda data: {name: data}), lambda folder: read(folder / name))


def _example(make: Callable[[Path], object]) -> Files:
    """The files that `make` writes into a folder that is not there yet."""
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "example"
        make(folder)
        return {
            str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
        }


def _with_hashes(files: Files) -> Files:
    """The files with their sizes and checksums in the manifest, so that what they hold is looked at."""
    try:
        manifest = json.loads(files["manifest.json"])
        for name in manifest["files"]:
            if name in files:
                fact = {"bytes": len(files[name]), "sha256": hashlib.sha256(files[name]).hexdigest()}
                manifest["files"][name] = fact
    except (ValueError, KeyError, TypeError, RecursionError):
        return files
    return {**files, "manifest.json": json.dumps(manifest).encode()}


def _parquet(table: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return sink.getvalue()


@st.composite
def _folders(draw: st.DrawFn, files: Files) -> Files:
    """A folder of a manifest and Parquet files: one of them corrupted, its checksum right more often than not."""
    name = draw(st.sampled_from([name for name in sorted(files) if name.endswith((".json", ".parquet"))]))
    data = files[name]
    if name == "manifest.json":
        return {**files, name: draw(corruption.json_files(json.loads(data)))}
    if draw(st.integers(0, 2)):
        table = pq.read_table(io.BytesIO(data))
        data = _parquet(draw(corruption.columns(table)))
    else:
        data = draw(corruption.corrupted_bytes(data))
    changed = {**files, name: data}
    return _with_hashes(changed) if draw(st.integers(0, 5)) else changed


def _read_trace(folder: Path) -> None:
    source = open_workload(folder)
    source.describe()
    if not isinstance(source, Trace):
        return
    columns = source.columns & {"weights", "embeddings", *SIGNALS}
    for sequential in (False, True):
        for _ in source.forwards(sequential=sequential, columns=columns):
            pass
    source.check()
    with contextlib.suppress(MoetoolError):  # a trace that is none too small
        replay(source, ["lru", "belady"], [3 * source.spec.slot_bytes])


def _write_trace(folder: Path) -> None:
    traces.write(folder, traces.together(LENGTHS), LENGTHS, composition={"kind": "batch"})


def _write_counts(folder: Path) -> None:
    folder.mkdir()
    write_counts(folder, Counted(spec=SPEC, counts_WLE=np.ones((2, 3, 8), np.int64)), {"model": "made up"})


_FACTS: Mapping[str, Any] = {
    "trace": {"sha256": "0" * 64, "requests": 2, "tokens": 8},
    "requests": {"train": [0], "validation": [], "test": [1]},
    "seen_prompts": ["experts:00"],
    "tokens": {"train": 4},
    "fit": {"epochs": 1},
}
_PREDICTORS: Mapping[str, Mapping[str, Any]] = {
    "popularity": {},
    "expert_mlp": {"hidden": [8, 4]},
    "fused": {"hidden": 4, "paths": 3},
    "cascade": {"width": 8, "heads": 2, "vocabulary": 8},
    "expert_map": {},
    "next_use": {"tokens": 4},
}


def _write_predictor(name: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        folder.mkdir()
        save(build(name, SPEC, _PREDICTORS[name]), folder, _FACTS)

    return write


@st.composite
def _predictors(draw: st.DrawFn) -> Files:
    files = _example(_write_predictor(draw(st.sampled_from(sorted(_PREDICTORS)))))
    card = json.loads(files[CARD])
    if draw(st.booleans()):
        files[WEIGHTS] = draw(corruption.safetensors_files(files[WEIGHTS]))
        if draw(st.integers(0, 5)):
            card["weights"] = {"bytes": len(files[WEIGHTS]), "sha256": hashlib.sha256(files[WEIGHTS]).hexdigest()}
    else:
        files[CARD] = draw(corruption.json_files(card))
        return files
    return {**files, CARD: json.dumps(card).encode()}


def _read_predictor(folder: Path) -> None:
    predictor = load_predictor(folder)
    if predictor.spec != SPEC:
        return
    rng = np.random.default_rng(0)
    _, events = make_forward(SPEC, random_experts(SPEC, 2, rng))
    token_id_T = (1, 2)
    for event in events[:-1]:
        object.__setattr__(event.forward, "token_id_T", token_id_T)
        predictor.observe(event)
        predictor.scores(event.layer + 1)


_STATES: Mapping[str, Mapping[str, Any]] = {"foresight": {"memory": 4}, "finemoe": {}}


def _policy(name: str) -> Any:
    predictor = build("expert_map", SPEC) if name == "finemoe" else None
    return build_policy(name, SPEC, _STATES[name], 12, predictor=predictor)


@st.composite
def _states(draw: st.DrawFn) -> Files:
    name = draw(st.sampled_from(sorted(_STATES)))

    def write(folder: Path) -> None:
        folder.mkdir()
        save_state(folder / name, name, _policy(name))

    files = _example(write)
    return {one: draw(corruption.safetensors_files(data)) for one, data in files.items()}


def _read_state(folder: Path) -> None:
    for name in _STATES:
        if (folder / name).exists():
            restore_state(folder / name, name, _policy(name))


@st.composite
def _frames(draw: st.DrawFn) -> bytes:
    head: Any = draw(corruption.corrupted({"kind": "compute", "layer": 3, "experts": [1, 2]}))
    parts = draw(st.lists(st.binary(max_size=40), max_size=3))
    data = pack(head, parts) + b"".join(parts) if isinstance(head, dict) and _plain(head) else b"moe1"
    return draw(corruption.corrupted_bytes(data)) if draw(st.integers(0, 3)) else data


def _plain(head: Any) -> bool:
    try:
        json.dumps({**head, "parts": []}).encode()
    except (TypeError, ValueError):
        return False
    return True


def _read_frames(path: Path) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with contextlib.closing(theirs):
        theirs.sendall(path.read_bytes())
        theirs.shutdown(socket.SHUT_WR)
        connection = FrameConnection(_Unix(ours.detach()), limit_bytes=2**20)
        try:
            while True:
                connection.receive(time.monotonic() + 5)
        finally:
            connection.close()


class _Unix(socket.socket):
    """A Unix socket that takes the options of TCP, as a loopback connection would."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(fileno=descriptor)

    def setsockopt(self, *arguments: Any) -> None:
        pass


@cache
def _scheduler_state() -> dict[str, Any]:
    odds_NLE = edge_workers.odds(SPEC, 2)
    held = {n: {(layer, expert) for layer in range(3) for expert in range(4 * n, 4 * n + 4)} for n in range(2)}
    workers, table = edge_workers.open_cluster(SPEC, CLUSTER, held, (24, 24), odds_NLE)
    with tempfile.TemporaryDirectory() as root:
        options = SchedulerOptions(interval_s=10.0, state=str(Path(root) / "state"))
        scheduler = Scheduler(SPEC, CLUSTER, options)
        for now_s in range(100, 130, 5):
            for worker in workers.values():
                worker.serve(20, 5.0)
            scheduler.tick(table, float(now_s))
        scheduler.save()
        state: dict[str, Any] = json.loads((Path(root) / "state").read_text())
    return state


def _read_scheduler_state(path: Path) -> None:
    scheduler = Scheduler(SPEC, CLUSTER, SchedulerOptions(interval_s=10.0, state=str(path)))
    held = {n: {(layer, expert) for layer in range(3) for expert in range(8)} for n in range(2)}
    workers, table = edge_workers.open_cluster(SPEC, CLUSTER, held, (24, 24), edge_workers.odds(SPEC, 2))
    for now_s in (200.0, 205.0, 220.0):
        workers[0].serve(20, 5.0)
        scheduler.tick(table, now_s)
        json.dumps(scheduler.snapshot(), allow_nan=False)
    scheduler.save()


@cache
def _gguf() -> bytes:
    """The header of a small model of qwen3moe, and its tensors."""
    with tempfile.TemporaryDirectory() as root:
        path = Path(root) / "m.gguf"
        writer = gguf.GGUFWriter(path, "qwen3moe")
        for name, value in {"block_count": 2, "context_length": 32, "embedding_length": 32}.items():
            getattr(writer, f"add_{name}")(value)
        writer.add_feed_forward_length(32)
        writer.add_expert_feed_forward_length(32)
        writer.add_head_count(2)
        writer.add_head_count_kv(2)
        writer.add_key_length(16)
        writer.add_layer_norm_rms_eps(1e-6)
        writer.add_rope_freq_base(10000.0)
        writer.add_expert_count(4)
        writer.add_expert_used_count(2)
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list([f"t{i}" for i in range(8)])
        for layer in range(2):
            for part in ("gate", "up", "down"):
                blocks = gguf.quantize(np.ones((4, 32, 32), np.float32), gguf.GGMLQuantizationType.Q4_0)
                writer.add_tensor(
                    f"blk.{layer}.ffn_{part}_exps.weight", blocks, raw_dtype=gguf.GGMLQuantizationType.Q4_0
                )
            writer.add_tensor(f"blk.{layer}.ffn_gate_inp.weight", np.ones((4, 32), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path.read_bytes()


def _read_gguf(path: Path) -> None:
    checkpoint = Checkpoint.open(path)
    checkpoint.spec  # noqa: B018 - reading it builds it
    checkpoint.expert_files().shards.close()


def _imatrix(path: Path) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type("imatrix")
    for layer in (1, 2):
        for part in ("gate", "up", "down"):
            name = f"blk.{layer}.ffn_{part}_exps.weight"
            writer.add_tensor(f"{name}.in_sum2", np.ones((4, 8), np.float32))
            writer.add_tensor(f"{name}.counts", np.full((4, 1), 5, np.float32))
        writer.add_tensor(f"blk.{layer}.attn_q.weight.in_sum2", np.ones((1, 8), np.float32))
        writer.add_tensor(f"blk.{layer}.attn_q.weight.counts", np.full((1, 1), 10, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


_FOREIGN: Mapping[str, Callable[[Path], object]] = {
    "sglang_routed_experts": lambda path: foreign.write_lines(path, foreign.sglang_native("a")),
    "vllm_routed_experts": lambda path: foreign.write_lines(path, foreign.vllm_response("a")),
    "sglang_per_token": lambda path: foreign.save(path, foreign.recorder_pack()),
    "sglang_stat": lambda path: foreign.save(path, foreign.stat_pack()),
    "policylang": foreign.write_policylang,
    "moe_cache_lab": lambda path: foreign.write_lines(path, *foreign.moe_cache_lab_records()),
    "llamacpp_imatrix": _imatrix,
    "llamacpp_layer_expert": lambda path: path.write_text(
        "".join(f"{layer},{expert}\n" for layer in (1, 2, 3) for expert in (0, 1, 2, 3)) * 4
    ),
}
"""Files of other programs by their formats."""


@cache
def _foreign_file(format: str) -> bytes:
    with tempfile.TemporaryDirectory() as root:
        _FOREIGN[format](Path(root) / "file")
        return (Path(root) / "file").read_bytes()


@st.composite
def _foreign(draw: st.DrawFn) -> Files:
    format = draw(st.sampled_from(sorted(_FOREIGN)))
    data = _foreign_file(format)
    if format == "policylang" and draw(st.booleans()):
        return {format: _parquet(draw(corruption.columns(pq.read_table(io.BytesIO(data)))))}
    if data[:1] == b"{" and draw(st.booleans()):
        lines = data.splitlines()
        at = draw(st.integers(0, len(lines) - 1))
        lines[at] = draw(corruption.json_files(json.loads(lines[at])))
        return {format: b"\n".join(lines) + b"\n"}
    return {format: draw(corruption.corrupted_bytes(data))}


def _read_foreign(folder: Path) -> None:
    for path in sorted(folder.iterdir()):
        for format in (path.name, None):
            said = {"num_experts": 8, "expert_bytes": 1000, "first_k_dense": 1, "num_hidden_layers": 4, "top_k": 2}
            with contextlib.suppress(UsageError):
                import_trace([path], format, folder.parent / f"{folder.name}-out", settings=said, overwrite=True)


def _read_command_recipe(path: Path) -> None:
    """As a command that is refused in any case, for its trace is not there. Raises: MoetoolError of what it said."""
    said, before = io.StringIO(), sys.argv
    sys.argv = ["moetool", "train", "popularity", "--trace", "nothing", "--out", str(path.parent / "out")]
    sys.argv += ["--recipe", str(path)]
    handler = signal.getsignal(signal.SIGINT)
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            main()
    except SystemExit as ended:
        assert ended.code in (1, 2, 3, 4), (ended.code, said.getvalue())
        assert said.getvalue().count("\n") == 1, said.getvalue()
        raise MoetoolError(said.getvalue().strip()) from None
    finally:
        sys.argv = before
        signal.signal(signal.SIGINT, handler)


def _read_bench(path: Path) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        bench_result.show(bench_result.read_result(path))


def _toml_of(path: Path) -> Any:
    return tomllib.loads(path.read_text(encoding="utf-8"))


def _targets() -> dict[str, Target]:
    recipes = assets.path("recipes")
    made: dict[str, Target] = {
        "cache_plan": _single(
            "plan.json", lambda: corruption.json_files(artefacts.CACHE_PLAN()), lambda p: CachePlan.load(p).save(p)
        ),
        "placement_plan": _single(
            "plan.json",
            lambda: corruption.json_files(artefacts.PLACEMENT_PLAN()),
            lambda p: PlacementPlan.load(p).save(p),
        ),
        "migration_plan": _single(
            "plan.json",
            lambda: corruption.json_files(artefacts.MIGRATION_PLAN()),
            lambda p: MigrationPlan.load(p).save(p),
        ),
        "profile": _single("profile.json", lambda: corruption.json_files(artefacts.PROFILE()), _read_profile),
        "cluster": _single(
            "cluster.toml",
            lambda: corruption.toml_files(_toml_of(recipes / "reference" / "cluster.toml")),
            load_cluster,
        ),
        "dataset_recipe": _single(
            "recipe.toml",
            lambda: corruption.toml_files(_toml_of(recipes / "datasets" / "squad.toml")),
            lambda p: dataset_recipe.load(str(p)),
        ),
        "config": _single("config.json", lambda: corruption.json_files(CONFIG), _read_config),
        "safetensors": Target(_headers, _read_safetensors),
        "frames": _single("frames.bin", _frames, _read_frames),
        "trace": Target(lambda: _folders(_example(_write_trace)), _read_trace),
        "counts": Target(lambda: _folders(_example(_write_counts)), _read_trace),
        "predictor": Target(_predictors, _read_predictor),
        "paper_recipe": _single(
            "recipe.toml",
            lambda: corruption.toml_files(_toml_of(recipes / "papers" / "duoserve.toml")),
            lambda p: read_paper(str(p)),
        ),
        "command_recipe": _single(
            "recipe.toml",
            lambda: corruption.toml_files(_toml_of(recipes / "reference" / "train.toml")),
            _read_command_recipe,
        ),
        "scheduler_state": _single(
            "state.json", lambda: corruption.json_files(_scheduler_state()), _read_scheduler_state
        ),
        "bench_results": _single(
            "bench.json",
            lambda: st.sampled_from(list(artefacts.BENCH_RESULTS().values())).flatmap(corruption.json_files),
            _read_bench,
        ),
        "gguf": _single("m.gguf", lambda: corruption.corrupted_header(_gguf()), _read_gguf),
        "foreign": Target(_foreign, _read_foreign),
        "policy_state": Target(_states, _read_state),
    }
    return made


def _read_config(path: Path) -> None:
    Checkpoint(path.parent, weights=False).spec  # noqa: B018 - reading it builds it


@st.composite
def _headers(draw: st.DrawFn) -> Files:
    data = safetensors.numpy.save({"a": np.zeros((2, 3), np.float32), "b": np.ones(4, np.int32)}, {"format": "pt"})
    return {"model.safetensors": draw(corruption.safetensors_files(data))}


def _read_safetensors(folder: Path) -> None:
    """The safetensors library reads what is accepted; it accepts duplicate keys and arrays for tensors too."""
    data = (folder / "model.safetensors").read_bytes()
    try:
        theirs: dict[str, Any] | None = dict(safetensors.deserialize(data))
    except safetensors.SafetensorError:
        theirs = None
    try:
        index = read_index(folder)
    except MoetoolError as error:
        assert theirs is None or re.search("twice|no description", str(error)), (
            f"refused what safetensors reads: {error}"
        )
        raise
    assert theirs is not None, "accepted what safetensors refuses"
    assert index.tensors.keys() == theirs.keys()
    for name, tensor in index.tensors.items():
        stored = theirs[name]["dtype"], tuple(theirs[name]["shape"]), bytes(theirs[name]["data"])
        assert (tensor.dtype, tensor.shape, index.read(tensor)) == stored, name


def _read_profile(path: Path) -> None:
    profile = CostProfile.load(path)
    profile.save(path)
    profile.decode_s(10, profile.compute[0].device)
    if profile.loads:
        profile.load_all_s(profile.loads[0].tier)


TARGETS = _targets() | {
    name: Target(kind.files, kind.read, kind.examples) for name, kind in compared_kinds.TARGETS.items()
}
