"""The command `moetool guide`: the guides of the package, on the terminal."""

from importlib.resources import files
from typing import Annotated

import typer

from moetool import tables
from moetool.cli.flags import Json
from moetool.errors import unknown_name

ORDER = (
    *("quickstart", "traces", "memory", "predictors", "policies", "placements", "clusters", "serving", "plugins"),
    *("formats", "papers", "benchmarks", "speed", "security", "verify", "architecture", "project", "glossary"),
)
"""Topics in reading order; others follow."""


def topics() -> dict[str, str]:
    """Return the text of each guide by its topic, the file's name."""
    found = {
        item.name.removesuffix(".md"): item.read_text(encoding="utf-8")
        for item in (files("moetool") / "guide").iterdir()
        if item.name.endswith(".md")
    }
    return dict(sorted(found.items(), key=lambda pair: (_rank(pair[0]), pair[0])))


def guide(
    topic: Annotated[str | None, typer.Argument(metavar="TOPIC", help="Guide to read (default: list all).")] = None,
    as_json: Json = False,
) -> None:
    """Read the guides: paged on a terminal, Markdown when piped."""
    texts = topics()
    if topic is None:
        rows = [{"topic": name, "title": text.partition("\n")[0].lstrip("# ")} for name, text in texts.items()]
        if as_json:
            tables.print_json(rows)
        else:
            tables.print_table("guides: moetool guide TOPIC", ["topic", "about"], [list(r.values()) for r in rows], 2)
        return
    if topic not in texts:
        raise unknown_name("topic", topic, texts)
    if as_json:
        tables.print_json({"topic": topic, "text": texts[topic]})
    else:
        tables.print_markdown(texts[topic])


def _rank(name: str) -> int:
    return ORDER.index(name) if name in ORDER else len(ORDER)
