"""The two generated prompt sets: arithmetic, and words in block letters.

`python -m tests.prompt_puzzles` writes them to data/prompts/ again, byte for byte.
"""

import json
import random
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from moetool.base import assets, durable
from moetool.prompts.gather import Prompt

SEED = 20250101
COUNT = 64

_T = TypeVar("_T")


class _Draw:
    """Random choices that are equal in all Python versions; the standard library guarantees that of `random()` only."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def below(self, end: int) -> int:
        return int(self._random.random() * end)

    def one_of(self, options: Sequence[_T]) -> _T:
        return options[self.below(len(options))]

    def shuffled(self, words: Iterable[str]) -> list[str]:
        return [word for _, word in sorted((self._random.random(), word) for word in words)]

    def digits(self, longest: int) -> int:
        """A number below 10, 100, … or 10**longest, each bound equally likely."""
        return self.below(10 ** (1 + self.below(longest)))


# Five phrasings of a problem: what is asked, and how the answer follows it.
_PHRASINGS = (
    ("Compute {a} {verb} {b}. Answer:", " {c}"),
    ("The {noun} of {a} and {b} is", " {c}."),
    ("Q: {a} {sign} {b} = ?\nA:", " {c}"),
    ("{a} {sign} {b} =", " {c}"),
    ("{a} {verb} {b} equals", " {c}."),
)
_OPERATIONS = (
    ("+", "plus", "sum"),
    ("-", "minus", "difference"),
    ("*", "times", "product"),
    ("/", "divided by", "quotient"),
)


def arithmetic(seed: int, n: int) -> list[Prompt]:
    """Problems with whole numbers: some solved ones, then an open one.

    Every other prompt uses one of the five phrasings, the rest mix them. Quotients are whole.
    """
    draw = _Draw(seed)
    prompts = []
    for number in range(1, n + 1):
        one = draw.one_of(_PHRASINGS)
        lines, result = [], 0
        for _ in range(5 + draw.below(9)):
            asked, answered = one if number % 2 else draw.one_of(_PHRASINGS)
            question, result = _problem(draw, asked)
            lines.append(question + answered.format(c=result))
        lines[-1] = question
        prompts.append(_prompt("arithmetic", number, "\n".join(lines), str(result)))
    return prompts


def _problem(draw: _Draw, phrasing: str) -> tuple[str, int]:
    sign, verb, noun = draw.one_of(_OPERATIONS)
    a, b = draw.digits(5), draw.digits(4)
    if sign == "*":
        b = draw.digits(2)
    if sign == "/":
        b = 1 + draw.digits(3)
        a = b * draw.digits(3)
    result = {"+": a + b, "-": a - b, "*": a * b, "/": a // max(b, 1)}[sign]
    return phrasing.format(a=a, b=b, sign=sign, verb=verb, noun=noun), result


_FONT = {
    "A": ".###. #...# ##### #...# #...#",
    "B": "####. #...# ####. #...# ####.",
    "C": ".#### #.... #.... #.... .####",
    "D": "####. #...# #...# #...# ####.",
    "E": "##### #.... ####. #.... #####",
    "F": "##### #.... ####. #.... #....",
    "G": ".#### #.... #..## #...# .####",
    "H": "#...# #...# ##### #...# #...#",
    "I": "### .#. .#. .#. ###",
    "J": "..### ...#. ...#. #..#. .##..",
    "K": "#..#. #.#.. ##... #.#.. #..#.",
    "L": "#.... #.... #.... #.... #####",
    "M": "#...# ##.## #.#.# #...# #...#",
    "N": "#...# ##..# #.#.# #..## #...#",
    "O": ".###. #...# #...# #...# .###.",
    "P": "####. #...# ####. #.... #....",
    "Q": ".###. #...# #.#.# #..#. .##.#",
    "R": "####. #...# ####. #..#. #...#",
    "S": ".#### #.... .###. ....# ####.",
    "T": "##### ..#.. ..#.. ..#.. ..#..",
    "U": "#...# #...# #...# #...# .###.",
    "V": "#...# #...# #...# .#.#. ..#..",
    "W": "#...# #...# #.#.# ##.## #...#",
    "X": "#...# .#.#. ..#.. .#.#. #...#",
    "Y": "#...# .#.#. ..#.. ..#.. ..#..",
    "Z": "##### ...#. ..#.. .#... #####",
}
_INKS = "#*@X+%"  # and the letter itself
_WORDS = (
    "ACORN AMBER ANVIL APPLE ARROW BADGE BARN BIRCH BOAT BREAD BRICK CABIN CANDLE CHALK CLOUD COPPER CRANE DELTA "
    "DOOR DRUM EAGLE EMBER FERN FLUTE FOX FROST GARDEN GLASS GOAT GRAPE HARBOR HAWK HILL HONEY INK IRON ISLAND "
    "JACKET JAR JUNGLE KAYAK KETTLE KITE LADDER LAMP LEMON LILY MAPLE MOON MOUSE NEST NIGHT OCEAN OLIVE OWL PAPER "
    "PEARL PLUM QUARTZ QUEEN RAIN RIVER ROPE SALT SHELL SMOKE SPOON SWAN TABLE TIGER TORCH TRAIN ULTRA UNCLE VALLEY "
    "VIOLIN VOICE WAGON WATER WHEEL YARN YELLOW ZEBRA ZINC"
)
_QUESTIONS = (
    "{art}\n\nWhich word is drawn above in block letters? Answer with that one word.\nAnswer:",
    "The lines below draw a word of {length} letters. Read it and write it down.\n\n{art}\n\nThe word is",
    "What does this sign say?\n\n{art}\n\nIt is one of these: {options}.\nThe sign says",
    "Question: Somebody drew an English word with characters. Name it.\n\n{art}\n\nAnswer:",
    "{art}\n\nQ: The picture shows one word. Is it {options}?\nA:",
    "User: I cannot read this banner, what is written on it?\n\n{art}\n\nAssistant: The banner says",
    "Every letter below is five rows high. Read the letters from left to right.\n\n{art}\n\nTogether they spell",
    "ASCII art:\n\n{art}\n\nPlain text:",
)


def ascii_words(seed: int, n: int) -> list[Prompt]:
    """Prompts with different words in block letters, in one of several phrasings (84 words exist)."""
    draw = _Draw(seed)
    words = _WORDS.split()
    prompts = []
    for number, word in enumerate(draw.shuffled(words)[:n], start=1):
        others = [other for other in words if other != word]
        options = draw.shuffled([word, *draw.shuffled(others)[:3]])
        text = draw.one_of(_QUESTIONS).format(
            art=block_letters(word, draw.one_of((*_INKS, ""))),
            length=len(word),
            options=f"{', '.join(options[:-1])} or {options[-1]}",
        )
        prompts.append(_prompt("ascii_words", number, text, word))
    return prompts


def block_letters(word: str, ink: str) -> str:
    """A word in capitals five rows high, drawn with `ink`, or each letter with itself if `ink` is empty."""
    drawn = [[row.replace("#", ink or letter) for row in _FONT[letter].split()] for letter in word]
    rows = zip(*drawn, strict=True)
    return "\n".join("  ".join(row).replace(".", " ").rstrip() for row in rows)


def _prompt(name: str, number: int, text: str, answer: str) -> Prompt:
    return Prompt(dataset=name, task=name, prompt_id=f"{name}-{number:03d}", text=text, answer=answer)


def jsonl(prompts: Iterable[Prompt]) -> str:
    """The prompts in the embedded sets' format."""
    rows = ({"id": p.prompt_id, "prompt": p.text, "answer": p.answer, "task": p.task} for p in prompts)
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


GENERATED: dict[str, Callable[[int, int], list[Prompt]]] = {"arithmetic": arithmetic, "ascii_words": ascii_words}


if __name__ == "__main__":
    for name, make in GENERATED.items():
        durable.write_text(assets.path("data", "prompts") / f"{name}.jsonl", jsonl(make(SEED, COUNT)))
