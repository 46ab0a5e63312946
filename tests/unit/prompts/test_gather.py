"""Embedded prompt sets and the readers of JSONL, Parquet and text."""

import json
import os
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from moetool.base import assets
from moetool.base.errors import MismatchError, MoetoolError, UsageError
from moetool.prompts import gather as prompts
from tests import prompt_puzzles as puzzles

NAMES = ["arithmetic", "ascii_words", "chat", "code", "encyclopedia", "exam", "narratives"]
BOM = b"\xef\xbb\xbf"


def embedded(name: str) -> Path:
    return assets.path("data", "prompts", f"{name}.jsonl")


def refused(source: Path | str, *parts: str, kind: type[MoetoolError] = MismatchError) -> str:
    """Loading raises `kind`, whose message is one line with all `parts` and a next step."""
    with pytest.raises(kind) as caught:
        prompts.load([str(source)])
    message = str(caught.value)
    assert type(caught.value) is kind
    assert "\n" not in message
    assert [part for part in parts if part not in message] == [], message
    return message


def test_the_embedded_sets_are_seven() -> None:
    assert prompts.names() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_an_embedded_set_is_whole(name: str) -> None:
    rows = [json.loads(line) for line in embedded(name).read_text(encoding="utf-8").splitlines()]
    loaded = prompts.load([name])
    assert len(rows) >= 50
    assert [row["id"] for row in rows] == [f"{name}-{i:03d}" for i in range(1, len(rows) + 1)]
    assert all(set(row) == {"id", "prompt", "answer", "task"} and row["task"] == name for row in rows)
    assert [(p.dataset, p.task, p.prompt_id, p.text, p.answer) for p in loaded] == [
        (name, name, row["id"], row["prompt"], row["answer"]) for row in rows
    ]


@pytest.mark.parametrize("name", NAMES)
def test_embedded_prompts_are_neither_terse_nor_long(name: str) -> None:
    for prompt in prompts.load([name]):
        words = re.findall(r"[\u4e00-\u9fff]|[^\s\u4e00-\u9fff]+", prompt.text)  # each Chinese character is one
        assert 15 <= len(words) <= 160, prompt


@pytest.mark.parametrize("name", [name for name in NAMES if name != "arithmetic"])
def test_embedded_prompts_are_unlike_one_another(name: str) -> None:
    # Drawings have hardly any words, so there a token is a line.
    split = str.splitlines if name == "ascii_words" else re.compile(r"\w+").findall
    tokens = [frozenset(split(prompt.text.lower())) for prompt in prompts.load([name])]
    alike = [(i, j) for j, b in enumerate(tokens) for i, a in enumerate(tokens[:j]) if len(a & b) >= 0.8 * len(a | b)]
    assert alike == []


def test_arithmetic_prompts_differ() -> None:
    texts = [prompt.text for prompt in prompts.load(["arithmetic"])]
    assert len(set(texts)) == len(texts)


@pytest.mark.parametrize("name", puzzles.GENERATED)
def test_a_generated_set_is_what_its_generator_gives(name: str) -> None:
    made = puzzles.jsonl(puzzles.GENERATED[name](puzzles.SEED, puzzles.COUNT))
    assert embedded(name).read_text(encoding="utf-8") == made
    assert puzzles.GENERATED[name](1, 50) != puzzles.GENERATED[name](2, 50)


def test_arithmetic_is_right() -> None:
    signs = {"plus": "+", "minus": "-", "times": "*", "divided by": "/"}
    nouns = {"sum": "+", "difference": "-", "product": "*", "quotient": "/"}
    problem = re.compile(
        r"(?:The (sum|difference|product|quotient) of (\d+) and (\d+) is"
        r"|(?:Compute |Q: )?(\d+) (\+|-|\*|/|plus|minus|times|divided by) (\d+)"
        r"(?:\. Answer:| equals| = \?\nA:| =)) (-?\d+)"
    )
    total = 0
    for prompt in puzzles.arithmetic(3, 100):
        text = f"{prompt.text} {prompt.answer}"
        found = problem.findall(text)
        for noun, a, b, c, verb, d, result in found:
            sign, left, right = (nouns[noun], int(a), int(b)) if noun else (signs.get(verb, verb), int(c), int(d))
            expected = {"+": left + right, "-": left - right, "*": left * right, "/": left / max(right, 1)}[sign]
            assert expected == int(result), text
        total += len(found)
        assert problem.sub("", text).strip(".\n") == "", text
    assert total > 800


def test_block_letters_are_five_rows_and_no_two_alike() -> None:
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    drawn = [puzzles.block_letters(letter, "#") for letter in letters]
    assert len(set(drawn)) == len(letters)
    assert all(art.count("\n") == 4 for art in drawn)
    assert puzzles.block_letters("HI", "").splitlines()[2] == "HHHHH   I"


def test_exam_answers_are_letters_of_options() -> None:
    for prompt in prompts.load(["exam"]):
        assert prompt.answer in ("A", "B", "C", "D")
        assert re.findall(r"^([A-D])\. ", prompt.text, re.M) == ["A", "B", "C", "D"]
    answers = [prompt.answer for prompt in prompts.load(["exam"])]
    assert max(map(answers.count, "ABCD")) <= len(answers) / 3


def test_all_is_every_set_and_max_prompts_counts_in_each() -> None:
    loaded = prompts.load(["all"], max_prompts=3)
    assert [prompt.dataset for prompt in loaded] == [name for name in NAMES for _ in range(3)]


def test_a_source_named_twice_counts_once() -> None:
    assert prompts.load(["chat", "code", "chat"], max_prompts=2) == prompts.load(["chat", "code"], max_prompts=2)


def test_jsonl(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    lines = ['{"prompt": "first"}', "", '{"prompt": "zweiter ü", "answer": 7, "task": "t", "id": 12, "more": [1]}']
    file.write_bytes(BOM + "\r\n".join(lines).encode())
    assert prompts.load([str(file)]) == [
        prompts.Prompt(dataset="mine", task="mine", prompt_id="1", text="first", answer=None),
        prompts.Prompt(dataset="mine", task="t", prompt_id="12", text="zweiter ü", answer="7"),
    ]


def test_parquet(tmp_path: Path) -> None:
    file = tmp_path / "mine.parquet"
    columns = {"prompt": ["a", "b", "c"], "answer": ["x", None, "z"], "id": [5, 6, 7], "junk": [0.1, 0.2, 0.3]}
    pq.write_table(pa.table(columns), file)
    loaded = prompts.load([str(file)], max_prompts=2)
    assert [(p.task, p.prompt_id, p.text, p.answer) for p in loaded] == [
        ("mine", "5", "a", "x"),
        ("mine", "6", "b", None),
    ]


@pytest.mark.parametrize(
    ("content", "texts"),
    [
        ("one\ntwo\n\n\n\nthree\n", ["one\ntwo", "three"]),
        ("one\n\ntwo\n<|endoftext|>\n  three\n<|endoftext|>\n", ["one\n\ntwo", "  three"]),
        ("one\r\n<|endoftext|>\r\n\r\ntwo", ["one", "two"]),
        ("<|endoftext|>\n<|endoftext|>\nonly", ["only"]),
    ],
)
def test_text(tmp_path: Path, content: str, texts: list[str]) -> None:
    file = tmp_path / "mine.txt"
    file.write_bytes(content.encode())
    loaded = prompts.load([str(file)])
    assert [prompt.text for prompt in loaded] == texts
    assert [prompt.prompt_id for prompt in loaded] == [str(i) for i in range(1, len(texts) + 1)]


@pytest.mark.parametrize("suffix", ["jsonl", "txt"])
def test_only_the_beginning_is_read(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"large.{suffix}"
    with file.open("wb") as out:
        out.write(b'{"prompt": "one"}\n\n{"prompt": "two"}\n\n')
        out.write(b"\xff not UTF-8 \xff\n")  # a reader that went on would refuse it
        out.truncate(1 << 33)  # sparse, and too long to read it all
    assert len(prompts.load([str(file)], max_prompts=2)) == 2


def test_unknown_names_are_refused_with_the_nearest(tmp_path: Path) -> None:
    refused("aritmetic", "unknown dataset", "did you mean 'arithmetic'", "narratives", kind=UsageError)
    refused(tmp_path / "absent.jsonl", "no file at", ".parquet", "--data", kind=UsageError)
    refused("./absent", "no file at", kind=UsageError)


def test_what_is_no_prompt_file_is_refused(tmp_path: Path) -> None:
    table = tmp_path / "table.xlsx"
    table.write_text("prompt\nhello\n")
    refused(table, "'.xlsx'", ".jsonl", kind=UsageError)
    refused(tmp_path, "a directory", ".jsonl", kind=UsageError)


@pytest.mark.parametrize("arguments", [([], None), (["chat"], 0), (["chat"], -1)])
def test_senseless_arguments_are_refused(arguments: tuple[list[str], int | None]) -> None:
    with pytest.raises(UsageError):
        prompts.load(arguments[0], max_prompts=arguments[1])


@pytest.mark.parametrize("content", [b"", b"\n\n  \n", BOM])
@pytest.mark.parametrize("suffix", ["jsonl", "txt"])
def test_empty_files_are_refused(tmp_path: Path, suffix: str, content: bytes) -> None:
    file = tmp_path / f"empty.{suffix}"
    file.write_bytes(content)
    refused(file, str(file), "no prompt", "--data")


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("{oops", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[1]", "a JSON list"),
        ("{}", "no 'prompt'"),
        ('{"text": "hello"}', "'text' and no 'prompt'"),
        ('{"prompt": null}', "null"),
        ('{"prompt": ["hello"]}', "list"),
        ('{"prompt": " \\n "}', "blank"),
        ('{"prompt": "half \\ud83d"}', "surrogate"),
        ('{"prompt": "hello", "answer": {}}', "'answer'"),
        ('{"prompt": "hello", "id": true}', "'id'"),
    ],
)
def test_a_wrong_jsonl_line_is_refused_with_its_number(tmp_path: Path, line: str, found: str) -> None:
    file = tmp_path / "wrong.jsonl"
    file.write_text(f'{{"prompt": "fine"}}\n\n{line}\n')
    refused(file, f"{file}:3 ", found, "expected")


@pytest.mark.parametrize(("suffix", "mark"), [("jsonl", b""), ("txt", b""), ("jsonl", BOM), ("txt", BOM)])
def test_invalid_utf8_is_refused_with_its_offset(tmp_path: Path, suffix: str, mark: bytes) -> None:
    file = tmp_path / f"latin1.{suffix}"
    file.write_bytes(mark + b'{"prompt": "fine"}\n' + b'{"prompt": "caf\xe9"}\n')
    refused(file, f"{file}, byte {len(mark) + 19 + 15} ", "not UTF-8")


def test_wrong_parquet_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "wrong.parquet"
    pq.write_table(pa.table({"text": ["a"], "label": [1]}), file)
    refused(file, str(file), "text, label", "column 'prompt'")
    pq.write_table(pa.table({"prompt": ["a", None]}), file)
    refused(file, "row 2", "null")
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), file)
    refused(file, "no prompt")
    bad = pa.array([b"\xff"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"prompt": bad}), file)
    refused(file, "not UTF-8")


def test_damaged_parquet_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "damaged.parquet"
    pq.write_table(pa.table({"prompt": [f"prompt {i}" for i in range(500)]}), file)
    whole = file.read_bytes()
    for damaged in (b"", b"PAR1", whole[: len(whole) // 2], whole[:200] + bytes(100) + whole[300:], b"hello" * 100):
        file.write_bytes(damaged)
        refused(file, str(file), "damaged", "expected Parquet")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "secret.txt"
    file.write_text("hello")
    file.chmod(0)
    refused(file, "cannot read", kind=MoetoolError)


CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "What is 2+2?"}]},
    {"role": "assistant", "content": "4"},
]


def test_chats_end_before_their_last_answer(tmp_path: Path) -> None:
    rows = [{"messages": CHAT, "task": "sums", "id": 7}, {"messages": CHAT[:2], "answer": "four"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second = _kept(tmp_path / "a.jsonl")
    assert (first.text, first.answer, first.task, first.prompt_id) == ("Be brief.\n\nWhat is 2+2?", "4", "sums", "7")
    said = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2+2?"})
    assert first.messages == said == second.messages
    assert second.answer == "four"
    pq.write_table(pa.table({"messages": [[{"role": "user", "content": "Hello there"}]]}), tmp_path / "b.parquet")
    (chat,) = _kept(tmp_path / "b.parquet")
    assert chat.messages == ({"role": "user", "content": "Hello there"},)


def _kept(file: Path) -> list[prompts.Prompt]:
    return prompts.gather([str(file)], options=prompts.DataOptions(duplicates="keep")).prompts


def test_the_chat_template_makes_a_chats_tokens() -> None:
    from moetool.models.checkpoint import Checkpoint

    tokenizer = Checkpoint.open("reference").tokenizer
    chat = prompts.Prompt(
        dataset="d", task="t", prompt_id="1", text="Hi", messages=({"role": "user", "content": "Hi"},)
    )
    expected = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], add_generation_prompt=True)
    assert chat.token_ids(tokenizer, 4096) == expected["input_ids"] != tokenizer("Hi")["input_ids"]
    tokenizer.chat_template = None
    assert chat.token_ids(tokenizer, 4096) == tokenizer("Hi")["input_ids"]


@pytest.mark.parametrize(
    "messages",
    [
        "hi",
        [],
        [{"role": "user"}],
        [{"content": "x"}],
        [{"role": "assistant", "content": "x"}],
        [{"role": "user", "content": [{"type": "image_url"}]}],
        [{"role": "user", "content": " "}],
        [7],
    ],
)
def test_chats_without_text_are_refused(tmp_path: Path, messages: object) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    refused(tmp_path / "a.jsonl", "a.jsonl:1", "messages")


@pytest.mark.parametrize(
    ("second", "facts"),
    [
        ({"role": "robot", "content": "x"}, ("message 2", "field role")),
        ({"role": "user", "content": [{"type": "image_url"}]}, ("message 2", "field content", "image_url")),
        ({"role": "assistant", "tool_calls": [{"function": {"name": 7}}]}, ("field tool_calls.0.function.name",)),
        ({"role": "user"}, ("message 2", "content")),
    ],
)
def test_an_invalid_message_is_named_with_its_field(
    tmp_path: Path, second: dict[str, object], facts: tuple[str, ...]
) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}, second]}
    (tmp_path / "a.jsonl").write_text(json.dumps(chat))
    assert "Value error" not in refused(tmp_path / "a.jsonl", *facts)


def test_malformed_rows_are_left_out_and_counted(tmp_path: Path) -> None:
    lines = [b'{"prompt": "first one"}', b"{oops", b'{"prompt": "caf\xe9"}', b'{"text": 1}', b'{"prompt": "last one"}']
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    (tmp_path / "b.csv").write_text("prompt,answer\nalone\ntwo cells,yes\n,no\n")
    pq.write_table(pa.table({"prompt": ["", None, "a row of Parquet"]}), tmp_path / "c.parquet")
    files = [str(tmp_path / name) for name in ("a.jsonl", "b.csv", "c.parquet")]
    gathered = prompts.gather(files)
    assert [prompt.text for prompt in gathered.prompts] == ["first one", "last one", "two cells", "a row of Parquet"]
    assert [origin["malformed"] for origin in gathered.origins] == [3, 2, 2]
    places = ["a.jsonl:2", "a.jsonl, byte", "a.jsonl:4", "b.csv:2", "b.csv:4", "c.parquet, row 1", "c.parquet, row 2"]
    assert [place for place, why in zip(places, gathered.refused, strict=True) if place not in why] == []
    assert prompts.gather(files[:1], max_prompts=1).refused == []


def test_chats_have_the_shapes_that_serve_accepts(tmp_path: Path) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    said = [
        {"role": "developer", "content": "Use tools."},
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "4"},
        {"role": "assistant", "content": "It is 4."},
    ]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": said}))
    (chat,) = _kept(tmp_path / "a.jsonl")
    assert [message["role"] for message in chat.messages] == ["system", "user", "assistant", "tool"]
    assert chat.messages[2]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 2}}
    assert (chat.messages[2]["content"], chat.messages[3]["tool_call_id"]) == ("", "c1")
    assert (chat.text, chat.answer) == ("Use tools.\n\n2+2?\n\n4", "It is 4.")


def test_csv_headers_may_have_semicolons_and_capitals(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes("\ufeffPrompt; Answer\none, two;5\n".encode())
    (row,) = _kept(tmp_path / "a.csv")
    assert (row.text, row.answer) == ("one, two", "5")
    pq.write_table(pa.table({"Prompt": ["hi there"], "TASK": ["t"]}), tmp_path / "b.parquet")
    assert _kept(tmp_path / "b.parquet")[0].task == "t"


def test_csv_prompts(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('id,prompt,answer\n7,"one, two\nthree ""four""",5\n,other text,\n')
    first, second = _kept(tmp_path / "a.csv")
    assert (first.prompt_id, first.text, first.answer) == ("7", 'one, two\nthree "four"', "5")
    assert (second.prompt_id, second.answer) == ("2", None)
    (tmp_path / "b.tsv").write_text("prompt\ttask\nhello world\tgreeting\n")
    assert _kept(tmp_path / "b.tsv")[0].task == "greeting"
    (tmp_path / "a.csv").write_text("prompt,answer\nx\n")
    refused(tmp_path / "a.csv", "a.csv:2", "cells")
    (tmp_path / "a.csv").write_text('prompt\n"open\n')
    refused(tmp_path / "a.csv", "not CSV")
    (tmp_path / "a.csv").write_text("question\nx\n")
    refused(tmp_path / "a.csv", "'question'")
