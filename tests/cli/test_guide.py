"""`moetool guide`: what it lists, prints and refuses."""

import json
from importlib.resources import files

import pytest

from moetool import tables
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
    code, _, err = run("trace")
    assert code == 2 and "unknown topic 'trace': did you mean 'traces'?" in err
