"""Model configs whose sizes cannot be are refused before a model is built."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from moetool.base.errors import MismatchError, MoetoolError, UsageError
from moetool.models.checkpoint import Checkpoint, read_tokenizer
from tests.refusals import refused
from tests.tiny_shape import CONFIG, write_shape


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_experts_per_tok": 0}, "num_experts_per_tok: found 0, expected 1 to 8"),
        ({"num_experts_per_tok": -1}, "num_experts_per_tok: found -1, expected 1 to 8"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok: found 9, expected 1 to 8"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers is 1,000,000, expected at most"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: found 0"),
        ({"hidden_size": -32}, "hidden_size: found -32"),
        ({"max_position_embeddings": 0}, "max_position_embeddings: found 0"),
        ({"hidden_size": 10**12}, "hidden_size"),
        ({"n_routed_experts": 10**9}, "experts"),
        ({"vocab_size": "many"}, r"cannot read .*field 'vocab_size': .*expected int, got str"),
        ({"text_config": {"model_type": "qwen3_moe"}}, "has a text part, but .* models have none"),
        ({"num_attention_heads": 3, "q_lora_rank": -1}, "cannot read"),
    ],
)
def test_sizes_that_cannot_be_are_refused(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    write_shape(tmp_path / "m")
    (tmp_path / "m" / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    with pytest.raises(MoetoolError, match=says) as caught:
        Checkpoint(tmp_path / "m", weights=False).spec  # noqa: B018 - reading it builds it
    assert "config.json" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["[1, 2]", "7", '{"a": ', "\x00", '{"added_tokens": 7}'])
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
def test_tokenizer_files_that_cannot_be_are_refused_in_one_line(
    name: str, content: str, reference: Path, tmp_path: Path
) -> None:
    shutil.copytree(reference, tmp_path / "m")
    (tmp_path / "m" / name).write_text(content)
    try:
        Checkpoint(tmp_path / "m").tokenizer("The king")
    except UsageError as error:
        assert "has no tokenizer that can be read" in str(error) and "\n" not in str(error)
    else:
        assert name == "special_tokens_map.json" or content.startswith("{")


def test_a_pipe_in_the_place_of_a_config_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with refused(MismatchError, "named pipe"):
        Checkpoint(tmp_path, weights=False)


@pytest.mark.parametrize("beside", ["README.md", "tokenizer_config.json", "special_tokens_map.json"])
def test_a_folder_without_a_tokenizer_gets_no_empty_one(beside: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", "num_experts": 8}))
    (tmp_path / beside).write_text("{}")
    with pytest.raises(UsageError, match=r"has no tokenizer; put the tokenizer\.json of the model there"):
        read_tokenizer(tmp_path)
