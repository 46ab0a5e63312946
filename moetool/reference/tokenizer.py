"""Training of a byte-level BPE tokenizer on the training documents."""

import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from moetool.errors import UsageError
from moetool.models.checkpoint import read_tokenizer

FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")

_ALPHABET = 256  # every byte is a token, so that no text is unknown


def tokenizer_of(folder: Path) -> tuple[Any, dict[str, bytes]]:
    """Return the tokenizer of a model, and its files by name.

    Raises:
        UsageError: it has none.
    """
    files = {name: (folder / name).read_bytes() for name in FILES if (folder / name).is_file()}
    return read_tokenizer(folder), files


def learn_tokenizer(documents: Iterable[str], vocabulary: int, like: Path) -> tuple[Any, dict[str, bytes]]:
    """Learn a vocabulary; return a tokenizer of transformers, and its files by name.

    Digits stay single tokens, as in the embedded model, so that a number's tokens do not depend on its context.

    Args:
        vocabulary: number of tokens, special ones included.
        like: folder of the model whose special tokens, settings and chat template to copy.

    Raises:
        UsageError: the vocabulary has no room for the bytes and the special tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    special = special_tokens(like)
    if vocabulary < _ALPHABET + len(special):
        raise UsageError(
            f"data.vocabulary is {vocabulary}, expected at least {_ALPHABET + len(special)}: every byte and "
            f"{len(special)} special tokens"
        )
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator(documents, trainer)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for name, content in tokenizer_of(like)[1].items():
            (folder / name).write_bytes(content)
        made.save(str(folder / "tokenizer.json"))
        return tokenizer_of(folder)


def special_tokens(folder: Path) -> list[str]:
    """Return the special tokens of a model's tokenizer, in the order of their ids."""
    content: dict[str, Any] = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    return [token["content"] for token in sorted(content["added_tokens"], key=lambda t: t["id"]) if token["special"]]
