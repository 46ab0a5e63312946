"""The command `moetool guide`: the guides of the package, on the terminal."""

import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Annotated

import typer

from moetool.base import tables
from moetool.base.errors import UsageError, unknown_name
from moetool.cli.flags import Json

ORDER = (
    *("quickstart", "traces", "predictors", "policies", "placements", "clusters", "serving", "plugins"),
    *("formats", "papers", "benchmarks", "speed", "security", "verify", "architecture", "project", "glossary"),
)
"""Topics in reading order; others follow."""
MOST_FOUND = 8
"""Sections that a search shows."""


def topics() -> dict[str, str]:
    """Return the text of each guide by its topic, the file's name."""
    found = {
        item.name.removesuffix(".md"): item.read_text(encoding="utf-8")
        for item in (files("moetool") / "guide").iterdir()
        if item.name.endswith(".md")
    }
    return dict(sorted(found.items(), key=lambda pair: (_rank(pair[0]), pair[0])))


def sections(texts: Mapping[str, str], words: Sequence[str]) -> list[dict[str, str]]:
    """Return topic, heading and best line of the sections that contain all words, or words with the same stem.

    If no section has all, those with the most of them are returned. A glossary entry comes first, then sections with
    more of the words in their heading, then those with more of them in one line: a sentence, a table row or code.
    """
    wanted = " ".join(words).lower().split()
    stems = [re.sub(r"(?<=\w{4})(ies|ing|ed|es|e|y)$|(?<=\w{3})s$", "", word) for word in wanted]

    def matches(text: str) -> int:
        return sum(re.search(rf"\b{re.escape(stem)}", text, re.IGNORECASE) is not None for stem in stems)

    found: list[tuple[int, int, int, dict[str, str]]] = []
    for topic, text in texts.items():
        for heading, lines in _parts(text):
            if not (count := matches("\n".join((heading, *lines)))):
                continue
            line = max(lines, key=matches, default="")
            named = len(wanted) + 1 if line.startswith(f"{' '.join(wanted)} |") else matches(heading)
            found.append((-count, -named, -matches(line), {"topic": topic, "section": heading, "text": line}))
    most = min((one[0] for one in found), default=0)
    return [row for count, *_, row in sorted(found, key=lambda one: one[:3]) if count == most]


def _parts(text: str) -> list[tuple[str, list[str]]]:
    """Return heading and lines of each section of a guide: sentences and table rows, then lines of code."""
    parts: list[tuple[str, list[str], list[str]]] = []
    for number, block in enumerate(re.split(r"^```.*\n", text, flags=re.M)):
        if number % 2:  # code, in which a comment is not a heading
            parts[-1][2].extend(filter(None, map(str.strip, block.splitlines())))
            continue
        for part in re.split(r"^(?=##? )", block, flags=re.M):
            heading, _, body = part.partition("\n") if part.startswith("#") else ("", "", part)
            if heading or not parts:
                parts.append((heading.lstrip("# "), [], []))
            joined = re.sub(r"(?<!\n)\n(?![|\n-]|\d+\. ) *", " ", body.replace("**", ""))  # a paragraph in one line
            for line in joined.splitlines():
                pieces = [line] if line.startswith("|") else re.split(r"(?<=[.:]) (?=[A-Z`*])", line)
                parts[-1][1].extend(filter(None, (piece.strip("|- ") for piece in pieces)))
    return [(heading, [*prose, *code]) for heading, prose, code in parts]


def guide(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="TOPIC|WORDS", help="Guide to read, or words to find in all (default: list guides)."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Read the guides (paged on a terminal, Markdown when piped) or search them."""
    texts = topics()
    if not words:
        rows = [{"topic": name, "title": text.partition("\n")[0].lstrip("# ")} for name, text in texts.items()]
        if as_json:
            tables.print_json(rows)
        else:
            tables.print_table("guides: moetool guide TOPIC", ["topic", "about"], [list(r.values()) for r in rows], 2)
            tables.print_paragraph("search them: moetool guide WORDS, e.g. moetool guide api key")
        return
    if len(words) == 1 and words[0] in texts:
        if as_json:
            tables.print_json({"topic": words[0], "text": texts[words[0]]})
        else:
            tables.print_markdown(texts[words[0]])
        return
    found = sections(texts, words)
    if not found:
        if len(words) == 1:
            raise unknown_name("topic", words[0], texts)
        raise UsageError(f"no section of the guides has any of {' '.join(words)!r}; topics: {', '.join(texts)}")
    if as_json:
        tables.print_json(found)
        return
    rows_shown = [list(row.values()) for row in found[:MOST_FOUND]]
    tables.print_table(f"sections with {' '.join(words)}", ["topic", "section", "text"], rows_shown, 3)
    if len(found) > MOST_FOUND:
        tables.print_paragraph(f"{tables.numbered(len(found) - MOST_FOUND, 'more section')}: add a word")


def _rank(name: str) -> int:
    return ORDER.index(name) if name in ORDER else len(ORDER)
