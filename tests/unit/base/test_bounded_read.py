"""Files that stand for other ones, told by their content wherever moetool opens a file."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from moetool.base.bounded_read import require_itself
from moetool.base.errors import MismatchError, MoetoolError
from moetool.models.checkpoint import Checkpoint
from moetool.models.files.safetensors_header import read_header
from moetool.models.loading import load_lazy
from moetool.prompts.gather import gather
from moetool.trace.foreign.importing import import_trace
from moetool.trace.reader import Trace
from tests import families, synthetic_routes
from tests.refusals import refused

POINTER = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 4967215360\n"
)
PAGE = b"<!DOCTYPE html>\n<html><head><title>Sign in</title></head></html>\n"
HOLE = bytes(4096)


def _load(folder: Path) -> None:
    with Checkpoint.open(folder) as checkpoint:
        load_lazy(checkpoint, torch.float32)
        assert checkpoint.tokenizer


def _tokens(folder: Path) -> None:
    with Checkpoint.open(folder) as checkpoint:
        assert checkpoint.tokenizer


@pytest.mark.parametrize("content", [POINTER, PAGE, HOLE])
@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("config.json", _load),
        ("model.safetensors", _load),
        ("tokenizer.json", _tokens),
        ("tokenizer_config.json", _tokens),
        ("chat_template.jinja", _tokens),
        ("m.gguf", lambda folder: _tokens(folder / "m.gguf")),
        ("p.jsonl", lambda folder: gather([str(folder / "p.jsonl")])),
        ("p.parquet", lambda folder: gather([str(folder / "p.parquet")])),
        ("r.pt", lambda folder: import_trace([folder / "r.pt"], None, folder / "t")),
        ("r.csv", lambda folder: import_trace([folder / "r.csv"], "route_csv", folder / "t")),
    ],
)
def test_a_file_that_stands_for_another_is_named_for_what_it_is(
    name: str, read: Callable[[Path], None], content: bytes, tmp_path: Path
) -> None:
    if not name.startswith(("m.", "p.", "r.")):
        families.save("qwen3_moe", tmp_path)
    (tmp_path / name).write_bytes(content)
    with refused(MismatchError, tmp_path / name, {POINTER: "git lfs pull", PAGE: "web page", HOLE: "zeros"}[content]):
        read(tmp_path)


@pytest.mark.parametrize("page", [PAGE, b"  <html><body>What is wrong here?</body></html>\n"])
def test_a_text_prompt_may_be_a_web_page(page: bytes, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_bytes(page)
    (prompt,) = gather([str(tmp_path / "p.txt")]).prompts
    assert prompt.text == page.decode().rstrip()
    for content, fact in ((POINTER, "git lfs pull"), (HOLE, "zeros")):
        (tmp_path / "p.txt").write_bytes(content)
        with refused(MismatchError, tmp_path / "p.txt", fact):
            gather([str(tmp_path / "p.txt")])


def test_a_trace_of_pointers(tmp_path: Path) -> None:
    synthetic_routes.write_trace(tmp_path / "t", num_requests=1)
    (tmp_path / "t" / "requests.parquet").write_bytes(POINTER)
    with refused(MismatchError, "requests.parquet", "git lfs pull"):
        Trace(tmp_path / "t")


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"version = 1\n", b"<p>html", bytes(100), b"\x93NUMPY\x01\x00", b"GGUF"]
)
def test_other_files_stand_for_themselves(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(content)
    require_itself(tmp_path / "f")
    require_itself(tmp_path)
    require_itself(tmp_path / "none")


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5, 0.99])
def test_half_a_download_is_said_to_be_truncated(share: float, tmp_path: Path) -> None:
    whole = save({f"layer.{i}.weight": torch.ones(3) for i in range(20)})
    (tmp_path / "f.safetensors").write_bytes(whole[: int(len(whole) * share) + 1])
    with refused(MismatchError, tmp_path / "f.safetensors", "truncated"):
        read_header(tmp_path / "f.safetensors")


def test_pointers_that_nobody_reads_do_not_matter(tmp_path: Path) -> None:
    families.save("qwen3_moe", tmp_path)
    for name in ("pytorch_model.bin", "figure.png", "consolidated.safetensors"):
        (tmp_path / name).write_bytes(POINTER)
    try:
        _load(tmp_path)
    except MoetoolError as error:
        assert "lfs" not in str(error) and "tokenizer" in str(error)
