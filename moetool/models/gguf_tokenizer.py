"""Tokenizers that GGUF files hold, and the tokens that end an answer.

transformers builds one from the vocabulary and the merges of a file, whatever its architecture. The file only names the
rule that splits text before merging (`tokenizer.ggml.pre`). transformers knows some of these rules. For all others it
splits as GPT-2 does, which gives tokens that the model was not trained on. This module adds rules and refuses the rest.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moetool.errors import UsageError

_SAME_AS = {"glm4": "llama-bpe", "chatglm-bpe": "llama-bpe", "hunyuan": "qwen2"}
"""Names of rules, and the names under which transformers has the same rules."""
_DIGITS = ("refact", "starcoder")
_GPT2 = ("gpt-2", "olmo", *_DIGITS)
"""Names of GPT-2's rule; those in `_DIGITS` also split off each digit."""
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
"""Source: tokenizer.json of deepseek-ai/DeepSeek-V3."""
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


def read_gguf_tokenizer(file: Path, kind: Any, rule: Any) -> Any:
    """The tokenizer in a GGUF file.

    Args:
        kind: its `tokenizer.ggml.model`.
        rule: its `tokenizer.ggml.pre`.

    Raises:
        UsageError: moetool does not know the rule.
        Exception: any error of transformers, which checks little.
    """
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf import gguf_tokenizer_mapping as theirs

    splits = theirs.GGUF_PRE_TOKENIZER_SPLITS
    known = {*splits, *_GPT2, *_SAME_AS, "deepseek-v3"}
    if kind == "gpt2" and rule not in known:
        found = (
            "does not name its rule for splitting text (tokenizer.ggml.pre)"
            if rule is None
            else f"splits text by the rule {rule!r}, which moetool does not know"
        )
        raise UsageError(f"{file} {found}; put the original model's tokenizer.json into the same directory")
    made = PreTrainedTokenizerFast.from_pretrained(file.parent, gguf_file=file.name)
    if kind == "gpt2" and rule not in splits:
        patterns = _DEEPSEEK_V3 if rule == "deepseek-v3" else [splits[_SAME_AS[rule]]] if rule in _SAME_AS else []
        made.backend_tokenizer.pre_tokenizer = _pre_tokenizer(patterns, digits=rule in _DIGITS)
    return made


def _pre_tokenizer(patterns: Sequence[str], digits: bool) -> Any:
    """Pre-tokenizer that splits by patterns in turn; without patterns as GPT-2 does."""
    from tokenizers import Regex, pre_tokenizers

    steps: list[Any] = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
    steps += [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not patterns)])
