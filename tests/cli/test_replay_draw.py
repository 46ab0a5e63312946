"""`moetool replay --draw`: loaded bytes and hit rate by memory."""

from pathlib import Path
from xml.etree import ElementTree

from tests.command_line import Run


def test_curves_of_every_policy(run: Run, trace: Path, tmp_path: Path) -> None:
    file = tmp_path / "memory.svg"
    replay = ("replay", "--trace", trace, "--policy", "lru,belady", "--budget")
    code, out, err = run(*replay, "25%,50%", "--draw", file)
    assert code == 0 and "belady" in out, err
    words = {text.text for text in ElementTree.parse(file).iter("{http://www.w3.org/2000/svg}text")}
    assert {"lru", "belady", "hit rate", "memory for experts, MB"} <= words
    for arguments, fact in (
        (("25%", "--draw", tmp_path / "one.svg"), "two budgets"),
        (("25%,50%", "--draw", tmp_path / "one.gif"), "one.gif"),
        (("25%,50%", "--draw", file), str(file)),
    ):
        code, _, err = run(*replay, *arguments)
        assert code == 2 and fact in err
