"""Commands and snippets of a Markdown page, run unchanged but on the embedded model."""

import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

INSTEAD = {
    "Qwen/Qwen3-30B-A3B": "reference",
    "16GB": "30MB",
    "--max-prompts 8": "--max-prompts 3",
    "num_experts=64 --set expert_bytes=16.5MiB": "num_experts=32 --set expert_bytes=73728",
    "moetool verify reference": "moetool verify reference --prompts 1 --tokens 2",
}
"""Replacements that let a page's examples run within seconds."""


class Block(NamedTuple):
    """A fenced block: its language, the file that it is for (or empty), and its text."""

    language: str
    file: str
    text: str


def blocks(page: str, instead: Mapping[str, str] = INSTEAD) -> Iterator[Block]:
    """The fenced blocks of a page in order."""
    for said, replacement in instead.items():
        page = page.replace(said, replacement)
    for language, file, text in re.findall(r"^```(\w+) ?(\S*)\n(.*?)^```", page, re.S | re.M):
        yield Block(language, file, text)


def commands(block: Block) -> list[list[str]]:
    """The commands of a bash or console block as word lists; a quoted word may span lines."""
    found: list[list[str]] = []
    line = ""
    for part in block.text.replace("\\\n", " ").splitlines():
        line += part
        if line.count('"') % 2:
            line += " "
            continue
        if words := shlex.split(line, comments=True):
            found.append(words)
        line = ""
    return found


def cluster_of(folder: Path, names: tuple[str, ...]) -> Path:
    """A cluster.toml with one GPU per server and room for the embedded model."""
    servers = [
        f'[[servers]]\nname = "{name}"\n[[servers.gpus]]\nmemory_bytes = "40MB"\nreserved_bytes = "24MB"\n'
        for name in names
    ]
    file = folder / "cluster.toml"
    file.write_text('link_bytes_s = "62.5MB"\nlink_latency_s = 0.001\n\n' + "\n".join(servers))
    return file
