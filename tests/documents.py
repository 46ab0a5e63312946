"""The commands and snippets of a Markdown page, run as they stand but on the embedded model."""

import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

INSTEAD = {
    "Qwen/Qwen3-30B-A3B": "reference",
    "16GB": "30MB",
    "--max-prompts 8": "--max-prompts 3",
    "num_experts=64 --set expert_bytes=17301504": "num_experts=32 --set expert_bytes=73728",
    "moetool verify reference": "moetool verify reference --prompts 1 --tokens 2",
}
"""What a page says for readers, and what a test runs so that it takes seconds."""


class Block(NamedTuple):
    """A fenced block: its language, the file that it is meant for (or nothing), and its text."""

    language: str
    file: str
    text: str


def blocks(page: str, instead: Mapping[str, str] = INSTEAD) -> Iterator[Block]:
    """The fenced blocks of a page, in their order."""
    for said, replacement in instead.items():
        page = page.replace(said, replacement)
    for language, file, text in re.findall(r"^```(\w+) ?(\S*)\n(.*?)^```", page, re.S | re.M):
        yield Block(language, file, text)


def commands(block: Block) -> list[list[str]]:
    """The commands of a block of bash or console, in words; a quoted word may span lines."""
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
    """A cluster.toml with room for the embedded model, a GPU a server."""
    servers = [
        f'[[servers]]\nname = "{name}"\n[[servers.gpus]]\nmemory_bytes = "40MB"\nreserved_bytes = "24MB"\n'
        for name in names
    ]
    file = folder / "cluster.toml"
    file.write_text('link_bytes_s = "62.5MB"\nlink_latency_s = 0.001\n\n' + "\n".join(servers))
    return file
