"""Tokens of a GGUF file that end an answer, as in llama.cpp."""

from collections.abc import Mapping
from typing import Any

_ENDS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"),
    *("<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>"),
    *("<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~["),  # noqa: RUF001  # DeepSeek's
)
_ROLES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("eos", "eot", "eom"), ()),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
"""Ends that a header names, and their texts where it does not."""
END_TEXTS = frozenset((*_ENDS, *(text for texts in _ROLES.values() for text in texts)))
"""Texts of tokens that may end an answer."""


def end_tokens(metadata: Mapping[str, Any], ids: Mapping[str, int]) -> list[int]:
    """Tokens that end an answer, that of `eos_token_id` first.

    These are the tokens that the header names (eos, eot, eom, and fim_pad, fim_rep, fim_sep), and those of a text that
    ends an answer in every vocabulary.

    Args:
        metadata: all values of a header.
        ids: ids of the vocabulary's tokens among `END_TEXTS`, by text.

    Source: llama.cpp, src/llama-vocab.cpp, `special_eog_ids`.
    """
    found = []
    for role, texts in _ROLES.items():
        token = metadata.get(f"tokenizer.ggml.{role}_token_id")
        if isinstance(token, int) and 0 <= token < metadata["tokenizer.ggml.tokens"]:
            found.append(token)
        elif token is None:
            found += [ids[text] for text in texts if text in ids][:1]
    found += sorted(ids[text] for text in _ENDS if text in ids)
    excluded = set()
    if ids.keys() & {"<|call|>", "<|calls|>"} and ids.keys() & {"<|return|>", "<|flush|>"}:
        excluded.add(ids.get("<|end|>"))  # it ends a message, and the answer goes on
    if "<|tool_response>" in ids:
        excluded.add(ids.get("</s>"))
    return [token for token in dict.fromkeys(found) if token not in excluded]
