"""Every command and snippet of the guides that needs no other machine, in the order in which guides are read."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from moetool.cli.guide import topics
from tests.command_line import exit_code
from tests.documents import INSTEAD, blocks, cluster_of, commands
from tests.servers import serving

SHORT = {'"Qwen/Qwen3-30B-A3B"': "reference", **INSTEAD}
SERVERS = ("clinic", "court", "lab")


@contextmanager
def served(plan: Path) -> Iterator[str]:
    """The URL of a server of that plan."""
    from moetool.cache_plan import CachePlan
    from moetool.models.checkpoint import Checkpoint
    from moetool.runtime.assembly import ServeOptions, build_engine

    engine = build_engine(Checkpoint.open("reference"), options=ServeOptions(), plan=CachePlan.load(plan))
    engine.start()
    with serving(engine) as (url, _):
        yield url


def test_every_command_and_snippet_works(
    tmp_path: Path, reference: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, "."])
    cluster_of(tmp_path, SERVERS)
    done: set[str] = set()
    for topic, page in topics().items():
        namespace: dict[str, Any] = {"reference": str(reference)}
        server = None
        for block in blocks(page, SHORT):
            if block.file:
                (tmp_path / block.file).parent.mkdir(exist_ok=True)
                (tmp_path / block.file).write_text(block.text)
            elif block.language == "python":
                exec(compile(block.text, f"{topic}.md", "exec"), namespace)
            elif block.language == "bash":
                for words in commands(block):
                    line = " ".join(words)
                    if words[:2] == ["moetool", "serve"]:
                        server = served(tmp_path / words[words.index("--plan") + 1])
                        namespace["url"] = server.__enter__()
                    elif words[0] == "moetool" and line not in done:
                        assert exit_code(monkeypatch, *words[1:]) == 0, f"{topic}: {line}\n{capsys.readouterr().err}"
                    done.add(line)
        if server is not None:
            server.__exit__(None, None, None)
        capsys.readouterr()
    assert len(done) > 15


def test_the_glossary_is_the_packages() -> None:
    import re

    import moetool

    assert moetool.__doc__ is not None
    terms = re.findall(r"^    (\S.*?)  +(\S.*)$", moetool.__doc__.partition("The glossary")[2], re.MULTILINE)
    assert len(terms) > 30
    assert topics()["glossary"].endswith("".join(f"| {term} | {meaning} |\n" for term, meaning in terms))
