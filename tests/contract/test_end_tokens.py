"""Tokens that end an answer: a GGUF file's as in llama.cpp, a Hugging Face model's as its generation config says."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from moetool.models.checkpoint import Checkpoint
from moetool.models.loading import load_full, load_lazy
from moetool.runtime.decoding import eos_ids
from moetool.runtime.loop.own_caches import open_batcher
from moetool.runtime.request import SamplingParams
from tests import families

gguf = pytest.importorskip("gguf")
from tests.gguf_models import rewritten  # noqa: E402  # needs the package

WHOLE = Path(__file__).parents[1] / "golden" / "gguf" / "qwen3moe.gguf"


def _ends(path: Path) -> list[int]:
    """The tokens that end an answer, of the model with its experts and without."""
    loaded = load_lazy(Checkpoint.open(path), torch.float32)
    found = eos_ids(loaded.model)
    loaded.close()
    assert found == eos_ids(load_full(Checkpoint.open(path), torch.float32).model)
    return sorted(found)


def _file(to: Path, texts: dict[int, str] | None = None, **ids: int) -> Path:
    """The golden file with other texts of tokens, and ids of special tokens in its header."""
    tokens = [(texts or {}).get(number, f"t{number}") for number in range(64)]
    values: dict[str, Any] = {f"tokenizer.ggml.{role}_token_id": token for role, token in ids.items()}
    return rewritten(WHOLE, to / "m.gguf", {"tokenizer.ggml.tokens": tokens, **values})


@pytest.mark.parametrize(
    ("ids", "ends"),
    [
        ({}, []),
        ({"eos": 0}, [0]),
        ({"eos": 0, "eot": 5}, [0, 5]),
        ({"eos": 0, "eot": 5, "eom": 7, "fim_pad": 9, "fim_rep": 11, "fim_sep": 13}, [0, 5, 7, 9, 11, 13]),
        ({"eot": 5, "padding": 6, "bos": 7, "fim_pre": 8}, [5]),
        ({"eos": 0, "eot": 64}, [0]),  # beyond the vocabulary
    ],
)
def test_a_header_names_them(ids: dict[str, int], ends: list[int], tmp_path: Path) -> None:
    assert _ends(_file(tmp_path, **ids)) == ends


@pytest.mark.parametrize(
    ("texts", "ids", "ends"),
    [
        ({8: "<|im_end|>", 9: "<|endoftext|>", 10: "<|im_start|>"}, {"eos": 8}, [8, 9]),
        ({8: "<|eot_id|>", 9: "<|eom_id|>", 10: "<|end_of_text|>"}, {"eos": 10}, [8, 9, 10]),
        ({8: "<|user|>", 9: "<|endoftext|>"}, {"eos": 9}, [9]),
        ({8: "<|user|>", 9: "<|endoftext|>"}, {"eos": 9, "eot": 8}, [8, 9]),
        ({8: "<|end|>", 9: "<end_of_turn>"}, {}, [8, 9]),
        ({8: "<|end|>", 9: "<|return|>", 10: "<|call|>"}, {"eos": 9, "eot": 8}, [9, 10]),  # ends a message only
        ({8: "<|end|>", 9: "<|calls|>", 10: "<|flush|>"}, {}, [9, 10]),
        ({8: "</s>", 9: "<|tool_response>"}, {}, [9]),
        ({8: "<|fim_pad|>", 9: "<|repo_name|>", 10: "<|file_sep|>", 11: "<|fim_prefix|>"}, {}, [8, 9, 10]),
        ({8: "<|fim_pad|>"}, {"fim_pad": 20}, [20]),
    ],
)
def test_texts_name_them_where_the_header_does_not(
    texts: dict[int, str], ids: dict[str, int], ends: list[int], tmp_path: Path
) -> None:
    assert _ends(_file(tmp_path, texts, **ids)) == ends


def test_the_end_of_a_turn_ends_an_answer(tmp_path: Path) -> None:
    full = load_full(Checkpoint.open(_file(tmp_path, eos=0, eot=5)), torch.float32)
    batcher = open_batcher(full.model, max_requests=1, kv_tokens=64)
    try:
        for request, (token, finish) in enumerate(((0, "stop"), (5, "stop"), (6, "length"))):
            batcher.add(request, [3, 4], SamplingParams(max_tokens=4, logit_bias=((token, 1000.0),)))
            outputs = []
            while not batcher.idle:
                outputs += batcher.step()
            assert [output.token for output in outputs] == [token] * (1 if finish == "stop" else 4)
            assert outputs[-1].finish == finish
    finally:
        batcher.close()


def test_further_ends_leave_the_revision_as_it_is(tmp_path: Path) -> None:
    """Plans and traces of a file stay those of the file."""
    plain, ending = _file(tmp_path, eos=0), tmp_path / "ending"
    ending.mkdir()
    assert Checkpoint.open(_file(ending, eos=0, eot=5)).revision == Checkpoint.open(plain).revision


def test_a_generation_config_names_them(tmp_path: Path) -> None:
    families.save("qwen3_moe", tmp_path)
    assert _ends(tmp_path) == [2]
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({"eos_token_id": [2, 7]}))
    assert _ends(tmp_path) == [2, 7]
