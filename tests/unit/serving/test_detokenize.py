"""Incremental detokenisation and stop strings, each against the result on the whole text."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from moetool.base import assets
from moetool.serving.detokenize import REPLACEMENT, StopStrings, Vocabulary


def byte_level() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(assets.path("data", "reference-moe"))


def sentencepiece() -> PreTrainedTokenizerBase:
    """Llama 2's kind: a space begins a word, unknown characters are byte tokens, the first space is dropped."""
    words = ["▁", "▁a", "a", "▁hello", "llo", "▁▁", "你", "▁好", "\n", ".", "▁.", "x" * 9]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocabulary = {name: id for id, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names[:3]])
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def wordpiece() -> PreTrainedTokenizerBase:
    names = ["[UNK]", "[PAD]", "un", "##believ", "##able", "day", ",", "!"]
    tokenizer = Tokenizer(models.WordPiece({name: id for id, name in enumerate(names)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]")


TOKENIZERS = {make.__name__: make() for make in (byte_level, sentencepiece, wordpiece)}
VOCABULARIES = {name: Vocabulary(tokenizer) for name, tokenizer in TOKENIZERS.items()}


def stream(name: str, ids: list[int]) -> list[str]:
    detokenizer = VOCABULARIES[name].detokenizer()
    return [*map(detokenizer.push, ids), detokenizer.finish()]


def whole(name: str, ids: list[int]) -> str:
    return TOKENIZERS[name].decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize(
    "text",
    ["Hello, world", "🙂👩‍👩‍👧 a🙂", "你好世界。\n", "naïve café \u0301", " \t\n  two  spaces ", "1234 + 5 = ?", ""],
)
def test_text_arrives_whole_and_never_by_half_characters(text: str) -> None:
    pieces = stream("byte_level", TOKENIZERS["byte_level"].encode(text, add_special_tokens=False))
    assert "".join(pieces) == text
    assert not any(REPLACEMENT in piece for piece in pieces)


def test_text_is_given_out_as_soon_as_it_is_certain() -> None:
    ids = TOKENIZERS["byte_level"].encode("Hello you", add_special_tokens=False)
    assert stream("byte_level", ids)[-1] == ""
    assert all(stream("byte_level", ids)[:-1])


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_streamed_text_equals_the_decoding_of_the_whole(name: str, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, len(TOKENIZERS[name]) - 1), max_size=40))
    assert "".join(stream(name, ids)) == whole(name, ids)


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_broken_and_whole_byte_runs_decode_as_the_whole(data: st.DataObject) -> None:
    runs = st.text(max_size=3).map(lambda text: list(text.encode())) | st.lists(st.integers(0, 255), max_size=3)
    words = st.sampled_from([0, 1, 2, *range(259, 272)]).map(lambda id: [id])
    parts = data.draw(st.lists(runs.map(lambda run: [3 + byte for byte in run]) | words, max_size=12))
    ids = [id for part in parts for id in part]
    assert "".join(stream("sentencepiece", ids)) == whole("sentencepiece", ids)


def test_special_tokens_have_no_text_unless_asked_for() -> None:
    tokenizer, vocabulary = TOKENIZERS["byte_level"], VOCABULARIES["byte_level"]
    ids = tokenizer.encode("<|user|>hi<|endoftext|>", add_special_tokens=False)
    assert "".join(stream("byte_level", ids)) == "hi"
    shown = vocabulary.detokenizer(hidden=())
    assert "".join([*map(shown.push, ids), shown.finish()]) == "<|user|>hi<|endoftext|>"


@pytest.mark.parametrize("name", TOKENIZERS)
def test_ids_beyond_the_tokenizer_have_no_text(name: str) -> None:
    last = len(TOKENIZERS[name]) - 1
    assert "".join(stream(name, [4096, last, 5000, last])) == whole(name, [last, last])


def test_tokens_by_themselves() -> None:
    ids = TOKENIZERS["byte_level"].encode("🙂", add_special_tokens=False)
    vocabulary = VOCABULARIES["byte_level"]
    assert b"".join(map(vocabulary.token_bytes, ids)).decode() == "🙂"
    assert vocabulary.shown(ids[0]) == "bytes:\\xf0"
    assert VOCABULARIES["sentencepiece"].shown(3 + 0xE4) == "bytes:\\xe4"
    assert VOCABULARIES["sentencepiece"].shown(TOKENIZERS["sentencepiece"].convert_tokens_to_ids("▁a")) == " a"


@pytest.mark.parametrize("run", [[3 + 0xFF], [0], [3 + 0xFF, 0], [259], [260, 3 + 0xE4]])
def test_detokenising_decodes_each_token_a_few_times(run: list[int]) -> None:
    num_decoded = 0

    class Counting(Vocabulary):
        def _decode(self, tokens: list[int]) -> str:
            nonlocal num_decoded
            num_decoded += len(tokens)
            return super()._decode(tokens)

    detokenizer = Counting(TOKENIZERS["sentencepiece"]).detokenizer()
    for token in run * 500:
        detokenizer.push(token)
    detokenizer.finish()
    assert num_decoded <= 5 * 500 * len(run)


def cut(text: str, stops: list[str]) -> str:
    return text[: min((text.find(stop) for stop in stops if stop in text), default=len(text))]


def feed(stops: list[str], chunks: list[str]) -> tuple[list[str], bool]:
    search = StopStrings(stops)
    return [*map(search.push, chunks), search.finish()], search.matched is not None


@pytest.mark.parametrize(
    ("stops", "chunks", "given", "matched"),
    [
        ([], ["ab", "c"], ["ab", "c", ""], False),
        (["STOP"], ["on S", "T", "OP more"], ["on ", "", "", ""], True),
        (["STOP"], ["on S", "T", "ART"], ["on ", "", "START", ""], False),
        (["STOP"], ["on ST"], ["on ", "ST"], False),
        (["\n\n"], ["a\n", "b\n", "\nc"], ["a", "\nb", "", ""], True),
        (["aab"], ["aaa", "b"], ["a", "", ""], True),
        (["abcd", "bc"], ["abc", "d"], ["", "", ""], True),  # the stop string that begins first wins
        (["abcd", "bc"], ["abc", "x"], ["", "a", ""], True),
        (["abcd", "bc"], ["abc"], ["", "a"], True),
        (["。"], ["好", "。", "x"], ["好", "", "", ""], True),
    ],
)
def test_stop_strings(stops: list[str], chunks: list[str], given: list[str], matched: bool) -> None:
    assert feed(stops, chunks) == (given, matched)


@settings(deadline=None, max_examples=500)
@given(
    stops=st.lists(st.text("ab🙂", min_size=1, max_size=5), max_size=4),
    chunks=st.lists(st.text("ab🙂", max_size=4), max_size=12),
)
def test_any_chunks_give_the_text_before_the_leftmost_stop(stops: list[str], chunks: list[str]) -> None:
    text = "".join(chunks)
    given, matched = feed(stops, chunks)
    assert "".join(given) == cut(text, stops)
    assert matched == any(stop in text for stop in stops)
    # Nothing is held that can no longer become a stop string.
    if not matched:
        held = given[-1]
        assert not held or any(stop.startswith(held) for stop in stops)


@settings(deadline=None, max_examples=200)
@given(text=st.text("ab🙂你\n ", max_size=30), stop=st.text("ab🙂你\n ", min_size=1, max_size=3))
def test_stop_strings_across_tokens(text: str, stop: str) -> None:
    pieces = stream("byte_level", TOKENIZERS["byte_level"].encode(text, add_special_tokens=False))
    assert "".join(feed([stop], pieces)[0]) == cut(text, [stop])
