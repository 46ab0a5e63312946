"""A model's files are opened and described once, and a skeleton that was copied is one that was built."""

import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from moetool.base.families import FAMILIES
from moetool.models.checkpoint import Checkpoint
from moetool.models.files import tensor_index
from moetool.runtime.assembly import build_engine
from moetool.runtime.budget import divide_with_slots
from moetool.runtime.serve_options import ServeOptions
from tests import families

SUPPORTED = sorted(name for name, family in FAMILIES.items() if not family.refused)
_opened: Counter[str] | None = None


def _on_event(event: str, arguments: tuple[Any, ...]) -> None:
    if _opened is not None and event == "open" and isinstance(arguments[0], str | bytes | os.PathLike):
        _opened[os.fsdecode(arguments[0])] += 1


def _count_calls(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[Any]:
    calls: list[Any] = []
    real: Callable[..., Any] = getattr(owner, name)

    def counted(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments)
        return real(*arguments, **options)

    monkeypatch.setattr(owner, name, counted)
    return calls


def test_an_engine_reads_and_builds_everything_once(reference: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The config by what the process opens, whoever opens it; the header and the skeleton by who makes them."""
    global _opened
    built = _count_calls(monkeypatch, AutoModelForCausalLM, "from_config")
    parsed = _count_calls(monkeypatch, tensor_index, "read_header")
    sys.addaudithook(_on_event)
    _opened = Counter()
    try:
        with Checkpoint.open("reference") as checkpoint:
            options = ServeOptions(kv_tokens=512)
            memory = divide_with_slots(checkpoint, options, 20).device_bytes
            engine = build_engine(checkpoint, options=options, policy="lru", device_memory_bytes=memory)
            assert engine.spec is checkpoint.spec and engine.tokenizer is checkpoint.tokenizer
            engine.close()
        opened = _opened
    finally:
        _opened = None
    assert opened[str(reference / "config.json")] == 1
    assert len(parsed) == 1 and len(built) == 1


def test_close_closes_what_was_opened_and_leaves_what_is_known(reference: Path) -> None:
    def descriptors() -> int:
        return sum(one.resolve().name == "model.safetensors" for one in Path("/proc/self/fd").iterdir())

    before = descriptors()
    with Checkpoint.open(reference) as checkpoint:
        first, second = checkpoint.open_shards(), checkpoint.expert_files()
        assert descriptors() == before + 2
        first.close()
        assert descriptors() == before + 1 and second.read_into(0, torch.empty(second.slot_bytes, dtype=torch.uint8))
    assert descriptors() == before
    spec = checkpoint.spec
    with checkpoint:
        assert checkpoint.expert_files().spec is spec


@pytest.mark.parametrize("family", SUPPORTED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_copied_skeleton_is_one_that_transformers_builds(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    config = families.config(family)
    config.save_pretrained(tmp_path)
    checkpoint = Checkpoint.open(tmp_path, weights=False)
    ours = checkpoint.empty_model(dtype)
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(config.get_text_config(), dtype=dtype).eval()

    def described(model: Any) -> dict[str, Any]:
        tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        return {name: (tensor.dtype, tensor.shape, tensor.device) for name, tensor in tensors}

    assert described(ours) == described(theirs)
    assert ours.config.dtype == theirs.config.dtype == dtype
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())  # ties are kept
    assert {tensor.dtype for tensor in checkpoint.skeleton.parameters()} <= {torch.bfloat16, torch.float32}  # as it was
