"""Commands of the README and the guides that need another machine or model: they exist, with the flags named there."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from moetool.cli import main
from moetool.cli.guide import topics

ROOT = Path(__file__).resolve().parents[2]
PAGES = {"README": (ROOT / "README.md").read_text(), **topics()}


def mentioned(page: str) -> Iterator[str]:
    """Each command of a page: whole lines of code, and code within sentences."""
    fenced = re.sub(r"^```.*?^```", "", page, flags=re.S | re.M)
    joined = re.sub(r" *\\\n +", " ", fenced)
    yield from re.findall(r"^    (moetool .*)$", joined, re.M)
    yield from (" ".join(code.split()) for code in re.findall(r"`([^`]+)`", joined) if code.startswith("moetool "))


def split(line: str) -> list[str]:
    """The words of a command, without its comment and what stands for any value."""
    return [word for word in shlex.split(line, comments=True) if not word.startswith("[")][1:]


def test_the_pages_mention_commands() -> None:
    lines = [line for page in PAGES.values() for line in mentioned(page)]
    assert len(lines) > 60 and {split(line)[0] for line in lines} >= {"capture", "serve", "verify", "doctor", "bench"}


@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_a_page_exists(page: str) -> None:
    for line in mentioned(PAGES[page]):
        words = split(line)
        command: Any = get_command(main.app)
        while words and hasattr(command, "commands") and not words[0].startswith("-"):
            assert words[0] in command.commands, f"{page}: {line}"
            command = command.commands[words.pop(0)]
        flags = {flag for option in command.params for flag in (*option.opts, *option.secondary_opts)} | {"--help"}
        used = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert used <= flags, f"{page}: {line}: {used - flags}"
