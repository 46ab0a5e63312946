"""Tokenizers in GGUF files: text becomes the tokens that the model was trained on, or the file is refused."""

import shutil
from pathlib import Path

import pytest

from moetool.base.errors import UsageError
from moetool.models.checkpoint import Checkpoint
from tests import gguf_oracle

gguf = pytest.importorskip("gguf")
from tests.gguf_models import spelled  # noqa: E402  # needs the package

GOLDEN = Path(__file__).parents[1] / "golden" / "gguf"
TEXTS = (
    "Hello 12345 world, it's 7 o'clock.\n\n  def f(x):\n\treturn x**2 - 10_000\n",
    "東京は1,234円 and naïve ÄÖÜ — ok?!<|user|>What's  up<|assistant|>",
)


def _spelled(name: str, folder: Path, reference: Path, rule: str | None = "refact") -> Path:
    """A golden file with the embedded model's vocabulary."""
    return spelled(GOLDEN / f"{name}.gguf", folder / f"{name}.gguf", reference, rule)


@pytest.mark.parametrize("name", gguf_oracle.MODELS)
def test_a_file_of_any_architecture_gives_the_tokens_of_its_vocabulary(
    name: str, reference: Path, tmp_path: Path
) -> None:
    theirs, ours = Checkpoint.open(reference).tokenizer, Checkpoint.open(_spelled(name, tmp_path, reference)).tokenizer
    for text in TEXTS:
        assert ours(text)["input_ids"] == theirs(text)["input_ids"]
        assert ours.decode(ours(text)["input_ids"]) == text
    chat = [{"role": "user", "content": TEXTS[0]}]
    assert ours.apply_chat_template(chat, tokenize=False) == theirs.apply_chat_template(chat, tokenize=False)
    assert ours.eos_token == "<|endoftext|>"


@pytest.mark.parametrize(
    ("rule", "pieces"),
    [
        ("gpt-2", ["it", "'s", " 12345", " x", "=-", "1", "\n", "\n", "ok"]),
        ("refact", ["it", "'s", " ", "1", "2", "3", "4", "5", " x", "=-", "1", "\n", "\n", "ok"]),
        ("qwen2", ["it", "'s", " ", "1", "2", "3", "4", "5", " x", "=-", "1", "\n\n", "ok"]),
        ("hunyuan", ["it", "'s", " ", "1", "2", "3", "4", "5", " x", "=-", "1", "\n\n", "ok"]),
        ("glm4", ["it", "'s", " ", "123", "45", " x", "=-", "1", "\n\n", "ok"]),
        ("deepseek-v3", ["it", "'s", " ", "123", "45", " x", "=-", "1", "\n\n", "ok"]),
        ("kimi-k2", ["it's", " ", "123", "45", " x", "=-", "1", "\n\n", "ok"]),
    ],
)
def test_text_is_split_as_the_rule_says(rule: str, pieces: list[str], reference: Path, tmp_path: Path) -> None:
    made = Checkpoint.open(_spelled("olmoe", tmp_path, reference, rule)).tokenizer
    split = made.backend_tokenizer.pre_tokenizer.pre_tokenize_str("it's 12345 x=-1\n\nok")
    assert [piece.replace("Ġ", " ").replace("Ċ", "\n") for piece, _ in split] == pieces


def test_what_the_rule_of_deepseek_keeps_together(reference: Path, tmp_path: Path) -> None:
    made = Checkpoint.open(_spelled("deepseek2-sigmoid", tmp_path, reference, "deepseek-v3")).tokenizer
    text = "a.append(東京タワー)+1"
    split = [text[slice(*place)] for _, place in made.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)]
    assert split == ["a", ".append", "(", "東京タワー", ")+", "1"]


def test_words_of_kimi_begin_at_capitals_and_end_at_han(reference: Path, tmp_path: Path) -> None:
    made = Checkpoint.open(_spelled("kimi-linear", tmp_path, reference, "kimi-k2")).tokenizer
    text = "aB.HelloWORLD'LL don't東京タワー)+1  \n ok"
    split = [text[slice(*place)] for _, place in made.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)]
    assert split == ["a", "B", ".Hello", "WORLD'LL", " don't", "東京", "タワー", ")+", "1", "  \n", " ok"]


@pytest.mark.parametrize("rule", ["deepseek-llm", None])
def test_an_unknown_rule_is_refused_unless_a_tokenizer_lies_beside(
    rule: str | None, reference: Path, tmp_path: Path
) -> None:
    path = _spelled("deepseek2-softmax", tmp_path, reference, rule)
    why = "does not name its rule" if rule is None else f"by the rule {rule!r}"
    with pytest.raises(UsageError, match=f"{why}.* put the original model's tokenizer.json") as caught:
        _ = Checkpoint.open(path).tokenizer
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    for file in reference.glob("tokenizer*"):
        shutil.copy(file, tmp_path)
    expected = Checkpoint.open(reference).tokenizer(TEXTS[0])["input_ids"]
    assert Checkpoint.open(path).tokenizer(TEXTS[0])["input_ids"] == expected
