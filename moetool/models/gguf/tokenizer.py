"""Tokenizers that GGUF files hold.

transformers builds one from the vocabulary and the merges of a file, whatever its architecture. The file only names the
rule that splits text before merging (`tokenizer.ggml.pre`). transformers knows some of these rules. For all others it
splits as GPT-2 does, which gives tokens that the model was not trained on. This module adds rules and refuses the rest.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moetool.base.errors import UsageError

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
_UPPER, _LOWER = (rf"[{kinds}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]" for kinds in (r"\p{Lu}\p{Lt}", r"\p{Ll}"))
_WORDS = "|".join(
    rf"[^\r\n\p{{L}}\p{{N}}]?{letters}(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    for letters in (f"{_UPPER}*{_LOWER}+", f"{_UPPER}+{_LOWER}*")
)
_KIMI_K2 = rf"\p{{Han}}+|{_WORDS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""Source: tokenization_kimi.py of moonshotai/Kimi-K2-Instruct; llama.cpp splits words without regard to case."""
_OWN = {"deepseek-v3": _DEEPSEEK_V3, "kimi-k2": (_KIMI_K2,)}


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
    known = {*splits, *_GPT2, *_SAME_AS, *_OWN}
    if kind == "gpt2" and rule not in known:
        found = (
            "does not name its rule for splitting text (tokenizer.ggml.pre)"
            if rule is None
            else f"splits text by the rule {rule!r}, which moetool does not know"
        )
        raise UsageError(f"{file} {found}; put the original model's tokenizer.json into the same directory")
    made = PreTrainedTokenizerFast.from_pretrained(file.parent, gguf_file=file.name)
    if kind == "gpt2" and rule not in splits:
        patterns = [splits[_SAME_AS[rule]]] if rule in _SAME_AS else _OWN.get(rule, ())
        made.backend_tokenizer.pre_tokenizer = _pre_tokenizer(patterns, digits=rule in _DIGITS)
    return made


def _pre_tokenizer(patterns: Sequence[str], digits: bool) -> Any:
    """Pre-tokenizer that splits by patterns in turn; without patterns as GPT-2 does."""
    from tokenizers import Regex, pre_tokenizers

    steps: list[Any] = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
    steps += [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not patterns)])
