"""A capture that is stopped goes on, and its files are those of one that was not."""

import hashlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moetool.base.errors import CapacityError, MismatchError, MoetoolError, UsageError
from moetool.capture import run as capturing
from moetool.capture.composition import compose
from moetool.capture.job import CHUNK_TOKENS, CaptureOptions, CapturePlan, Item, plan_capture
from moetool.capture.resume import CaptureFolder, open_stage, stage_path
from moetool.capture.run import Captured, finish, forward_batches, run_batches
from moetool.capture.run import capture as capture_prompts
from moetool.models.checkpoint import Checkpoint
from moetool.models.loading import LoadedModel, load_full
from moetool.prompts.gather import Prompt
from moetool.prompts.gather import load as load_prompts
from moetool.runtime.recording.recorder import GateRecorder
from moetool.trace.reader import Trace
from tests import families
from tests.faults import every_fault, fault_at
from tests.refusals import refused

ROOT = Path(__file__).resolve().parents[2]
LENGTHS = (5, 9, 3)


@dataclass
class Case:
    """A tiny model, a capture of it in several batches, and the files of that when nothing stops it."""

    loaded: LoadedModel
    plan: CapturePlan
    files: dict[str, str]

    def run(
        self, out: Path, *, resume: bool = True, overwrite: bool = False, plan: CapturePlan | None = None
    ) -> Captured:
        with open_stage(out, plan or self.plan, resume=resume, overwrite=overwrite, on_note=_quiet) as stage:
            if not stage.finished:
                run_batches(stage, stage.missing(), lambda *_: self.loaded)
            return finish(stage, overwrite, 0.0)

    def require_whole(self, out: Path) -> None:
        """The trace is that of a run that nothing stopped, and nothing else is left."""
        assert sha256s(out) == self.files
        assert [path.name for path in out.parent.iterdir()] == [out.name]


def _quiet(note: str) -> None:
    pass


def sha256s(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """In batches of two."""
    return _case("qwen3_moe", 2, tmp_path_factory.mktemp("batches"))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Of a family that runs one request at a time."""
    return _case("qwen3_next", 1, tmp_path_factory.mktemp("alone"))


def _case(family: str, size: int, folder: Path) -> Case:
    families.save(family, folder / "model")
    for file in (ROOT / "data" / "reference-moe").glob("tokenizer*"):
        shutil.copy(file, folder / "model")
    draw = torch.Generator().manual_seed(0)
    items = [
        Item(
            i,
            Prompt(dataset="d", task="t", prompt_id=f"p{i}", text=""),
            array("i", torch.randint(3, 60, (length,), generator=draw).tolist()),
            2,
        )
        for i, length in enumerate(LENGTHS)
    ]
    keep = ("topk", "logits", "embeddings")
    lengths = [(length, length + 2) for length in LENGTHS]
    composition = compose(lengths, batch_size=size, kv_tokens=1, chunk_tokens=CHUNK_TOKENS)
    plan = CapturePlan(
        checkpoint=Checkpoint(folder / "model", name="tiny"),
        options=CaptureOptions(max_new_tokens=2, batch_size=size, keep=keep, threads=1),
        batches=[items[start:end] for start, end in composition.bounds()],
        too_long=0,
        empty=0,
        facts={"model": "tiny", "revision": "a", "prompts": "b", "threads": 1, "dtype": "float32"},
        composition=composition,
    )
    made = Case(load_full(Checkpoint.open(folder / "model"), torch.float32), plan, {})
    made.run(folder / "t", resume=False)
    made.files = sha256s(folder / "t")
    return made


def _in_bfloat16(case: Case) -> Case:
    """The same capture with --dtype bfloat16."""
    options, facts = replace(case.plan.options, dtype="bfloat16"), {**case.plan.facts, "dtype": "bfloat16"}
    loaded = load_full(case.plan.checkpoint, torch.bfloat16)
    return Case(loaded, replace(case.plan, options=options, facts=facts), {})


class Tape:
    """Takes what forwarding gives a BatchWriter, and gives it again: as deterministic as the model, and faster."""

    def __init__(self, case: Case) -> None:
        self.calls: dict[int, list[tuple[str, tuple[Any, ...]]]] = {}
        self._batch: list[tuple[str, tuple[Any, ...]]] = []
        forward_batches(case.loaded, case.plan, range(len(case.plan.batches)), self)  # type: ignore[arg-type]

    def append(self, *arguments: Any) -> None:
        self._batch.append(("append", arguments))

    def add_embedding(self, *arguments: Any) -> None:
        self._batch.append(("add_embedding", arguments))

    def end_batch(self, *arguments: Any) -> None:
        self.calls[arguments[0]] = [*self._batch, ("end_batch", arguments)]
        self._batch = []

    def play(self, loaded: LoadedModel, plan: CapturePlan, batches: Sequence[int], writer: Any, progress: Any) -> None:
        """In place of `forward_batches`."""
        for batch in batches:
            for name, arguments in self.calls[batch]:
                getattr(writer, name)(*arguments)


@pytest.fixture
def quick(case: Case, monkeypatch: pytest.MonkeyPatch) -> Case:
    """The same, without a model, and without waiting for the disk: no kill of ours cuts the power."""
    monkeypatch.setattr(capturing, "forward_batches", Tape(case).play)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    return case


@pytest.fixture
def stopped(case: Case, tmp_path: Path) -> Path:
    """Output of an interrupted capture that has finished its first batch."""
    out = tmp_path / "t"
    with (
        pytest.raises(MoetoolError),
        open_stage(out, case.plan, resume=False, overwrite=False, on_note=_quiet) as stage,
    ):
        run_batches(stage, [0], lambda *_: case.loaded)
        raise MoetoolError("stopped")
    return out


def test_after_a_fault_at_any_write_the_files_are_the_same(
    quick: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "t"

    def check() -> None:
        if out.exists():
            assert sha256s(out) == quick.files
        quick.run(out)
        quick.require_whole(out)
        shutil.rmtree(out)

    assert every_fault(lambda: quick.run(out, resume=False), check, monkeypatch) >= 20


def test_after_a_fault_while_overwriting_there_is_the_old_trace_or_the_new(
    quick: Case, stopped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_batches(CaptureFolder(stopped, quick.plan), [1], lambda *_: quick.loaded)
    ready = shutil.copytree(stage_path(stopped), stopped.with_name("ready"))
    old = replace(quick.plan, batches=quick.plan.batches[:1], facts={**quick.plan.facts, "prompts": "c"})
    quick.run(stopped.with_name("old"), plan=old)

    def prepare() -> None:
        for folder, source in ((stopped, stopped.with_name("old")), (stage_path(stopped), ready)):
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(source, folder)

    def check() -> None:
        assert sha256s(stopped) in (sha256s(stopped.with_name("old")), quick.files)
        quick.run(stopped, overwrite=True)
        assert sha256s(stopped) == quick.files
        assert sorted(path.name for path in stopped.parent.iterdir()) == ["old", "ready", "t"]
        prepare()

    prepare()
    assert every_fault(lambda: quick.run(stopped, overwrite=True), check, monkeypatch) >= 12


def test_after_a_kill_at_any_write_the_files_are_the_same(
    quick: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "t"
    for number in range(500):
        if not _killed_at(number, lambda: quick.run(out, resume=False), monkeypatch):
            break
        if out.exists():
            assert sha256s(out) == quick.files
        quick.run(out)
        quick.require_whole(out)
        shutil.rmtree(out)
    assert number >= 20


def _killed_at(number: int, run: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> bool:
    """Run in a child that is killed at its write operation of that number; False if there are not so many."""
    child = os.fork()
    if child == 0:
        try:
            with fault_at(number, monkeypatch, strike=lambda: os.kill(os.getpid(), signal.SIGKILL)):
                run()
        finally:
            os._exit(0)
    for _ in range(3000):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.WIFSIGNALED(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError("the child hangs")


def test_after_an_end_between_any_two_forwards_the_files_are_the_same(
    case: Case, alone: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = GateRecorder.hold
    for one, forwards in ((case, 4), (alone, 6)):
        for number in range(0, forwards, 2):
            out, left = tmp_path / f"{forwards} {number}" / "t", [number]

            def hold(self: Any, batch: Any, left: list[int] = left) -> None:
                if left[0] == 0:
                    raise KeyboardInterrupt
                left[0] -= 1
                real(self, batch)

            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(GateRecorder, "hold", hold)
                one.run(out)
            assert not out.exists()
            assert len(CaptureFolder(out, one.plan).missing()) == len(one.plan.batches) - number // 2
            one.run(out)
            one.require_whole(out)


def test_a_stopped_capture_says_what_is_kept_and_how_to_go_on(case: Case, tmp_path: Path) -> None:
    said: list[str] = []
    for error in (MoetoolError("full"), OSError(28, "full"), KeyboardInterrupt()):
        with (
            pytest.raises(BaseException) as caught,
            open_stage(tmp_path / "t", case.plan, resume=True, overwrite=False, on_note=said.append) as stage,
        ):
            run_batches(stage, [0], lambda *_: case.loaded)
            raise error
        text = said[-1] if isinstance(error, KeyboardInterrupt) else str(caught.value)
        assert f"2 of 3 prompts are kept in {tmp_path}/t.stage: repeat the command with --resume to continue" in text
        assert isinstance(error, KeyboardInterrupt) or "full" in text


def test_a_stopped_capture_is_not_replaced_unasked(case: Case, stopped: Path) -> None:
    for overwrite in (False, True):
        with refused(UsageError, "t.stage", "--resume"):
            case.run(stopped, resume=False, overwrite=overwrite)
    case.run(stopped)
    case.require_whole(stopped)


def test_a_stage_without_a_batch_is_begun_again(case: Case, tmp_path: Path) -> None:
    stage_path(tmp_path / "t").mkdir()
    (stage_path(tmp_path / "t") / "capture.json").write_text("{")
    case.run(tmp_path / "t", resume=False)
    case.require_whole(tmp_path / "t")


@pytest.mark.parametrize(
    ("fact", "value", "said"),
    [
        ("threads", 2, "threads was 1, and is 2 now"),
        ("dtype", "bfloat16", "dtype was float32, and is bfloat16 now"),
        ("prompts", "c", "the prompts differ"),
        ("revision", "c", "the model's weights or config differ"),
    ],
)
def test_another_capture_is_refused_with_the_difference(
    case: Case, stopped: Path, fact: str, value: object, said: str
) -> None:
    before = sha256s(stage_path(stopped))
    with pytest.raises(MismatchError, match=f"is of another capture: {said}; give the same again, or remove"):
        case.run(stopped, plan=replace(case.plan, facts={**case.plan.facts, fact: value}))
    assert sha256s(stage_path(stopped)) == before


def test_damage_is_refused(case: Case, stopped: Path) -> None:
    stage = CaptureFolder(stopped, case.plan)
    whole = stage.file(0).read_bytes()
    stage.file(0).write_bytes(whole[: len(whole) // 2])
    with refused(MismatchError, "--resume"):
        case.run(stopped)
    stage.file(0).unlink()
    case.run(stopped)
    case.require_whole(stopped)


def test_a_finished_capture_is_finished(case: Case, tmp_path: Path) -> None:
    """As when the kill came between the trace and the removal of the stage."""
    out = tmp_path / "t"
    first = case.run(out)
    CaptureFolder(out, case.plan).path.mkdir()
    again = case.run(out)
    assert replace(again, seconds=0.0) == replace(first, seconds=0.0)
    case.require_whole(out)
    with refused(UsageError, "exists"):
        case.run(out, plan=replace(case.plan, facts={**case.plan.facts, "threads": 2}))


def test_it_does_not_matter_who_forwarded_a_batch(case: Case, stopped: Path) -> None:
    """As when several processes share the batches, and another number of them goes on."""
    for batch in reversed(CaptureFolder(stopped, case.plan).missing()):
        run_batches(CaptureFolder(stopped, case.plan), [batch], lambda *_: case.loaded)
    case.run(stopped)
    case.require_whole(stopped)


@pytest.mark.follows("moetool.capture.batch_writer BatchWriter._require_numbers")
def test_a_router_that_gives_no_number_is_refused(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, layer, number = tmp_path / "t", case.loaded.layers[1], case.plan.batches[1][0].request
    forwards = [0]

    def corrupt(module: Any, args: Any, output: Any) -> Any:
        forwards[0] += 1
        corrupted = [o.clone() if isinstance(o, torch.Tensor) else o for o in output]
        if forwards[0] > 2:  # the first batch had two forwards
            corrupted[layer.logits_index][-1, 2] = float("nan")
        return tuple(corrupted)

    hook = layer.router.register_forward_hook(corrupt)
    try:
        with pytest.raises(MoetoolError) as caught:
            case.run(out)
        _in_bfloat16(case).run(tmp_path / "u" / "t")
    finally:
        hook.remove()
    shutil.rmtree(tmp_path / "u")
    said = str(caught.value)
    assert f"the router of layer {layer.layer_id} gave logits that are NaN" in said
    assert f"of prompt p{number + len(case.plan.batches[1]) - 1} of d" in said
    assert "are kept in" in said and "try another --dtype" in said
    case.run(out)
    case.require_whole(out)


@pytest.mark.follows("moetool.capture.resume CaptureFolder.copy_to")
def test_a_damaged_batch_is_captured_again(case: Case, tmp_path: Path) -> None:
    out = tmp_path / "t"
    with open_stage(out, case.plan, resume=False, overwrite=False, on_note=_quiet) as stage:
        run_batches(stage, stage.missing(), lambda *_: case.loaded)
        batch = stage.file(0)
    batch.write_bytes(batch.read_bytes()[:200])
    with refused(MismatchError, batch, "remove it", "--resume"):
        case.run(out)
    batch.unlink()
    case.run(out)
    case.require_whole(out)


@pytest.mark.follows("moetool.capture.job require_disk")
def test_a_disk_that_is_too_small_is_refused_at_once(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    least, most = case.plan.disk_bytes(range(len(case.plan.batches)))
    widths = {"token": 5 * 4 + 1, "routes": 4, "logits": 2 * 8, "embedding": 2 * 4 + 2 * 32}
    layers, top_k = case.plan.spec.num_layers, case.plan.spec.top_k_L[0]
    row = widths["token"] + layers * (widths["routes"] * top_k + widths["logits"])
    assert least == sum(LENGTHS) * row + len(LENGTHS) * widths["embedding"]
    assert most == least + len(LENGTHS) * (row + widths["embedding"])
    said: list[str] = []

    def with_free(free: int) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9 - free, free))
        with open_stage(tmp_path / "t", case.plan, resume=False, overwrite=False, on_note=said.append):
            pass

    with_free(10**8)
    assert f"{len(LENGTHS)} prompts; rows take {row} bytes/token" in said[-1] and "may not" not in said[-1]
    with_free(least)
    assert "This may not fit" in said[-1]
    with refused(CapacityError, "--out"):
        with_free(least - 1)
    assert not stage_path(tmp_path / "t").exists()
    with_free(least)  # on another disk


@pytest.mark.follows("moetool.capture.resume open_stage")
def test_a_disk_that_fills_half_way_loses_nothing(case: Case, stopped: Path) -> None:
    """For real: no file may grow beyond the smallest batch that is missing."""
    size = CaptureFolder(stopped, case.plan).file(0).stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size // 4, limits[1]))
    try:
        with refused(MoetoolError, "t.stage", "--resume"):
            case.run(stopped)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    case.run(stopped)
    case.require_whole(stopped)


def test_the_facts_of_a_capture_are_what_its_rows_depend_on(reference: Path) -> None:
    texts = load_prompts(["chat"], max_prompts=2)
    options = CaptureOptions(threads=1)
    base = plan_capture(Checkpoint.open("reference"), texts, options, pooled=False)
    others = {
        "prompts": plan_capture(Checkpoint.open("reference"), texts[::-1], options, pooled=False),
        "composition": plan_capture(Checkpoint.open("reference"), texts, replace(options, batch_size=2), pooled=False),
        "columns": plan_capture(Checkpoint.open("reference"), texts, replace(options, keep=("topk",)), pooled=False),
        "experts": plan_capture(Checkpoint.open("reference"), texts, options, pooled=True),
        "max_new_tokens": plan_capture(
            Checkpoint.open("reference"), texts, replace(options, max_new_tokens=3), pooled=False
        ),
    }
    for name, other in others.items():
        changed = {fact for fact in base.facts if base.facts[fact] != other.facts[fact]}
        assert changed - {"composition"} == {name} - {"composition"}  # the KV cache holds prompts and answers
        assert ("composition" in changed) == (name in ("composition", "max_new_tokens"))
        assert other.digest != base.digest
    assert plan_capture(Checkpoint.open(reference), texts, options, pooled=False).digest == base.digest


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    out = tmp_path_factory.mktemp("whole") / "t"
    capture_prompts("reference", load_prompts(["all"], max_prompts=4), out, _OPTIONS)
    return sha256s(out)


_OPTIONS = CaptureOptions(max_new_tokens=4, batch_size=3, threads=1)
_COMMAND = ["--data", "all", "--max-prompts", "4", "--max-new-tokens", "4", "--batch-size", "3", "--threads", "1"]


def _start(out: Path, *flags: str) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "moetool.cli.main", "capture", "reference", *_COMMAND, "--out", str(out), *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def _wait_for(batches: int, stage: Path, process: subprocess.Popen) -> None:
    while len(list(stage.glob("batch-*"))) < batches:
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--workers", "2")], ids=["one process", "two"])
def test_real_kills_and_resumes_give_the_same_files(
    flags: tuple[str, ...], tmp_path: Path, uninterrupted: dict[str, str]
) -> None:
    out = tmp_path / "t"
    for batches, delay_s in ((1, 0.0), (3, 0.03), (6, 0.1)):
        process = _start(out, "--resume", *flags)
        _wait_for(batches, stage_path(out), process)
        time.sleep(delay_s)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        with pytest.raises(MoetoolError):
            Trace(out)
    process = _start(out)
    assert process.communicate()[1].count("contains an interrupted capture") == 1
    assert process.returncode == 2
    process = _start(out, "--resume", "--workers", "1")
    assert "prompts are already captured" in process.communicate(timeout=300)[1]
    assert sha256s(out) == uninterrupted
    assert not stage_path(out).exists()


@pytest.mark.slow
def test_ctrl_c_keeps_what_there_is_and_says_how_to_go_on(tmp_path: Path, uninterrupted: dict[str, str]) -> None:
    out = tmp_path / "t"
    process = _start(out)
    _wait_for(2, stage_path(out), process)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=60)[1]
    assert process.returncode not in (0, None)
    assert "repeat the command with --resume to continue" in said
    assert "Traceback" not in said
    assert _start(out, "--resume").wait(timeout=300) == 0
    assert sha256s(out) == uninterrupted
