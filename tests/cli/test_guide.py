"""`moetool guide`: what it lists, prints and refuses."""

import json
from importlib.resources import files

import pytest

from moetool.base import tables
from tests.command_line import Run

COMMAND = ("guide",)


def test_topics_are_listed_with_their_titles(run: Run) -> None:
    code, out, _ = run("--json")
    listed = {row["topic"]: row["title"] for row in json.loads(out)}
    pages = {item.name: item.read_text(encoding="utf-8") for item in (files("moetool") / "guide").iterdir()}
    assert code == 0 and {f"{topic}.md" for topic in listed} == {name for name in pages if name.endswith(".md")}
    assert all(pages[f"{topic}.md"].startswith(f"# {title}\n") for topic, title in listed.items())
    code, out, _ = run()
    assert code == 0 and all(topic in out for topic in listed)


def test_lines_of_prose_have_at_most_120_columns() -> None:
    for page in (files("moetool") / "guide").iterdir():
        prose = page.read_text(encoding="utf-8").split("\n```")[::2] if page.name.endswith(".md") else []
        lines = [line for part in prose for line in part.splitlines() if not line.startswith("|")]
        assert [line for line in lines if len(line) > 120] == [], page.name


def test_a_topic_is_printed_as_markdown_when_piped(run: Run) -> None:
    code, out, _ = run("traces")
    assert code == 0 and out == (files("moetool") / "guide" / "traces.md").read_text(encoding="utf-8")


def test_a_terminal_gets_it_laid_out_and_paged(monkeypatch: pytest.MonkeyPatch) -> None:
    pages: list[str] = []
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setattr("pydoc.pager", pages.append)
    tables.print_markdown("# Title\n\n| a | b |\n| --- | --- |\n| 1 | 2 |\n")
    (page,) = pages
    assert "Title" in page and "| a |" not in page


def test_a_wrong_topic_is_answered_with_the_nearest(run: Run) -> None:
    code, _, err = run("glossry")
    assert code == 2 and "unknown topic 'glossry': did you mean 'glossary'?" in err


@pytest.mark.parametrize(
    ("words", "topic", "section"),
    [
        ("api key", "security", "Ports"),
        ("hit rate", "glossary", "Glossary: one word for each concept"),
        ("memory qwen3", "serving", "Memory that a model needs"),
        ("GGUF hub", "formats", "GGUF files"),
        ("own policy", "plugins", "Plugins: your own policy, predictor or planner in fifteen lines"),
        ("hosts", "clusters", "Several hosts"),
        ("resume", "traces", "Your own prompts"),
        ("cite", "project", "Trust and cite the numbers"),
        ("delete", "serving", "Warm start"),
        ("which policy", "policies", "Which one"),
        ("compare llama.cpp", "speed", "Comparison with other engines"),
        ("limiting memory", "quickstart", "Common questions"),
        ("gate log", "traces", "Gate log of a server"),
        ("Windows", "project", "Platforms: Linux; macOS and Windows untested"),
        ("report result", "project", "Report a result or a bug"),
        ("def evict", "plugins", "A cache policy: `lab/newest.py`"),  # a line of code
        ("chat.completions.create", "serving", "Clients"),  # a line of code
    ],
)
def test_words_find_the_section_that_answers(run: Run, words: str, topic: str, section: str) -> None:
    code, out, _ = run(*words.split(), "--json")
    assert code == 0 and (topic, section) in [(row["topic"], row["section"]) for row in json.loads(out)][:3]


def test_a_search_on_a_terminal_names_topic_and_section(run: Run) -> None:
    code, out, _ = run("forget")
    assert code == 0 and "Options and special policies" in out and "lfru" not in out
