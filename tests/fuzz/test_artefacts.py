"""Spoilt files of every kind that moetool reads: each is read, or refused in one line, soon and in little memory.

What once failed lies in `corpus/artefacts`, one case a file, and is read again by every `make test`.
"""

import base64
import contextlib
import hashlib
import io
import itertools
import json
import resource
import shutil
import signal
import socket
import tempfile
import time
import tomllib
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import safetensors.numpy
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

from moetool import assets, durable
from moetool.cache_plan import CachePlan
from moetool.caching._policy import build_policy
from moetool.cluster.frames import FrameConnection, pack
from moetool.costing.costs import CostProfile
from moetool.errors import MoetoolError
from moetool.learning.predictor import CARD, WEIGHTS, build, load_predictor, save
from moetool.models.checkpoint import Checkpoint
from moetool.models.tensor_index import read_index
from moetool.placement._cluster_file import load_cluster
from moetool.placement._placement_plan import MigrationPlan, PlacementPlan
from moetool.prompts import dataset_recipe
from moetool.reference.training_recipe import read_recipe
from moetool.runtime.policy_state import restore_state, save_state
from moetool.trace.expert_counts import Counted, open_workload, write_counts
from moetool.trace.reader import Trace
from moetool.trace.rows import SIGNALS
from moetool.tuning.replay import replay
from tests import artefacts, spoiling, traces
from tests.synthetic import make_forward, make_spec, random_experts
from tests.tiny_shape import CONFIG

CORPUS = Path(__file__).parent / "corpus" / "artefacts"
SECONDS = 20
MEMORY_BYTES = 2**30
Files = dict[str, bytes]
SPEC = make_spec()
LENGTHS = [(3, 3), (2, 4)]


@dataclass(frozen=True)
class Target:
    """A kind of file.

    Attributes:
        cases: strategy of the files that a reading gets, by their names in a folder.
        read: reads them, in that folder.
    """

    cases: Callable[[], st.SearchStrategy[Files]]
    read: Callable[[Path], object]


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
    """A folder of a manifest and Parquet files: one of them spoilt, its checksum right more often than not."""
    name = draw(st.sampled_from([name for name in sorted(files) if name.endswith((".json", ".parquet"))]))
    data = files[name]
    if name == "manifest.json":
        return {**files, name: draw(spoiling.json_files(json.loads(data)))}
    if draw(st.integers(0, 2)):
        table = pq.read_table(io.BytesIO(data))
        data = _parquet(draw(spoiling.columns(table)))
    else:
        data = draw(spoiling.spoilt_bytes(data))
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
    "next_use": {"hidden": 4},
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
        files[WEIGHTS] = draw(spoiling.safetensors_files(files[WEIGHTS]))
        if draw(st.integers(0, 5)):
            card["weights"] = {"bytes": len(files[WEIGHTS]), "sha256": hashlib.sha256(files[WEIGHTS]).hexdigest()}
    else:
        files[CARD] = draw(spoiling.json_files(card))
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


_STATES: Mapping[str, Mapping[str, Any]] = {"foresight": {"hidden": 4, "memory": 4}, "finemoe": {}}


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
    return {one: draw(spoiling.safetensors_files(data)) for one, data in files.items()}


def _read_state(folder: Path) -> None:
    for name in _STATES:
        if (folder / name).exists():
            restore_state(folder / name, name, _policy(name))


@st.composite
def _frames(draw: st.DrawFn) -> bytes:
    head: Any = draw(spoiling.spoilt({"kind": "compute", "layer": 3, "experts": [1, 2]}))
    parts = draw(st.lists(st.binary(max_size=40), max_size=3))
    data = pack(head, parts) + b"".join(parts) if isinstance(head, dict) and _plain(head) else b"moe1"
    return draw(spoiling.spoilt_bytes(data)) if draw(st.integers(0, 3)) else data


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


def _toml_of(path: Path) -> Any:
    return tomllib.loads(path.read_text(encoding="utf-8"))


def _targets() -> dict[str, Target]:
    recipes = assets.path("recipes")
    made: dict[str, Target] = {
        "cache_plan": _single(
            "plan.json", lambda: spoiling.json_files(artefacts.CACHE_PLAN()), lambda p: CachePlan.load(p).save(p)
        ),
        "placement_plan": _single(
            "plan.json",
            lambda: spoiling.json_files(artefacts.PLACEMENT_PLAN()),
            lambda p: PlacementPlan.load(p).save(p),
        ),
        "migration_plan": _single(
            "plan.json",
            lambda: spoiling.json_files(artefacts.MIGRATION_PLAN()),
            lambda p: MigrationPlan.load(p).save(p),
        ),
        "profile": _single("profile.json", lambda: spoiling.json_files(artefacts.PROFILE()), _read_profile),
        "cluster": _single(
            "cluster.toml", lambda: spoiling.toml_files(_toml_of(recipes / "reference" / "cluster.toml")), load_cluster
        ),
        "dataset_recipe": _single(
            "recipe.toml",
            lambda: spoiling.toml_files(_toml_of(recipes / "datasets" / "squad.toml")),
            lambda p: dataset_recipe.load(str(p)),
        ),
        "training_recipe": _single(
            "recipe.toml",
            lambda: spoiling.toml_files(_toml_of(recipes / "reference" / "train.toml")),
            lambda p: read_recipe(p, {}),
        ),
        "config": _single("config.json", lambda: spoiling.json_files(CONFIG), _read_config),
        "safetensors": Target(_headers, lambda folder: read_index(folder)),
        "frames": _single("frames.bin", _frames, _read_frames),
        "trace": Target(lambda: _folders(_example(_write_trace)), _read_trace),
        "counts": Target(lambda: _folders(_example(_write_counts)), _read_trace),
        "predictor": Target(_predictors, _read_predictor),
        "policy_state": Target(_states, _read_state),
    }
    return made


def _read_config(path: Path) -> None:
    Checkpoint(path.parent, weights=False).spec  # noqa: B018 - reading it builds it


@st.composite
def _headers(draw: st.DrawFn) -> Files:
    data = safetensors.numpy.save({"a": np.zeros((2, 3), np.float32), "b": np.ones(4, np.int32)}, {"format": "pt"})
    return {"model.safetensors": draw(spoiling.safetensors_files(data))}


def _read_profile(path: Path) -> None:
    profile = CostProfile.load(path)
    profile.save(path)
    profile.decode_s(10, profile.compute[0].device)
    if profile.loads:
        profile.load_all_s(profile.loads[0].tier)


TARGETS = _targets()


class TooLong(BaseException):
    """A reading took longer than it may. No Exception, so that nobody takes it for a damaged file."""


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Let a block run for `SECONDS` and take `MEMORY_BYTES` more address space than there is taken."""

    def late(number: int, frame: FrameType | None) -> None:
        raise TooLong(f"more than {SECONDS} s")

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before, hard = resource.getrlimit(resource.RLIMIT_AS)
    old = signal.signal(signal.SIGALRM, late)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY_BYTES, hard))
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
        resource.setrlimit(resource.RLIMIT_AS, (before, hard))


def wrong_with(target: Target, files: Files) -> str | None:
    """What is wrong with reading these files, in words; None where they are read, or refused in one line."""
    folder = Path(tempfile.mkdtemp(prefix="moetool-fuzz-"))
    try:
        for name, data in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
        try:
            with bounded():
                target.read(folder)
        except MoetoolError as error:
            said = str(error).strip()
            if not said or "\n" in said or len(said) > 1000:
                return f"a message of {len(said)} characters and {said.count(chr(10)) + 1} lines: {said[:200]!r}"
        except (Exception, TooLong) as error:
            last = traceback.extract_tb(error.__traceback__)[-3:]
            where = " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(last))
            return f"{type(error).__name__}: {str(error)[:200]} ({where})"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return None


def keep(name: str, files: Files) -> Path:
    """Add a case to the corpus."""
    text = json.dumps({file: base64.b64encode(data).decode() for file, data in files.items()}, indent=0)
    path = CORPUS / name / f"found-{hashlib.sha256(text.encode()).hexdigest()[:12]}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    durable.write_text(path, text + "\n")
    return path


def look_for(name: str, *, seed: int, examples: int = 10**6, deadline: float = float("inf")) -> int:
    """Read spoilt files of a kind; gives how many.

    Effects: the smallest case that is found goes to the corpus.

    Raises:
        AssertionError: one of them was neither read nor refused in one line.
    """
    target, tried = TARGETS[name], 0
    found: list[Files] = []

    @seeded(seed)
    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    @given(target.cases())
    def read(files: Files) -> None:
        nonlocal tried
        if time.monotonic() > deadline and not found:
            return
        tried += 1
        if wrong := wrong_with(target, files):
            found.append(files)
            raise AssertionError(f"{name}: {wrong}")

    try:
        read()
    except AssertionError as error:
        raise AssertionError(f"{error}; kept in {keep(name, found[-1])}") from None
    return tried


@pytest.mark.parametrize("path", sorted(CORPUS.glob("*/*.json")), ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_corpus(path: Path) -> None:
    files = {name: base64.b64decode(data) for name, data in json.loads(path.read_text()).items()}
    assert wrong_with(TARGETS[path.parent.name], files) is None


@pytest.mark.parametrize("name", TARGETS)
def test_a_few_spoilt_files(name: str) -> None:
    look_for(name, seed=0, examples=60)


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_spoilt_files(name: str, fuzz_seconds: float, fuzz_seed: int) -> None:
    deadline, tried = time.monotonic() + fuzz_seconds, 0
    for seed in itertools.count(fuzz_seed):
        tried += look_for(name, seed=seed, examples=500, deadline=deadline)
        if time.monotonic() > deadline:
            break
    print(f"{tried} spoilt files of {name}")
