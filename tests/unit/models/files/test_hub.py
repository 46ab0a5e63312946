"""Downloading from the hub: only what is read, whole or refused, continued after an interruption."""

import fcntl
import hashlib
import json
import shutil
import threading
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moetool.base.errors import CapacityError, MismatchError, MoetoolError, UsageError
from moetool.models.checkpoint import Checkpoint
from moetool.models.files import hub as downloads
from moetool.models.files import hub_transfers
from moetool.models.files.hub import HubName, is_downloaded, parse_hub_name, with_revision
from moetool.models.files.hub_transfers import Blob, Transfers
from moetool.models.files.location import locate, locate_config
from tests import gguf_oracle
from tests.command_line import exit_code
from tests.hub import COMMIT, Hub, running
from tests.refusals import refused

NAME = "org/small-moe"


@pytest.fixture
def hub(tmp_path: Path, reference: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """With the embedded model in two shards, among files that nobody needs."""
    folder = tmp_path / "there"
    shutil.copytree(reference, folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :])):
        save_file({name: tensors[name] for name in part}, folder / f"model-{number}.safetensors", {"format": "pt"})
        weight_map |= dict.fromkeys(part, f"model-{number}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    save_file({"a": torch.zeros(4)}, folder / "consolidated.safetensors")
    for unwanted in ("pytorch_model.bin", "original/weights.pth", "onnx/model.safetensors", "README.md", "LICENSE.txt"):
        (folder / unwanted).parent.mkdir(exist_ok=True)
        (folder / unwanted).write_text("not needed")
    with running(tmp_path / "cache", monkeypatch) as made:
        made.folders[NAME] = folder
        yield made


def _downloaded(hub: Hub) -> set[str]:
    return {path for path, _ in hub.gets}


def test_only_the_files_that_are_read_come(hub: Hub, reference: Path) -> None:
    with Checkpoint.open(NAME) as checkpoint:
        assert checkpoint.spec.name == "qwen3_moe:small-moe" and checkpoint.name == NAME
        assert checkpoint.revision == Checkpoint.open(reference).revision
        assert checkpoint.tokenizer("hello")["input_ids"]
    weights = {"model-0.safetensors", "model-1.safetensors"}
    assert weights < _downloaded(hub)
    assert not {"consolidated.safetensors", "pytorch_model.bin", "original/weights.pth"} & _downloaded(hub)
    assert not {"onnx/model.safetensors", "README.md", "LICENSE.txt"} & _downloaded(hub)
    hub.gets.clear()
    locate(f"{NAME}@{COMMIT}")
    assert not hub.gets


def test_a_single_file_comes_before_an_index(
    hub: Hub, reference: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    shutil.copy(reference / "model.safetensors", hub.folders[NAME])
    with Checkpoint.open(NAME) as checkpoint:
        assert [file.name for file in checkpoint.index.files] == ["model.safetensors"]
    assert not {"model-0.safetensors", "model-1.safetensors"} & _downloaded(hub)
    said = " ".join(capsys.readouterr().err.split())
    assert "two sets of weights" in said and "model-0.safetensors" in said
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert (locate(NAME) / "model.safetensors").is_file()


@pytest.mark.parametrize("file", ["adapter_config.json", "pytorch_model.bin"])
def test_a_repository_without_clear_weights_is_refused_before_they_come(hub: Hub, file: str) -> None:
    there = hub.folders[NAME]
    if file.startswith("adapter"):
        (there / file).write_text("{}")
    else:
        (there / "model.safetensors.index.json").unlink()
    with pytest.raises(UsageError, match=file):
        locate(NAME)
    assert not any(path.endswith(".safetensors") for path in _downloaded(hub))


@pytest.mark.follows("moetool.models.files.hub _Download._weights")
@pytest.mark.parametrize(("files", "said"), [({}, "names no files"), ({"x": "gone.safetensors"}, "gone.safetensors")])
def test_an_index_without_its_files_is_refused_and_another_revision_helps(
    hub: Hub, files: dict[str, str], said: str
) -> None:
    index = hub.folders[NAME] / "model.safetensors.index.json"
    whole = index.read_text()
    index.write_text(json.dumps({"weight_map": files}))
    with refused(MismatchError, *said.split(), "--revision"):
        locate(NAME)
    index.write_text(whole)
    hub.commit = "b" * 40  # a later revision of the repository
    assert (locate(with_revision(NAME, hub.commit)) / "model-0.safetensors").is_file()


def test_the_config_alone_needs_no_weights(hub: Hub) -> None:
    checkpoint = Checkpoint.open(NAME, weights=False)
    assert checkpoint.spec.num_layers and checkpoint.tokenizer is not None
    assert not any(path.endswith(".safetensors") for path in _downloaded(hub))


def test_too_little_memory_is_refused_before_the_weights_come(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(monkeypatch, "serve", NAME, "--port", "0", "--device-memory", "1MB") == 4
    assert "is too small for" in " ".join(capsys.readouterr().err.split())
    assert "config.json" in _downloaded(hub) and not any(path.endswith(".safetensors") for path in _downloaded(hub))
    assert not is_downloaded(HubName(NAME, "", ""))
    locate(NAME)
    assert is_downloaded(HubName(NAME, "", ""))


def test_one_gguf_file_is_asked_for_by_name(hub: Hub) -> None:
    there = hub.folders[NAME]
    (there / "config.json").unlink()
    for quantization in ("Q4", "Q8", "big-00001-of-00002", "big-00002-of-00002", "big-00001-of-00003"):
        (there / f"m-{quantization}.gguf").write_bytes(quantization.encode() * 1000)
    assert locate(f"{NAME}/m-Q4.gguf").read_bytes() == b"Q4" * 1000
    assert _downloaded(hub) == {"m-Q4.gguf"}
    assert locate(f"{NAME}/m-big-00001-of-00002.gguf").is_file()
    assert _downloaded(hub) == {"m-Q4.gguf", "m-big-00001-of-00002.gguf", "m-big-00002-of-00002.gguf"}
    with refused(UsageError, 5, "org/small-moe/m-Q4.gguf", "org/small-moe/m-Q8.gguf"):
        locate(NAME)
    with refused(UsageError, "GGUF"):
        locate(f"{NAME}/m-Q5.gguf")


GGUF = Path(__file__).parents[3] / "golden" / "gguf" / "qwen3moe.gguf"
_FIRST = 2048  # bytes of a header that are asked for at first; this one has some thousands


@pytest.fixture
def gguf_hub(hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Hub:
    """With a GGUF model in one file and in three."""
    monkeypatch.setattr(downloads, "FIRST_BYTES", _FIRST)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    there = hub.folders[NAME]
    (there / "config.json").unlink()
    shutil.copy(GGUF, there / "one.gguf")
    gguf_oracle.split(GGUF, there)
    return hub


@pytest.mark.parametrize("ranges", [True, False])
def test_of_a_gguf_file_the_header_alone_comes(gguf_hub: Hub, ranges: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf_hub.ranges = ranges
    expected = Checkpoint.open(GGUF, weights=False)
    found = Checkpoint.open(f"{NAME}/one.gguf", weights=False)
    assert found.spec.expert_bytes_L == expected.spec.expert_bytes_L and found.revision == expected.revision
    assert len(gguf_hub.gets) == 2  # four times as many bytes each time, from where the last ended
    assert not ranges or gguf_hub.sent["one.gguf"] <= 4 * _FIRST < GGUF.stat().st_size
    gguf_hub.gets.clear()
    assert Checkpoint.open(f"{NAME}/one.gguf@{COMMIT}", weights=False).spec == found.spec
    assert not gguf_hub.gets
    gguf_hub.folders.clear()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert Checkpoint.open(f"{NAME}/one.gguf", weights=False).spec == found.spec
    with refused(UsageError, "HF_HUB_OFFLINE"):
        Checkpoint.open(f"{NAME}/one.gguf")


def test_of_several_gguf_files_all_headers_come(gguf_hub: Hub) -> None:
    name = f"{NAME}/m-00002-of-00003.gguf"
    found = Checkpoint.open(name, weights=False)
    assert found.spec.expert_bytes_L == Checkpoint.open(GGUF, weights=False).spec.expert_bytes_L
    assert _downloaded(gguf_hub) == {f"m-0000{n}-of-00003.gguf" for n in (1, 2, 3)}
    assert sum(gguf_hub.sent.values()) < GGUF.stat().st_size


def test_a_header_is_continued_where_its_connection_broke(gguf_hub: Hub) -> None:
    gguf_hub.breaks["one.gguf"] = [1000, 0, 500]
    assert Checkpoint.open(f"{NAME}/one.gguf", weights=False).spec.num_layers
    gguf_hub.breaks["m-00001-of-00003.gguf"] = [0] * 9
    with refused(MoetoolError, "hub"):
        Checkpoint.open(f"{NAME}/m-00001-of-00003.gguf", weights=False)


def test_a_gguf_file_that_is_there_is_not_asked_for_again(gguf_hub: Hub) -> None:
    whole = locate(f"{NAME}/one.gguf")
    gguf_hub.gets.clear()
    assert locate_config(f"{NAME}/one.gguf") == whole and not gguf_hub.gets


def test_a_damaged_gguf_file_is_refused_by_its_header(gguf_hub: Hub) -> None:
    (gguf_hub.folders[NAME] / "short.gguf").write_bytes(GGUF.read_bytes()[:3000])
    (gguf_hub.folders[NAME] / "other.gguf").write_bytes(b"text" * 9999)
    for file, problem in (("short", "inside its header"), ("other", "is not a GGUF file")):
        with pytest.raises(MismatchError, match=problem):
            Checkpoint.open(f"{NAME}/{file}.gguf", weights=False)


def test_a_connection_that_breaks_is_continued_where_it_broke(hub: Hub) -> None:
    hub.breaks["model-1.safetensors"] = [100_000, 50_000]
    assert Checkpoint.open(NAME).index.tensors
    assert [first for path, first in hub.gets if path == "model-1.safetensors"] == [0, 100_000, 150_000]


def test_the_next_command_continues_what_an_earlier_one_left(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    hub.breaks["model-1.safetensors"] = [100_000, *[0] * 40]
    with refused(MoetoolError, "model-1.safetensors", "100.0") as caught:
        locate(NAME)
    assert "\n" not in str(caught.value)
    hub.breaks.clear()
    hub.gets.clear()
    capsys.readouterr()
    path = locate(NAME)
    assert [(file, first) for file, first in hub.gets if file.endswith("1.safetensors")] == [
        ("model-1.safetensors", 100_000)
    ]
    assert "100.0 kB of them already downloaded" in capsys.readouterr().err
    for number in range(2):
        file = f"model-{number}.safetensors"
        assert (path / file).read_bytes() == (hub.folders[NAME] / file).read_bytes()


def test_bytes_that_are_not_the_hubs_are_never_used(hub: Hub, tmp_path: Path) -> None:
    hub.corrupts.add("model-0.safetensors")
    with refused(MismatchError, "model-0.safetensors", "sha256"):
        locate(NAME)
    hub.corrupts.clear()
    file = locate(NAME) / "model-0.safetensors"
    assert hashlib.sha256(file.read_bytes()).hexdigest() == file.resolve().name


def test_a_branch_that_moves_during_a_download_gives_the_commit_that_was_asked_for(hub: Hub) -> None:
    moved = "beef" + "0" * 36
    hub.moves["model-1.safetensors"] = moved
    path = locate(NAME)
    reference = path.parents[1] / "refs" / "main"
    assert path.name == COMMIT and (path / "model-1.safetensors").is_file() and reference.read_text() == COMMIT
    assert locate(NAME).name == moved == reference.read_text()


@pytest.fixture
def transfers(hub: Hub, tmp_path: Path) -> tuple[Transfers, Blob, Path]:
    """Transfers into a folder, a file for them, and its partial file of 100 bytes."""
    from huggingface_hub import constants

    content = (hub.folders[NAME] / "model-1.safetensors").read_bytes()
    file = Blob("model-1.safetensors", len(content), hashlib.sha256(content).hexdigest())
    partial = tmp_path / f"{file.sha256}{hub_transfers.PARTIAL}"
    partial.write_bytes(content[:100])
    return Transfers(NAME, COMMIT, constants.ENDPOINT, tmp_path, lambda megabytes: None), file, partial


def test_a_download_goes_on_from_where_another_process_left_it(
    hub: Hub, transfers: tuple[Transfers, Blob, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, file, partial = transfers
    content = (hub.folders[NAME] / file.path).read_bytes()
    said: list[str] = []
    with partial.open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)

        def narrate(line: str) -> None:
            said.append(line)
            other.write(content[100:500])
            other.close()

        monkeypatch.setattr(hub_transfers.tables, "narrate", narrate)
        made.run([file])
    assert said == [f"moetool: waiting for another download of {NAME}/{file.path}"]
    assert hub.gets == [(file.path, 500)] and partial.with_name(file.sha256).read_bytes() == content


def test_an_interruption_ends_the_wait_for_another_process(
    hub: Hub, transfers: tuple[Transfers, Blob, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, file, partial = transfers
    waits = threading.Event()
    monkeypatch.setattr(hub_transfers.tables, "narrate", lambda line: waits.set())
    with partial.open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)

        def interrupt(*_: object, **__: object) -> None:
            if not waits.wait(20):
                other.close()
            raise KeyboardInterrupt

        monkeypatch.setattr(hub_transfers, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            made.run([file])
        assert waits.is_set() and not hub.gets and partial.stat().st_size == 100


def test_a_disk_that_is_too_small_is_found_before_anything_comes(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(downloads.shutil, "disk_usage", lambda path: usage(0, 0, 1_000_000))
    with refused(CapacityError, "org/small-moe", "1.0 MB"):
        locate(NAME)
    assert not any(path.endswith(".safetensors") for path in _downloaded(hub))


def test_a_disk_that_fills_up_on_the_way_is_said(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("huggingface_hub.file_download.http_get", full)
    with refused(CapacityError, "HF_HOME"):
        locate(NAME)


def test_what_the_hub_refuses_is_one_line_each(hub: Hub) -> None:
    hub.folders["org/gated"] = hub.folders[NAME]
    hub.gated.add("org/gated")
    for model, said in (
        ("nobody/nothing", "has no such model, or it is private"),
        ("org/gated", "it is gated; accept its terms at http"),
        (f"{NAME}@no-such-branch", "it has no revision 'no-such-branch'"),
    ):
        for find in (locate, locate_config):
            with pytest.raises(UsageError) as caught:
                find(model)
            assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "answer",
    [b"<html>Log in to the network</html>", b"", b"[]", b'{"sha": 7}', b'{"id": "a/b", "sha": "../../x"}', b"\xff"],
)
def test_what_answers_and_is_no_hub_is_one_line(hub: Hub, answer: bytes) -> None:
    hub.instead = answer
    with pytest.raises(MoetoolError) as caught:
        locate("somebody/else")
    assert "does not answer as a hub (" in str(caught.value) and "HF_ENDPOINT" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_without_the_hub_the_cache_is_used(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from huggingface_hub import constants

    path = locate(NAME)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert locate(NAME) == locate(f"{NAME}@{COMMIT}") == path
    assert "cannot be reached" in capsys.readouterr().err
    with refused(MoetoolError, "org/other"):
        locate("org/other")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert locate(NAME) == path
    with refused(UsageError, "org/other", "HF_HUB_OFFLINE"):
        locate("org/other")
    (path / "model-1.safetensors").unlink()
    with refused(UsageError, "model-1.safetensors", "HF_HUB_OFFLINE"):
        locate(NAME)


def test_names_on_the_hub() -> None:
    assert parse_hub_name("a/b") == HubName("a/b", "", "")
    assert parse_hub_name("a/b@refs/pr/1") == HubName("a/b", "", "refs/pr/1")
    assert parse_hub_name("a/b/q/c.gguf@v1") == HubName("a/b", "q/c.gguf", "v1")
    for wrong in ("a", "./a/b", "a/b/c", "/a/b", "a/b@../../x", "a/b@", "a/../c.gguf"):
        assert parse_hub_name(wrong) is None, wrong
    assert with_revision("a/b", "v1") == "a/b@v1"
    with refused(UsageError, "hub"):
        with_revision("reference", "v1")
