"""Public data sets: every recipe on a copy of some rows, what the hub answers, and what is wrong with copies."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from moetool.base.errors import MismatchError, MoetoolError, UsageError
from moetool.prompts import dataset_recipe
from moetool.prompts import gather as prompts
from moetool.prompts.gather import DataOptions, GatheredPrompts, Prompt
from tests.public_rows import PARAGRAPH, SAMPLES, Sample

SHARED = Path(os.environ.get("MOETOOL_SHARED", Path(__file__).parents[3].parent / "shared")) / "data"


def write(file: Path, rows: list[dict[str, Any]]) -> None:
    """Rows in the format that the file's name says."""
    file.parent.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist(rows)
    if file.suffix == ".parquet":
        pq.write_table(table, file)
    elif file.suffix == ".arrow":
        with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    elif file.suffix == ".json":
        file.write_text(json.dumps(rows), encoding="utf-8")
    elif file.suffix == ".csv":
        import csv

        with file.open("w", newline="", encoding="utf-8") as text:
            writer = csv.DictWriter(text, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def gather(source: str, folder: Path | None, max_prompts: int | None = None, **options: Any) -> GatheredPrompts:
    return prompts.gather([source], max_prompts=max_prompts, options=DataOptions(folder=folder, **options))


def named(name: str) -> str:
    """The data set, by the one task that there is a sample of where it has tasks."""
    sample = SAMPLES[name]
    return f"{name}:{sample.task}" if dataset_recipe.load(name).tasks else name


def refused(kind: type[MoetoolError], call: Callable[[], object], *parts: str) -> str:
    with pytest.raises(kind) as caught:
        call()
    message = str(caught.value)
    assert type(caught.value) is kind
    assert "\n" not in message
    assert [part for part in parts if part not in message] == [], message
    return message


def test_every_recipe_has_a_sample() -> None:
    assert sorted(SAMPLES) == dataset_recipe.names()


@pytest.mark.parametrize("name", SAMPLES)
def test_a_recipe_makes_prompts_of_a_copy_of_the_hub(name: str, tmp_path: Path) -> None:
    sample = SAMPLES[name]
    recipe = dataset_recipe.load(name)
    write(tmp_path / sample.file, [sample.row, {**sample.row, **sample.changes}])
    made = gather(named(name), tmp_path)
    first, second = made.prompts
    expected = Prompt(
        dataset=name,
        task=sample.task,
        prompt_id=sample.prompt_id or first.prompt_id,
        text=sample.prompt,
        answer=sample.answer,
        output=recipe.output,
        input_tokens=recipe.input_tokens,
    )
    assert first == expected
    assert second.text != first.text and second.prompt_id != first.prompt_id
    (origin,) = made.origins
    assert (origin["source"], origin["prompts"], origin["rows"], origin["incomplete"]) == (name, 2, 2, 0)
    assert recipe.licence and recipe.source


def test_lengths_are_those_of_the_papers() -> None:
    lengths = {name: (r.input_tokens, r.output) for name in SAMPLES if (r := dataset_recipe.load(name)).output}
    assert lengths == {
        "bigbench": (None, "answer"),  # Prism, IV-A
        "mmlu_pro": (None, "answer"),
        "wikitext": (None, 20),
        "taco": (None, 20),
        "lmsys_chat_1m": (37, 127),  # FineMoE, 6.2
        "sharegpt": (43, 122),
    }
    assert dataset_recipe.load("bigbench").tasks == (
        "abstract_narrative_understanding",
        "arithmetic",
        "ascii_word_recognition",
    )


@pytest.mark.parametrize("file", ["test.jsonl", "test.json", "test.csv", "test.parquet", "data/test-0.arrow"])
def test_a_copy_may_be_of_any_format(file: str, tmp_path: Path) -> None:
    sample = SAMPLES["gsm8k"]
    write(tmp_path / file, [sample.row])
    (prompt,) = gather("gsm8k", tmp_path).prompts
    assert (prompt.text, prompt.answer) == (sample.prompt, sample.answer)


def test_a_copy_that_datasets_saved(tmp_path: Path) -> None:
    import datasets

    rows = datasets.Dataset.from_list([SAMPLES["squad"].row])
    datasets.DatasetDict({"validation": rows, "train": rows}).save_to_disk(str(tmp_path / "squad"))
    assert gather("squad", tmp_path).prompts[0].text == SAMPLES["squad"].prompt
    rows.save_to_disk(str(tmp_path / "race"))
    refused(MismatchError, lambda: gather("race", tmp_path), "race, row 1", "'article'")
    refused(UsageError, lambda: gather("squad", tmp_path, split="test"), "train", "expected test")


def test_a_copy_may_hold_prompts_already(tmp_path: Path) -> None:
    write(tmp_path / "gsm8k" / "mine.jsonl", [{"id": "a", "prompt": "1+1=", "answer": "2", "task": "sums"}])
    (prompt,) = gather("gsm8k", tmp_path).prompts
    assert (prompt.dataset, prompt.task, prompt.prompt_id, prompt.text) == ("gsm8k", "sums", "test/a", "1+1=")


def test_tasks_are_read_one_after_the_other_and_named_ones_alone(tmp_path: Path) -> None:
    row = SAMPLES["bigbench"].row
    for task in (*dataset_recipe.load("bigbench").tasks, "anagrams"):
        rows = [{**row, "idx": i, "inputs": f"{task} asks {i * 77}"} for i in range(6)]
        write(tmp_path / "bigbench" / f"{task}.jsonl", rows)
    made = gather("bigbench", tmp_path, max_prompts=2)
    assert [p.task for p in made.prompts] == [task for task in dataset_recipe.load("bigbench").tasks for _ in "ab"]
    assert len({p.prompt_id for p in made.prompts}) == 6
    assert {p.task for p in gather("bigbench", tmp_path, task="anagrams").prompts} == {"anagrams"}
    assert {p.task for p in gather("bigbench:anagrams", tmp_path).prompts} == {"anagrams"}
    refused(UsageError, lambda: gather("bigbench:anagram", tmp_path), "did you mean 'anagrams'")
    several = ["bigbench", "gsm8k"]
    refused(UsageError, lambda: prompts.gather(several, options=DataOptions(task="x")), "NAME:TASK")


def test_the_choice_is_seeded_and_not_the_first_ones(tmp_path: Path) -> None:
    write(tmp_path / "test.jsonl", [{"question": f"{i} {i * i}", "answer": str(i)} for i in range(200)])

    def chosen(**options: Any) -> list[str | None]:
        return [prompt.answer for prompt in gather("gsm8k", tmp_path, **options).prompts]

    assert chosen(max_prompts=9, seed=1) == chosen(max_prompts=9, seed=1) != chosen(max_prompts=9, seed=2)
    assert any(int(answer or 0) > 100 for answer in chosen(max_prompts=9))
    assert chosen(max_prompts=9, buffer=1) == [str(i) for i in range(9)]
    assert chosen() == [str(i) for i in range(200)]
    (origin,) = gather("gsm8k", tmp_path, max_prompts=9, seed=4, buffer=50).origins
    assert (origin["seed"], origin["buffer"], origin["prompts"]) == (4, 50, 9)


def test_an_id_does_not_hang_on_the_order(tmp_path: Path) -> None:
    write(tmp_path / "test.jsonl", [{"question": f"{i} {i * i}", "answer": str(i)} for i in range(40)])
    by_seed = [{p.text: p.prompt_id for p in gather("gsm8k", tmp_path, 40, seed=seed).prompts} for seed in (1, 2)]
    assert by_seed[0] == by_seed[1]
    assert len(set(by_seed[0].values())) == 40


def test_what_repeats_is_dropped_over_all_sources_and_said(tmp_path: Path) -> None:
    squad, words = SAMPLES["squad"].row, PARAGRAPH.split()
    near = " ".join([*words[:-1], "week."])
    changes = ({}, {"id": "2"}, {"id": "3", "context": near}, {"id": "4", "context": "Short."})
    rows = [{**squad, **change} for change in changes]
    write(tmp_path / "squad" / "validation.jsonl", rows)
    write(tmp_path / "own.jsonl", [{"prompt": "another"}, {"prompt": " Another "}, {"prompt": "third"}])
    sources = ["squad", str(tmp_path / "own.jsonl")]
    options = DataOptions(folder=tmp_path)
    made = prompts.gather(sources, options=options)
    assert [p.prompt_id for p in made.prompts] == ["validation/56dd", "validation/4", "1", "3"]
    counts = [(o["prompts"], o["exact_duplicates"], o["near_duplicates"], o["similarity"]) for o in made.origins]
    assert counts == [(2, 1, 1, 0.8), (2, 1, 0, 0.8)]
    assert made.duplicates == 3
    kept = prompts.gather(sources, options=DataOptions(folder=tmp_path, duplicates="keep"))
    assert (len(kept.prompts), kept.duplicates) == (7, 0)
    # Enough are read to have as many as were asked for after that.
    assert len(prompts.gather(["squad"], max_prompts=2, options=options).prompts) == 2
    write(tmp_path / "again.jsonl", [{"prompt": "ANOTHER"}])
    refused(MismatchError, lambda: prompts.load([*sources[1:], str(tmp_path / "again.jsonl")]), "repeat", "again.jsonl")


def test_rows_that_lack_a_value_are_counted(tmp_path: Path) -> None:
    row = SAMPLES["lmsys_chat_1m"].row
    bad: list[Any] = [[], None, [{"role": "assistant", "content": "Hi"}], [{"role": "user", "content": "  "}]]
    write(tmp_path / "train.jsonl", [row, *({**row, "conversation": turns} for turns in bad)])
    made = gather("lmsys_chat_1m", tmp_path)
    assert (len(made.prompts), made.origins[0]["incomplete"]) == (1, 4)
    write(tmp_path / "train.jsonl", [{**row, "conversation": turns} for turns in bad])
    refused(MismatchError, lambda: gather("lmsys_chat_1m", tmp_path), "holds no prompt", "4 rows lack")


def test_headings_of_wikitext_are_no_prompts(tmp_path: Path) -> None:
    write(tmp_path / "test.jsonl", [{"text": text} for text in ("", " = Harbours = \n", PARAGRAPH)])
    assert [p.text for p in gather("wikitext", tmp_path).prompts] == [PARAGRAPH]


def test_unanswerable_and_secret_answers_are_none(tmp_path: Path) -> None:
    write(tmp_path / "squad" / "validation.jsonl", [{**SAMPLES["squad"].row, "answers": {"text": []}}])
    write(tmp_path / "wic" / "validation.jsonl", [{**SAMPLES["wic"].row, "label": -1}])
    made = prompts.gather(["squad", "wic"], options=DataOptions(folder=tmp_path))
    assert [p.answer for p in made.prompts] == [None, None]


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (
            b'{"query": "x", "answer": "y"}\n',
            ("gsm8k, row 1 has the fields query, answer", "expected a field 'question'"),
        ),
        (b'{"question": {"text": "x"}, "answer": "y"}\n', ("'question' that is a dict", "name a part")),
        (b'{"question": "\xff\xfe"}\n', ("utf-8", "copy it again")),
        (b'{"question": "x"}\nhello\n', ("JSON", "copy it again")),
        (b'{"question": "x \\ud83d"}\n', ("surrogate",)),
        (b"", ("is empty",)),
        (b"\n\n", ("holds no prompt",)),
    ],
)
def test_a_damaged_copy_is_refused(content: bytes, found: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "test.jsonl").write_bytes(content)
    refused(MismatchError, lambda: gather("gsm8k", tmp_path), *found)


def test_a_byte_order_mark_and_carriage_returns_are_no_damage(tmp_path: Path) -> None:
    (tmp_path / "test.jsonl").write_bytes('\ufeff{"question": "wie groß?", "answer": "1"}\r\n\r\n'.encode())
    assert gather("gsm8k", tmp_path).prompts[0].text == "Question: wie groß?\nAnswer:"


def test_signs_of_patterns_in_a_path_are_signs(tmp_path: Path) -> None:
    write(tmp_path / "a[1] *é" / "test.jsonl", [SAMPLES["gsm8k"].row])
    assert len(gather("gsm8k", tmp_path / "a[1] *é").prompts) == 1


def test_a_damaged_parquet_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "test.parquet").write_bytes(b"PAR1 and no more")
    refused(MismatchError, lambda: gather("gsm8k", tmp_path), str(tmp_path), "copy it again")


def test_folders_without_the_rows_are_refused(tmp_path: Path) -> None:
    refused(UsageError, lambda: gather("gsm8k", tmp_path / "none"), "no directory at", "openai/gsm8k")
    refused(UsageError, lambda: gather("gsm8k", tmp_path), "has no file that ends in", "openai/gsm8k")
    row = SAMPLES["gsm8k"].row
    write(tmp_path / "a" / "train.jsonl", [row])
    refused(UsageError, lambda: gather("gsm8k", tmp_path / "a"), "the split train, expected test", "data.split=train")
    assert len(gather("gsm8k", tmp_path / "a", split="train").prompts) == 1
    write(tmp_path / "b" / "test.jsonl", [row])
    write(tmp_path / "b" / "test.parquet", [row])
    refused(UsageError, lambda: gather("gsm8k", tmp_path / "b"), "json and as parquet")
    write(tmp_path / "d" / "socratic" / "test.jsonl", [row])
    refused(UsageError, lambda: gather("gsm8k", tmp_path / "d"), "'main'", "known: socratic")
    assert len(gather("gsm8k:socratic", tmp_path / "d").prompts) == 1
    refused(UsageError, lambda: gather("bigbench:../d", tmp_path / "d"), "'../d' is not a task name")
    write(tmp_path / "c" / "race" / "test.jsonl", [row])
    refused(UsageError, lambda: gather("gsm8k", tmp_path / "c"), "has race, expected a directory gsm8k")


def test_only_the_asked_for_part_of_a_large_copy_is_read(tmp_path: Path) -> None:
    lines = [json.dumps({"question": f"{i} {i * i} " + "x" * 4000, "answer": "1"}) + "\n" for i in range(4000)]
    (tmp_path / "test.jsonl").write_bytes("".join(lines).encode() + b"not JSON\n")  # 16 MB, the last of them damaged
    made = gather("gsm8k", tmp_path, max_prompts=3, buffer=100)
    assert made.origins[0]["rows"] == 3


class Hub:
    """Stands in for `datasets.load_dataset`: remembers how it was called, gives rows or raises."""

    def __init__(self, rows: list[dict[str, Any]] | Exception) -> None:
        self.rows = rows
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __call__(self, *args: Any, **rest: Any) -> Any:
        import datasets

        self.calls.append((args, rest))
        if isinstance(self.rows, Exception):
            raise self.rows
        return datasets.IterableDataset.from_generator(_rows, gen_kwargs={"rows": self.rows})


def _rows(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    yield from rows


@pytest.mark.parametrize("name", SAMPLES)
def test_the_hub_is_asked_for_a_stream_and_runs_no_code(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sample: Sample = SAMPLES[name]
    recipe = dataset_recipe.load(name)
    hub = Hub([sample.row])
    monkeypatch.setattr("datasets.load_dataset", hub)
    (prompt,) = gather(named(name), None, max_prompts=1).prompts
    assert prompt.text == sample.prompt
    ((args, rest),) = hub.calls
    assert rest["streaming"] is True and "trust_remote_code" not in rest
    if recipe.files is None:
        assert args == (recipe.hub, sample.task if recipe.tasks else recipe.config)
        assert rest["split"] == recipe.split
    else:
        assert args == ({"taco": "parquet"}.get(name, "json"),)
        assert rest["data_files"].startswith(f"hf://datasets/{recipe.hub}/")
        assert Path(sample.file).match(rest["data_files"].removeprefix(f"hf://datasets/{recipe.hub}/"))


def test_what_the_hub_refuses_is_said_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from datasets.exceptions import DatasetNotFoundError

    def ask(error: Exception, source: str, kind: type[MoetoolError], *parts: str) -> None:
        monkeypatch.setattr("datasets.load_dataset", Hub(error))
        refused(kind, lambda: gather(source, None), "--data-dir", "hf download", *parts)

    gated = DatasetNotFoundError(
        "Dataset 'lmsys/lmsys-chat-1m' is a gated dataset on the Hub. You must be authenticated to access it."
    )
    terms = ("is gated", "https://huggingface.co/datasets/lmsys/lmsys-chat-1m", "hf auth login")
    ask(gated, "lmsys_chat_1m", UsageError, *terms, "You must be authenticated")
    offline = ConnectionError("Couldn't reach 'x/y' on the Hub (OfflineModeIsEnabled)")
    ask(offline, "gsm8k", MoetoolError, "HF_HUB_OFFLINE is set")
    ask(offline, "lmsys_chat_1m", MoetoolError, *terms, "HF_HUB_OFFLINE is set")
    ask(ConnectionError("Couldn't reach 'x/y' on the Hub (ConnectError)"), "gsm8k", MoetoolError, "ConnectError")
    ask(DatasetNotFoundError("Dataset 'openai/gsm8k' doesn't exist on the Hub"), "gsm8k", UsageError, "openai/gsm8k")
    ask(RuntimeError("two\nlines"), "gsm8k", MismatchError, "(two)")
    monkeypatch.setattr("datasets.load_dataset", Hub(ValueError("BuilderConfig 'x' not found. Available: ['main']")))
    refused(UsageError, lambda: gather("gsm8k:x", None), "no config x and split test", "['main']")
    refused(UsageError, lambda: gather("livecodebench", None, split="train"), "the split test alone")


def test_a_recipe_of_ones_own(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    head = 'hub = "me/mine"\nsplit = "test"\nlicence = "mine"\nsource = "me"\n'
    recipe.write_text(head + 'prompt = "{{{a.b.0}}} {c}"\nanswer = "{c}"\noutput = 5\n')
    write(tmp_path / "copy" / "rows.jsonl", [{"a": {"b": ["x", "y"]}, "c": 4}])
    (prompt,) = gather(str(recipe), tmp_path / "copy").prompts
    assert (prompt.dataset, prompt.text, prompt.answer, prompt.output) == ("mine", "{x} 4", "4", 5)
    for text, *parts in (
        ('prompt = "no field"', "names no field"),
        ('prompt = "{a"', "is damaged"),
        ('prompt = "{a..b}"', "'a..b'", "cannot be read"),
        ('prompt = "{a!r}"', "cannot be read"),
        ('prompt = "{a:upper}"', "letters, commas, yes_no"),
        ('prompt = "{a}"\noutput = "answer"', "no template of an answer"),
        ('prompt = "{a}"\noutput = 0', "output is 0"),
        ('prompt = "{a}"\noutput = "long"', "output"),
        ('prompt = "{a}"\nanwser = "{a}"', "anwser", "did you mean 'answer'"),
        ('prompt = "{a}', "cannot read"),
    ):
        recipe.write_text(head + text + "\n")
        refused(UsageError, lambda: gather(str(recipe), tmp_path / "copy"), *parts)
    recipe.write_text(head + 'prompt = "{missing}"\n')
    refused(MismatchError, lambda: gather(str(recipe), tmp_path / "copy"), "has the fields a, c", "'missing'")
    recipe.write_text(head + 'prompt = "{a:letters}"\n')
    refused(MismatchError, lambda: gather(str(recipe), tmp_path / "copy"), "not a list")


def test_options_without_a_public_set_are_refused(tmp_path: Path) -> None:
    refused(UsageError, lambda: gather("chat", tmp_path), "public data sets", "bigbench")
    refused(UsageError, lambda: gather("chat", None, similarity=2.0), "similarity is 2")
    refused(UsageError, lambda: gather("gsm8k", tmp_path, buffer=0), "data.buffer is 0")
    refused(UsageError, lambda: gather("gsm9k", None), "did you mean 'gsm8k'")


@pytest.mark.parametrize(
    ("source", "folder", "split", "repeats"),
    [
        ("bigbench:arithmetic", "bigbench", None, 0),
        ("mmlu_pro", "mmlu_pro", None, 0),
        ("squad", "squad", None, 30),
        ("gsm8k", "gsm8k", "train", 0),
        ("math_500", "math500", None, 0),
        ("gaokao_bench:history_mcqs", "gaokao_bench", None, 0),
        ("wic", "wic", "train", 0),
        ("wikitext", "wikitext", None, 0),
        ("sharegpt", "chat", None, 0),
    ],
)
@pytest.mark.skipif(not SHARED.is_dir(), reason="needs the shared development data")
def test_prompts_of_the_real_sets(source: str, folder: str, split: str | None, repeats: int) -> None:
    made = gather(source, SHARED / folder, max_prompts=100, split=split)
    assert len(made.prompts) == 100
    assert made.duplicates >= repeats  # SQuAD asks several questions about each paragraph
    assert {prompt.dataset for prompt in made.prompts} == {source.split(":")[0]}
