"""Texts that repeat others: against all pairs compared one by one."""

import random

import pytest

from moetool.base.errors import UsageError
from moetool.prompts.near_duplicates import NearDuplicates
from tests.refusals import refused


def words(rng: random.Random, count: int) -> list[str]:
    return [f"w{rng.randrange(3000)}" for _ in range(count)]


def triples(text: str) -> set[tuple[str, ...]]:
    """Three words in a row, of a text that holds nothing else."""
    return set(zip(text.split(), text.split()[1:], text.split()[2:], strict=False))


@pytest.mark.parametrize(("similarity", "missed"), [(0.7, 8), (0.8, 1), (0.88, 0)])
def test_what_is_found_is_what_all_pairs_say(similarity: float, missed: int) -> None:
    rng = random.Random(1)
    texts: list[str] = []
    for _ in range(25):  # families of texts that grow apart, so that every similarity occurs
        text = words(rng, 50)
        for _ in range(6):
            texts.append(" ".join(text))
            text[rng.randrange(50)] = f"w{rng.randrange(3000)}"
    rng.shuffle(texts)
    kept: list[set[tuple[str, ...]]] = []
    found = NearDuplicates(similarity)
    wrong = expected = 0
    for text in texts:
        mine = triples(text)
        repeats = any(len(mine & other) >= similarity * len(mine | other) for other in kept)
        if not repeats:
            kept.append(mine)
        expected += repeats
        wrong += found.repeats(text) != repeats
    assert 40 < expected < 130
    assert wrong <= missed  # the bands are made for 0.8; of pairs less alike they see fewer


def test_nothing_is_found_that_is_not_there() -> None:
    rng = random.Random(2)
    prefix = words(rng, 100)
    texts = [" ".join(prefix + words(rng, 40)) for _ in range(150)]  # all share an instruction: similarity 0.55
    found = NearDuplicates()
    assert not any(found.repeats(text) for text in texts)
    assert (found.num_exact, found.num_near) == (0, 0)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("What is it?", "what  is\nIT?"),
        ("the ﬁrst \uff21\uff22\uff23", "the first abc"),  # one ligature, full-width letters
        ("Straße", "STRASSE"),
    ],
)
def test_case_white_space_and_compatible_characters_make_no_difference(first: str, second: str) -> None:
    found = NearDuplicates(1.0)
    assert not found.repeats(first)
    assert found.repeats(second)
    assert (found.num_exact, found.num_near) == (1, 0)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("Q: What is 0 plus 0?\nA:", "Q: What is 0 plus 1?\nA:"),
        ("已知集合甲乙丙丁,求交集", "已知函数甲乙丙丁,求导数"),
        ("Which word?\n##  #\n#### ", "Which word?\n#  ##\n # ##"),  # drawings of the same signs
        ("", "."),
    ],
)
def test_short_texts_with_another_word_are_another_text(first: str, second: str) -> None:
    found = NearDuplicates()
    assert not found.repeats(first)
    assert not found.repeats(second)
    assert found.repeats(second)


def test_languages_without_spaces_are_compared_by_characters() -> None:
    text = "命题者要求考生在规定的时间内完成作文并且不得抄袭任何已经发表的文章内容否则不予评分"
    found = NearDuplicates()
    assert not found.repeats(text)
    assert found.repeats(text + "呢")


def test_half_a_surrogate_pair_is_text_too() -> None:
    found = NearDuplicates()
    assert not found.repeats("a \ud83d b c")
    assert found.repeats("A \ud83d b c")


@pytest.mark.parametrize("similarity", [0.0, -1.0, 1.01, float("nan")])
def test_a_similarity_that_makes_no_sense_is_refused(similarity: float) -> None:
    with refused(UsageError, "similarity"):
        NearDuplicates(similarity)
